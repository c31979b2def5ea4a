"""The decoder of the llama family: token ids in, hidden states and logits out.

Owns what a model is made of, from the embedding to the head. Must not know plans or files.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from charonia.data.model.parameters import Parameters
from charonia.data.model.rotary import rotation_table
from charonia.data.model.spec import ModelSpec
from charonia.data.ops.base import MatrixWeights, Ops, Pages, StepBatch
from charonia.data.ops.native.ops import Guesser, NativeOps


class Hidden(NamedTuple):
    """The residual stream behind the last layer; the last contribution is not added yet."""

    x: Tensor  # [tokens, hidden]
    residual: Tensor  # [tokens, hidden]

    def rows(self, index: Tensor | slice) -> "Hidden":
        """Pick some tokens."""
        return Hidden(self.x[index], self.residual[index])


class Decoder:
    """A whole model.

    Args:
        parameters: loaded; a layer's are let go as soon as `ops` has prepared it, which may copy
            them, so that a model is never in memory twice.
        num_positions: positions that rotary angles are tabulated for, i.e. max_model_len.
    """

    def __init__(
        self, spec: ModelSpec, parameters: Parameters, ops: Ops[Any], *, num_positions: int
    ) -> None:
        self._ops = ops
        self._embedding = parameters.embedding
        self._rotation = rotation_table(
            spec.rope,
            spec.head_dim,
            num_positions,
            self._embedding.dtype,
            self._embedding.device,
        )
        blocks = []
        while parameters.layers:
            layer = parameters.layers.pop(0)
            blocks.append((ops.attention(layer.attention), ops.mlp(layer.mlp)))
        self._layers = ops.layers(blocks)
        self._head = ops.head(parameters.norm, MatrixWeights(parameters.head, None))

    def hidden_states(self, batch: StepBatch, pages: Sequence[Pages]) -> Hidden:
        """Compute a step's tokens, storing their K and V in `pages` (one entry per layer)."""
        step = self._ops.begin(batch, self._rotation)
        residual = self._embedding.index_select(0, batch.token_ids)
        return Hidden(self._layers(residual, step, pages), residual)

    def logits(self, hidden: Hidden) -> Tensor:
        """Map the tokens of `hidden` to [tokens, vocab_size] float32."""
        return self._head(hidden.x, hidden.residual)

    def guesser(self, ops: NativeOps) -> Guesser:
        """All of the model as one native call; `ops` are those that it was made with."""
        return ops.guesser(self._embedding, self._layers, self._head, self._rotation)
