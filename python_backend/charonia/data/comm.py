"""What the ranks of one engine exchange, `Comm`, and which part of a model each has, `ModelRank`.

Owns the protocol alone; `charonia.parallel` implements it. Must not know processes, devices or
what is exchanged.

A rank is a process that has a part of every model: some of its layers (a stage of the pipeline),
and of each of these some heads, some of the MLP and some of the vocabulary (a tensor-parallel
part)::

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
    """Collective operations of a group of ranks, each of which must call them in the same order.

    Every rank has the same result, to the bit. On CPUs a sum is taken in the order of the ranks, so
    a number's sum is also the same whatever the batch; NCCL's may depend on the size. Tensors are
    on the engine's device and contiguous.

    Raises (all of them):
        RankLostError: a rank has ended, or does not answer.
    """

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        ...

    @property
    def size(self) -> int:
        """Processes in the group."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up the ranks' tensors, of one shape; overwrites and returns `x`."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the ranks' tensors, of one shape, as [size, *x.shape]."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Give every rank the tensor of rank `source`; overwrites and returns `x`."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Add up the ranks' tensors [size * n, ...] and return this rank's share, [n, ...]."""
        ...


@dataclass(frozen=True)
class Place:
    """Which part of a model a rank has.

    Attributes:
        part, num_parts: of every layer (tensor parallelism).
        stage, num_stages: of the layers (pipeline parallelism).
    """

    part: int = 0
    num_parts: int = 1
    stage: int = 0
    num_stages: int = 1

    @property
    def is_first(self) -> bool:
        """Whether the token embedding is here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the last norm and the head are here."""
        return self.stage == self.num_stages - 1


@dataclass(frozen=True)
class Links:
    """Whom a rank exchanges a model's numbers with; None where there is nobody.

    Attributes:
        parts: the other parts of its stage.
        before, after: the same part of the stage before, and of the one behind; a pair each, in
            which the earlier stage is rank 0.
        logits: the first part of the last stage and the engine's process, a pair in which the
            latter is rank 0.
    """

    parts: Comm | None = None
    before: Comm | None = None
    after: Comm | None = None
    logits: Comm | None = None


@dataclass(frozen=True)
class ModelRank:
    """A rank's place in one model, and its links; by default the whole model is its own."""

    place: Place = field(default_factory=Place)
    links: Links = field(default_factory=Links)
