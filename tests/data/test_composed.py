"""A layer composed of torch's operations against one composed of the reference ones, and int8."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from charonia.config import Quantization
from charonia.data.ops.base import (
    AttentionWeights,
    MatrixWeights,
    MlpWeights,
    NormWeights,
    Pages,
    Rotation,
)
from charonia.data.ops.composed import ComposedOps
from charonia.data.ops.quantize import int8_linear, quantize_int8
from charonia.data.ops.torch_ops import TorchOps
from support.attention import AttentionCase, attention_cases
from support.batches import moved
from support.devices import DEVICES
from support.weights import (
    HIDDEN,
    QUANTIZATIONS,
    as_read,
    mlp_as_read,
    random_matrix,
    random_mlp,
    random_norm,
    reference_ops,
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}

on_every_device = pytest.mark.parametrize("device", DEVICES)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def assert_close(
    actual: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
) -> None:
    tolerance = TOLERANCE[dtype]
    if quantization == "w8a8":  # a last bit may decide between two steps
        tolerance = max(tolerance, 8e-2)
    torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance)


def norm_on(device: str, norm: NormWeights) -> NormWeights:
    return NormWeights(norm.weight.to(device), norm.eps)


def matrix_on(device: str, matrix: MatrixWeights) -> MatrixWeights:
    bias = None if matrix.bias is None else matrix.bias.to(device)
    return MatrixWeights(matrix.weight.to(device), bias)


def attention_on(device: str, weights: AttentionWeights) -> AttentionWeights:
    norms = weights.head_norms
    return replace(
        weights,
        norm=norm_on(device, weights.norm),
        qkv=matrix_on(device, weights.qkv),
        output=matrix_on(device, weights.output),
        head_norms=norms and (norm_on(device, norms[0]), norm_on(device, norms[1])),
    )


@on_every_device
@every_dtype
@settings(max_examples=15)
@given(case=attention_cases, quantization=st.sampled_from(QUANTIZATIONS))
def test_the_attention_half_of_a_layer_equals_the_reference(
    device: str, dtype: torch.dtype, case: AttentionCase, quantization: Quantization | None
) -> None:
    inputs = case.inputs(dtype)
    ops = ComposedOps(TorchOps(), quantization)
    pages = Pages(*(part.to(device, copy=True) for part in inputs.pages))
    rotation = Rotation(*(part.to(device) for part in inputs.rotation))
    x = None if inputs.x is None else inputs.x.to(device, copy=True)
    residual = inputs.residual.to(device, copy=True)
    block = ops.attention(attention_on(device, inputs.weights))
    actual = block(x, residual, ops.begin(moved(inputs.batch, device), rotation), pages)
    assert_close(actual, inputs.expected(quantization), dtype, quantization)
    assert torch.equal(residual.cpu(), inputs.residual)
    assert_close(pages.keys, inputs.pages.keys, dtype, quantization)
    assert_close(pages.values, inputs.pages.values, dtype, quantization)


@on_every_device
@every_dtype
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
def test_the_feed_forward_half_and_the_head_equal_the_reference(
    device: str, dtype: torch.dtype, has_bias: bool, quantization: Quantization | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = random_mlp(generator, 74, has_bias, dtype)
    last_norm = random_norm(generator, HIDDEN, dtype)
    head = random_matrix(generator, 97, HIDDEN, False, dtype)
    x, residual = torch.randn(2, 9, HIDDEN, generator=generator).to(dtype)
    ops, reference = ComposedOps(TorchOps(), quantization), reference_ops(quantization)
    on_device = MlpWeights(
        norm_on(device, weights.norm),
        matrix_on(device, weights.gate_up),
        matrix_on(device, weights.down),
    )
    our_residual = residual.to(device, copy=True)
    our_x = ops.mlp(on_device)(x.to(device, copy=True), our_residual, None, None)
    expected_mlp = reference.mlp(mlp_as_read(weights, quantization))
    expected_x = expected_mlp(x, residual, None, None)
    assert_close(our_x, expected_x, dtype, quantization)
    assert torch.equal(our_residual.cpu(), residual)
    logits = ops.head(norm_on(device, last_norm), matrix_on(device, head))(
        expected_x.to(device), residual.to(device)
    )
    expected = reference.head(last_norm, as_read(head, quantization))(expected_x, residual)
    assert logits.dtype == torch.float32
    assert_close(logits, expected, dtype, quantization)


@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(list(TOLERANCE)))
def test_int8_is_within_half_a_step_of_the_weights(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(5, 12, generator=generator) * 10 ** (seed % 7 - 3)).to(dtype)
    weight[2] = 0
    whole, steps = quantize_int8(weight)
    assert (whole.dtype, steps.dtype) == (torch.int8, torch.float32)
    assert whole.abs().amax(dim=1).tolist() == [127, 127, 0, 127, 127]
    error = (whole * steps[:, None] - weight.float()).abs()
    assert (error <= steps[:, None] * 0.50001).all()


@on_every_device
@every_dtype
@pytest.mark.parametrize("has_bias", [False, True])
def test_int8_is_scaled_in_float32_and_rounded_once(
    device: str, dtype: torch.dtype, has_bias: bool
) -> None:
    """Of one input at a time, the whole number itself is exact in every dtype."""
    generator = torch.Generator().manual_seed(0)
    matrix = random_matrix(generator, 97, HIDDEN, has_bias, dtype)
    norm = NormWeights(torch.ones(HIDDEN, dtype=dtype), 0.0)
    # The norm of one input of 48 is sqrt(48), so these are ones behind it, but for its rounding.
    inputs = torch.eye(HIDDEN, dtype=dtype)
    ones = TorchOps().rms_norm(inputs, norm.weight, norm.eps)[0].diagonal()[0]
    whole, steps = quantize_int8(matrix.weight)
    products = (whole.to(dtype) * ones).float() * steps[:, None]
    bias = 0 if matrix.bias is None else matrix.bias[:, None]
    head = ComposedOps(TorchOps(), "int8").head(norm_on(device, norm), matrix_on(device, matrix))
    zeros = torch.zeros_like(inputs, device=device)
    logits = head(inputs.to(device), zeros)
    assert torch.equal(logits.cpu(), (products + bias).to(dtype).float().T)


@on_every_device
@every_dtype
def test_int8_keeps_to_numbers_that_the_dtype_has(device: str, dtype: torch.dtype) -> None:
    """Sums of the whole numbers alone, some 500,000 here, are beyond float16."""
    generator = torch.Generator().manual_seed(0)
    weight = (0.1 * torch.rand(7, 64, generator=generator) + 0.1).to(dtype)
    weight[1], weight[2], weight[3] = 0, weight[2] * 1e-4, weight[3] * 100
    x = 50 + torch.rand(3, 64, generator=generator).to(dtype)
    whole, steps = quantize_int8(weight)
    expected = (x.float() @ (whole * steps[:, None]).T).to(dtype)
    actual = int8_linear(TorchOps().linear, weight.to(device), None)(x.to(device))
    torch.testing.assert_close(actual.cpu(), expected, rtol=TOLERANCE[dtype], atol=0)
