"""Collective operations between ranks, `Comm`, and a rank's part of a model, `ModelRank`.

Owns the protocol only; `charonia.parallel` implements it. Must not know processes, devices or the
meaning of tensors.

A rank is a process with a part of every model. It has some of the layers (a pipeline stage), and of
each of these some heads and some of the MLP, and some of the vocabulary (a tensor-parallel part)::

    tensor_parallel_size 2            stage 0      stage 1
    pipeline_parallel_size 2        ┌──────────┬───────────┐
                             part 0 │  rank 0  │  rank 2   │    rank = stage · 2 + part
                             part 1 │  rank 1  │  rank 3   │    rank 0 is the engine's process
                                    └──────────┴───────────┘
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Comm(Protocol):
    """Collective operations of a group of ranks. All ranks must call them in the same order.

    Every rank gets bitwise the same result. On CPUs sums are taken in the order of the ranks, so
    they do not depend on the batch; with NCCL they may depend on the size. Tensors are contiguous
    and on the engine's device.

    Raises (all operations):
        RankLostError: a rank has ended or does not respond.
    """

    @property
    def rank(self) -> int:
        """This process's index in the group."""
        ...

    @property
    def size(self) -> int:
        """The number of processes in the group."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum the ranks' tensors, all of the shape of `x`; overwrites and returns `x`."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the ranks' tensors, all of the shape of `x`, as [size, *x.shape]."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Send the tensor of rank `source` to all ranks; overwrites and returns `x`."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum the ranks' tensors [size * n, ...]; return this rank's share, [n, ...]."""
        ...


@dataclass(frozen=True)
class Place:
    """A rank's part of a model.

    Attributes:
        part, num_parts: index and number of the parts of every layer (tensor parallelism).
        stage, num_stages: index and number of the pipeline stages (pipeline parallelism).
    """

    part: int = 0
    num_parts: int = 1
    stage: int = 0
    num_stages: int = 1

    @property
    def is_first(self) -> bool:
        """True if this is the first stage, with the token embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if this is the last stage, with the final norm and the head."""
        return self.stage == self.num_stages - 1


@dataclass(frozen=True)
class Links:
    """The groups in which a rank exchanges a model's tensors; None for those that do not exist.

    Attributes:
        parts: all parts of its stage.
        before, after: pairs with the same part of the previous and of the next stage. The earlier
            stage is rank 0 of the pair.
        logits: the pair of the engine's process, which is rank 0 of it, and the first part of the
            last stage.
    """

    parts: Comm | None = None
    before: Comm | None = None
    after: Comm | None = None
    logits: Comm | None = None


@dataclass(frozen=True)
class ModelRank:
    """A rank's place in one model, and its links; by default it has the whole model."""

    place: Place = field(default_factory=Place)
    links: Links = field(default_factory=Links)
