"""Maps the memory of parameters to the tensors of a checkpoint that fill it, whole or in part.

Owns fusion: matrices with the same input are stacked. Must not know files (`loader` does), layers,
or how a model is split among ranks (`shard` does).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from torch import Tensor

from charonia.data.model.shard import Share
from charonia.data.ops.base import MatrixWeights


@dataclass(frozen=True)
class Piece:
    """Part of a parameter's memory, and the slice of a checkpoint's tensor that fills it."""

    memory: Tensor
    index: tuple[slice, ...]


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor that the checkpoint must have, its shape, and the pieces of it that this rank needs.

    Attributes:
        pieces: disjoint in memory; empty if the tensor belongs to other ranks.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def filling(cls, memory: Tensor | None, name: str, *shares: Share) -> "CheckpointTensor":
        """Fill `memory` with the rank's share of each axis."""
        shape = tuple(share.whole for share in shares)
        if memory is None:
            return cls(name, shape, ())
        pieces = []
        for cuts in product(*(share.cuts() for share in shares)):
            here = tuple(local for local, _ in cuts)
            pieces.append(Piece(memory[here], tuple(stored for _, stored in cuts)))
        return cls(name, shape, tuple(pieces))

    @classmethod
    def whole(cls, memory: Tensor, name: str) -> "CheckpointTensor":
        """Fill `memory` with the whole tensor."""
        return cls.filling(memory, name, *map(Share.full, memory.shape))


class Allocate(Protocol):
    """Allocates a parameter; a loader fills all of it except the padding."""

    def __call__(self, *shape: int, is_padded: bool = False) -> Tensor: ...


class Stack:
    """A matrix stacked from several matrices of the checkpoint that have the same inputs.

    Args:
        outputs: the part's share of the outputs of each matrix, by name.
        has_bias: whether the matrices have biases in the checkpoint.
        adds_bias: whether this part has the biases. If the products of the parts are summed, only
            one part may have them.
    """

    def __init__(
        self,
        allocate: Allocate,
        outputs: dict[str, Share],
        inputs: Share,
        *,
        has_bias: bool,
        adds_bias: bool = True,
    ) -> None:
        self._outputs = outputs
        self._inputs = inputs
        self._has_bias = has_bias
        size = sum(share.size for share in outputs.values())
        is_padded = any(share.is_padded for share in outputs.values())
        bias = allocate(size, is_padded=is_padded) if has_bias and adds_bias else None
        weight = allocate(size, inputs.size, is_padded=is_padded or inputs.is_padded)
        self.weights = MatrixWeights(weight, bias)

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        """Name the tensors that fill it; `prefix` ends with a dot."""
        weight, bias = self.weights.weight, self.weights.bias
        start = 0
        for name, share in self._outputs.items():
            rows = slice(start, start + share.size)
            yield CheckpointTensor.filling(
                weight[rows], f"{prefix}{name}.weight", share, self._inputs
            )
            if self._has_bias:
                memory = bias[rows] if bias is not None else None
                yield CheckpointTensor.filling(memory, f"{prefix}{name}.bias", share)
            start += share.size
