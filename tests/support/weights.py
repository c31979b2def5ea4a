"""Random weights for the operations, scaled to give numbers as large as those they are given."""

import torch

from charonia.config import Quantization
from charonia.data.ops.base import AttentionWeights, MatrixWeights, MlpWeights, NormWeights
from charonia.data.ops.composed import ComposedOps
from charonia.data.ops.quantize import quantize_int8
from charonia.data.ops.reference import ReferenceOps

HIDDEN = 48
QUANTIZATIONS: tuple[Quantization | None, ...] = (None, "int8", "w8a8")


def random_matrix(
    generator: torch.Generator, outputs: int, inputs: int, has_bias: bool, dtype: torch.dtype
) -> MatrixWeights:
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    return MatrixWeights(weight.to(dtype), bias)


def random_norm(generator: torch.Generator, size: int, dtype: torch.dtype) -> NormWeights:
    return NormWeights((torch.rand(size, generator=generator) + 0.5).to(dtype), 1e-5)


def random_attention(
    generator: torch.Generator,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    *,
    has_bias: bool,
    has_head_norms: bool,
) -> AttentionWeights:
    """The first half of a layer of HIDDEN numbers; `heads` are of queries and of keys."""
    num_heads, kv_heads = heads
    head_norms = random_norm(generator, dim, dtype), random_norm(generator, dim, dtype)
    return AttentionWeights(
        norm=random_norm(generator, HIDDEN, dtype),
        qkv=random_matrix(generator, (num_heads + 2 * kv_heads) * dim, HIDDEN, has_bias, dtype),
        output=random_matrix(generator, HIDDEN, num_heads * dim, has_bias, dtype),
        head_norms=head_norms if has_head_norms else None,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
    )


def random_mlp(
    generator: torch.Generator, inner: int, has_bias: bool, dtype: torch.dtype
) -> MlpWeights:
    """The second half of a layer of HIDDEN numbers."""
    return MlpWeights(
        norm=random_norm(generator, HIDDEN, dtype),
        gate_up=random_matrix(generator, 2 * inner, HIDDEN, has_bias, dtype),
        down=random_matrix(generator, HIDDEN, inner, has_bias, dtype),
    )


def reference_ops(quantization: Quantization | None) -> ComposedOps:
    """Operations to compare results with. Give them the weights of `as_read`.

    W8A8 is that of plain torch, which has tests of its own.
    """
    return ComposedOps(ReferenceOps(), "w8a8" if quantization == "w8a8" else None)


def as_read(weights: MatrixWeights, quantization: Quantization | None) -> MatrixWeights:
    """The weights that int8 stands for, in their own dtype."""
    if quantization != "int8":
        return weights
    whole, steps = quantize_int8(weights.weight)
    return MatrixWeights((whole * steps[:, None]).to(weights.weight.dtype), weights.bias)


def attention_as_read(
    weights: AttentionWeights, quantization: Quantization | None
) -> AttentionWeights:
    parts = {name: as_read(getattr(weights, name), quantization) for name in ("qkv", "output")}
    return AttentionWeights(**vars(weights) | parts)


def mlp_as_read(weights: MlpWeights, quantization: Quantization | None) -> MlpWeights:
    gate_up, down = as_read(weights.gate_up, quantization), as_read(weights.down, quantization)
    return MlpWeights(weights.norm, gate_up, down)
