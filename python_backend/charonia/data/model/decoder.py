"""The decoder of the llama family: token ids in, hidden states and logits out.

Owns how the layers are joined. Must not know plans, files or devices.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from charonia.data.model.layers import (
    MLP,
    Attention,
    Destination,
    Placement,
    RMSNorm,
    RotaryTable,
)
from charonia.data.model.spec import ModelSpec
from charonia.data.ops.base import PagedAttention, Pages, Rotation, StepBatch


class DecoderLayer:
    """Attention and feed-forward, each behind a norm, around a residual stream."""

    def __init__(self, place: Placement, spec: ModelSpec) -> None:
        self._input_norm = RMSNorm(place, spec.hidden_size, spec.rms_norm_eps)
        self._attention = Attention(place, spec)
        self._post_attention_norm = RMSNorm(place, spec.hidden_size, spec.rms_norm_eps)
        self._mlp = MLP(place, spec)

    def checkpoint_tensors(self, prefix: str) -> Iterator[Destination]:
        """Name what fills this layer; `prefix` ends with a dot."""
        yield from self._input_norm.checkpoint_tensors(f"{prefix}input_layernorm.")
        yield from self._attention.checkpoint_tensors(f"{prefix}self_attn.")
        yield from self._post_attention_norm.checkpoint_tensors(
            f"{prefix}post_attention_layernorm."
        )
        yield from self._mlp.checkpoint_tensors(f"{prefix}mlp.")

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Rotation,
        slots: Tensor,
        attend: PagedAttention,
        pages: Pages,
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's last contribution and the residual stream it is still to join.

        The addition is left to the next norm, which does both in one pass; all [tokens, hidden].
        """
        x, residual = self._input_norm(x, residual)
        x = self._attention(x, rotation, slots, attend, pages)
        x, residual = self._post_attention_norm(x, residual)
        return self._mlp(x), residual


class Decoder:
    """A whole model. Its parameters are uninitialized until a loader has filled them.

    Args:
        num_positions: positions that rotary angles are tabulated for, i.e. max_model_len.
    """

    def __init__(self, spec: ModelSpec, place: Placement, *, num_positions: int) -> None:
        self._place = place
        self._is_tied = spec.is_tied
        self._embedding = place.empty(spec.vocab_size, spec.hidden_size)
        self._rotary = RotaryTable(place, spec.rope, spec.head_dim, num_positions)
        self._layers = [DecoderLayer(place, spec) for _ in range(spec.num_layers)]
        self._norm = RMSNorm(place, spec.hidden_size, spec.rms_norm_eps)
        self._head = self._embedding
        if not spec.is_tied:
            self._head = place.empty(spec.vocab_size, spec.hidden_size)

    def checkpoint_tensors(self) -> Iterator[Destination]:
        """Name every tensor of the checkpoint and the memory that it fills."""
        yield "model.embed_tokens.weight", self._embedding
        for index, layer in enumerate(self._layers):
            yield from layer.checkpoint_tensors(f"model.layers.{index}.")
        yield from self._norm.checkpoint_tensors("model.norm.")
        if not self._is_tied:
            yield "lm_head.weight", self._head

    def hidden_states(self, batch: StepBatch, pages: Sequence[Pages]) -> Tensor:
        """Compute a step's tokens, storing their K and V in `pages` (one entry per layer).

        Returns:
            The normalized output of the last layer, [tokens, hidden].
        """
        attend = self._place.ops.paged_attention(batch, self._place.dtype)
        rotation = self._rotary(batch.positions)
        x, residual = self._embedding.index_select(0, batch.token_ids), None
        for layer, layer_pages in zip(self._layers, pages, strict=True):
            x, residual = layer(x, residual, rotation, batch.slots, attend, layer_pages)
        return self._norm(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [n, hidden] to [n, vocab_size]."""
        return self._place.ops.linear(hidden, self._head, None)
