"""The decoder of the llama family: token ids in, hidden states and logits out.

Owns how the layers are joined. Must not know plans, files or devices.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from charonia.data.model.parameters import LayerParameters, Parameters
from charonia.data.model.rotary import rotation_table
from charonia.data.model.spec import ModelSpec
from charonia.data.ops.base import MatrixWeights, Ops, Pages, StepBatch


class Hidden(NamedTuple):
    """The residual stream behind the last layer; the last contribution is not added yet."""

    x: Tensor  # [tokens, hidden]
    residual: Tensor  # [tokens, hidden]

    def rows(self, index: Tensor | slice) -> "Hidden":
        """Pick some tokens."""
        return Hidden(self.x[index], self.residual[index])


class DecoderLayer:
    """Attention and feed-forward, each behind a norm, around a residual stream."""

    def __init__(self, ops: Ops[Any], parameters: LayerParameters) -> None:
        self._attention = ops.attention(parameters.attention)
        self._mlp = ops.mlp(parameters.mlp)

    def __call__(self, x: Tensor | None, residual: Tensor, step: Any, pages: Pages) -> Tensor:
        """Return the layer's last contribution; `residual`, changed in place, lacks it still.

        The addition is left to the next norm, which does both in one pass; all [tokens, hidden].
        """
        return self._mlp(self._attention(x, residual, step, pages), residual)


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
        self._layers = []
        while parameters.layers:
            self._layers.append(DecoderLayer(ops, parameters.layers.pop(0)))
        self._head = ops.head(parameters.norm, MatrixWeights(parameters.head, None))

    def hidden_states(self, batch: StepBatch, pages: Sequence[Pages]) -> Hidden:
        """Compute a step's tokens, storing their K and V in `pages` (one entry per layer)."""
        step = self._ops.begin(batch, self._rotation)
        x, residual = None, self._embedding.index_select(0, batch.token_ids)
        for layer, layer_pages in zip(self._layers, pages, strict=True):
            x = layer(x, residual, step, layer_pages)
        assert isinstance(x, torch.Tensor), "a model has layers"
        return Hidden(x, residual)

    def logits(self, hidden: Hidden) -> Tensor:
        """Map the tokens of `hidden` to [tokens, vocab_size] float32."""
        return self._head(hidden.x, hidden.residual)
