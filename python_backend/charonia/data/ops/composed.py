"""`Ops` composed of five primitive operations, for devices without native layers.

Owns composing a sublayer. Must not know names of weights, or plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from charonia.config import Quantization
from charonia.data.comm import Comm
from charonia.data.ops.base import (
    AttentionWeights,
    Head,
    Layer,
    Layers,
    MatrixWeights,
    MlpWeights,
    NormWeights,
    Ops,
    Pages,
    Rotation,
    StepBatch,
    StepT,
    Sublayer,
)
from charonia.data.ops.kv_format import FORMATS
from charonia.data.ops.quantize import Linear, int8_linear, w8a8_linear
from charonia.protocol import KVLayout


class PagedAttention(Protocol):
    """Attention of a step's queries over the pages; used by every layer of the step.

    Pages are [num_blocks, block_size, kv_heads, width]; a head is stored in its `KVFormat`.
    """

    def __call__(self, query: Tensor, pages: Pages) -> Tensor:
        """Attend causally: softmax(q Kᵀ / √head_dim) V, per row over its own context.

        Args:
            query: [tokens, heads, head_dim]; heads is a multiple of the pages' kv_heads, and
                consecutive heads share a KV head.

        Returns:
            [tokens, heads, head_dim].
        """
        ...


class Primitives(Protocol):
    """Five operations from which a decoder layer is composed."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b; `x` [tokens, in], `weight` [out, in], `bias` [out]."""
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add `x` to `residual` (which may be overwritten) and normalize the sum.

        Root mean square over the last dimension (Zhang, Sennrich 2019, arXiv 1910.07467),
        computed in float32.

        Returns:
            The normalized sum times `weight`, and the sum itself; both of the shape of `x`.
        """
        ...

    def rope_and_write(
        self, qkv: Tensor, num_heads: int, rotation: Rotation, slots: Tensor, pages: Pages
    ) -> Tensor:
        """Rotate queries and keys, store keys and values in the pages.

        Rotary embedding (Su et al. 2021, arXiv 2104.09864) in the layout of Hugging Face: the first
        half of a head is rotated against the second. Stored values are made finite.

        Args:
            qkv: [tokens, num_heads + 2 * kv_heads, head_dim]: queries, keys, values.
            rotation: of each token.
            slots: [tokens], where to store each token's K and V.

        Returns:
            The rotated queries, [tokens, num_heads, head_dim].
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up; `gate_up` [tokens, 2 * size] holds gate, then up."""
        ...

    def paged_attention(self, batch: StepBatch, dtype: torch.dtype) -> PagedAttention:
        """Prepare a step's attention for queries of `dtype`; all layers share it."""
        ...


@dataclass(frozen=True)
class ComposedStep:
    """Data that all layers of a step share."""

    batch: StepBatch
    rotation: Rotation  # of each token
    attend: PagedAttention


class ComposedOps(Ops[ComposedStep]):
    """The operations composed of a device's primitives.

    Args:
        quantization: number format of the weights; see `EngineArgs`.
    """

    def __init__(self, primitives: Primitives, quantization: Quantization | None = None) -> None:
        self._primitives = primitives
        self._quantization = quantization

    def quantized(self, quantization: Quantization | None) -> "ComposedOps":
        """See `Ops`."""
        return ComposedOps(self._primitives, quantization)

    def page_shapes(self, layout: KVLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
        width = FORMATS[layout.dtype].width(layout.head_dim)
        shape = (layout.block_size, layout.num_kv_heads, width)
        return shape, shape

    def begin(self, batch: StepBatch, rotation: Rotation) -> ComposedStep:
        return ComposedStep(
            batch,
            Rotation(*(table.index_select(0, batch.positions) for table in rotation)),
            self._primitives.paged_attention(batch, rotation.cos.dtype),
        )

    def attention(self, weights: AttentionWeights) -> Sublayer[ComposedStep]:
        ops, norm = self._primitives, weights.norm
        qkv, output = self._linear(weights.qkv), self._linear(weights.output)

        def attend(x: Tensor | None, residual: Tensor, step: ComposedStep, pages: Pages) -> Tensor:
            normed = _add_and_normalize(ops, norm, x, residual)
            heads = qkv(normed).view(len(normed), -1, weights.head_dim)  # [tokens, heads, dim]
            if weights.head_norms is not None:
                first = 0
                sizes = (weights.num_heads, weights.num_kv_heads)
                for head_norm, size in zip(weights.head_norms, sizes, strict=True):
                    part = heads[:, first : first + size]
                    part.copy_(ops.rms_norm(part, head_norm.weight, head_norm.eps)[0])
                    first += size
            slots = step.batch.slots
            query = ops.rope_and_write(heads, weights.num_heads, step.rotation, slots, pages)
            return output(step.attend(query, pages).reshape(len(normed), -1))

        return attend

    def mlp(self, weights: MlpWeights) -> Sublayer[ComposedStep]:
        ops, norm = self._primitives, weights.norm
        gate_up, down = self._linear(weights.gate_up), self._linear(weights.down)

        def feed_forward(
            x: Tensor | None, residual: Tensor, step: ComposedStep, pages: Pages
        ) -> Tensor:
            return down(ops.silu_mul(gate_up(_add_and_normalize(ops, norm, x, residual))))

        return feed_forward

    def layers(
        self,
        layers: Sequence[Layer[ComposedStep]],
        parts: Comm | None = None,
    ) -> Layers[ComposedStep]:
        return one_by_one(layers, parts)

    def head(self, norm: NormWeights, weights: MatrixWeights) -> Head:
        ops, linear = self._primitives, self._linear(weights)

        def head(x: Tensor, residual: Tensor) -> Tensor:
            return linear(ops.rms_norm(x, norm.weight, norm.eps, residual.clone())[0]).float()

        return head

    def _linear(self, weights: MatrixWeights) -> Linear:
        ops, quantization = self._primitives, self._quantization
        if quantization == "int8":
            return int8_linear(ops.linear, weights.weight, weights.bias)
        if quantization == "w8a8":
            return w8a8_linear(weights.weight, weights.bias)
        return lambda x: ops.linear(x, weights.weight, weights.bias)


def one_by_one(layers: Sequence[Layer[StepT]], parts: Comm | None) -> Layers[StepT]:
    """Compute the sublayers one by one, and sum the outputs of the ranks; see `Ops.layers`."""

    def run(residual: Tensor, step: StepT, pages: Sequence[Pages]) -> Tensor:
        x: Tensor | None = None
        for layer, layer_pages in zip(layers, pages, strict=True):
            for sublayer in layer:
                x = sublayer(x, residual, step, layer_pages)
                if parts is not None:
                    x = parts.all_reduce(x)
        assert x is not None, "a model has layers"
        return x

    return run


def _add_and_normalize(
    ops: Primitives, norm: NormWeights, x: Tensor | None, residual: Tensor
) -> Tensor:
    """Add x to the residual stream, in place, and normalize the sum."""
    if x is None:
        return ops.rms_norm(residual, norm.weight, norm.eps)[0]
    normed, total = ops.rms_norm(x, norm.weight, norm.eps, residual)
    if total is not residual:
        residual.copy_(total)
    return normed
