"""The halves of a layer, norm and head, for every instruction set, against the reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from charonia.config import Quantization
from charonia.data.ops.base import MatrixWeights, MlpWeights, NormWeights, Ops, Pages
from charonia.data.ops.composed import ComposedOps
from charonia.data.ops.reference import ReferenceOps
from support.attention import AttentionCase, AttentionInputs, attention_cases
from support.kernels import (
    ISAS,
    TOLERANCE,
    assert_close,
    both_dtypes,
    filling,
    kernels_for,
    native_ops,
    packed,
    unpacked,
)
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

pytestmark = pytest.mark.parametrize("isa", ISAS)


def assert_attention_equals_the_reference(
    isa: str, inputs: AttentionInputs, *, quantization: Quantization | None = None
) -> None:
    dim, pages = inputs.weights.head_dim, packed(inputs.pages)
    x = None if inputs.x is None else inputs.x.clone()
    residual = inputs.residual.clone()
    ops = native_ops(isa, quantization=quantization)
    step = ops.begin(inputs.batch, inputs.rotation)
    actual = ops.attention(inputs.weights)(x, residual, step, pages)
    assert_close(actual, inputs.expected(quantization), quantization=quantization)
    assert torch.equal(residual, inputs.residual)
    written = unpacked(pages, dim)
    assert_close(written.keys, inputs.pages.keys, quantization=quantization)
    assert_close(written.values, inputs.pages.values, quantization=quantization)
    assert not filling(pages, dim)


@both_dtypes
@settings(max_examples=25)
@given(case=attention_cases, quantization=st.sampled_from(QUANTIZATIONS))
def test_the_attention_half_of_a_layer_equals_the_reference(
    isa: str, dtype: torch.dtype, case: AttentionCase, quantization: Quantization | None
) -> None:
    assert_attention_equals_the_reference(isa, case.inputs(dtype), quantization=quantization)


@both_dtypes
def test_the_norms_of_the_attention_half_have_each_their_own_epsilon(
    isa: str, dtype: torch.dtype
) -> None:
    inputs = AttentionCase(seed=0, rows=[(20, 1), (0, 5)]).inputs(dtype)
    norms = (inputs.weights.norm, *(inputs.weights.head_norms or ()))
    first, *head_norms = (
        replace(norm, eps=eps) for norm, eps in zip(norms, (0.1, 1.0, 10.0), strict=True)
    )
    inputs.weights = replace(inputs.weights, norm=first, head_norms=tuple(head_norms))
    assert_attention_equals_the_reference(isa, inputs)


@both_dtypes
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 70) | st.just(200),
    inner=st.integers(1, 60).map(lambda half: 2 * half),
    has_bias=st.booleans(),
    quantization=st.sampled_from(QUANTIZATIONS),
)
def test_the_feed_forward_half_of_a_layer_equals_the_reference(
    isa: str,
    dtype: torch.dtype,
    seed: int,
    tokens: int,
    inner: int,
    has_bias: bool,
    quantization: Quantization | None,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = random_mlp(generator, inner, has_bias, dtype)
    x, residual = torch.randn(2, tokens, HIDDEN, generator=generator).to(dtype)
    our_residual = residual.clone()
    mlp = native_ops(isa, quantization=quantization).mlp(weights)
    actual = mlp(x.clone(), our_residual, None, None)
    reference = reference_ops(quantization).mlp(mlp_as_read(weights, quantization))
    expected = reference(x, residual, None, None)
    assert_close(actual, expected, quantization=quantization)
    assert torch.equal(our_residual, residual)


@pytest.mark.parametrize("names", ["attention mlp mlp", "mlp attention", "attention"])
def test_a_layer_may_have_other_sublayers(isa: str, names: str) -> None:
    inputs = AttentionCase(seed=3, rows=[(20, 1), (0, 5)]).inputs(torch.float32)
    inputs.x = None
    mlp = random_mlp(torch.Generator().manual_seed(0), 74, False, torch.float32)
    pages, residual = packed(inputs.pages), inputs.residual.clone()
    ops, reference = native_ops(isa), ComposedOps(ReferenceOps())

    def run(ops: Ops[Any], residual: Tensor, pages: Pages) -> Tensor:
        made = {"attention": ops.attention(inputs.weights), "mlp": ops.mlp(mlp)}
        layers = ops.layers([[made[name] for name in names.split()]])
        return layers(residual, ops.begin(inputs.batch, inputs.rotation), [pages])

    assert_close(run(ops, residual, pages), run(reference, inputs.residual, inputs.pages))
    assert_close(residual, inputs.residual)


def test_a_draft_model_of_other_sublayers_is_no_single_call(isa: str) -> None:
    inputs = AttentionCase(seed=3, rows=[(0, 5)]).inputs(torch.float32)
    ops = native_ops(isa)
    generator = torch.Generator().manual_seed(0)
    attention = ops.attention(inputs.weights)
    mlp = ops.mlp(random_mlp(generator, 74, False, torch.float32))
    norm = random_norm(generator, HIDDEN, torch.float32)
    head = ops.head(norm, random_matrix(generator, 30, HIDDEN, False, torch.float32))
    embedding = torch.zeros(30, HIDDEN)
    for layer, is_single_call in {(attention, mlp): True, (attention, mlp, mlp): False}.items():
        guesser = ops.guesser(embedding, ops.layers([layer]), head, inputs.rotation)
        assert (guesser is not None) == is_single_call


def test_large_gates_are_gated_as_by_torch(isa: str) -> None:
    gates = torch.tensor([-1e6, -200.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0, 3e38, 1e-30])
    size = len(gates)
    # The norm of ones is one: gate gets its bias alone, up is 1.
    weights = MlpWeights(
        NormWeights(torch.ones(size), 0.0),
        MatrixWeights(torch.zeros(2 * size, size), torch.cat((gates, torch.ones(size)))),
        MatrixWeights(torch.eye(size), None),
    )
    actual = native_ops(isa).mlp(weights)(torch.zeros(1, size), torch.ones(1, size), None, None)
    torch.testing.assert_close(actual[0], torch.nn.functional.silu(gates), atol=1e-30, rtol=1e-6)


@both_dtypes
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 40),
    size=st.integers(1, 80),
    has_x=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
)
def test_rms_norm_equals_the_reference(
    isa: str, dtype: torch.dtype, seed: int, tokens: int, size: int, has_x: bool, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(2, tokens, size, generator=generator) * scale).to(dtype)
    weight = random_norm(generator, size, dtype).weight
    our_residual = residual.clone()
    actual = kernels_for(isa).rms_norm(x if has_x else None, our_residual, weight, 1e-6)
    expected, total = ReferenceOps().rms_norm(residual, weight, 1e-6, x if has_x else None)
    assert_close(actual, expected)
    assert torch.equal(our_residual, total)


@both_dtypes
@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 97, 384])
def test_the_head_gives_float32_and_leaves_its_inputs(
    isa: str, dtype: torch.dtype, quantization: Quantization | None, vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    last_norm = random_norm(generator, HIDDEN, dtype)
    weights = random_matrix(generator, vocab_size, HIDDEN, False, dtype)
    x, residual = torch.randn(2, 9, HIDDEN, generator=generator).to(dtype)
    before = x.clone(), residual.clone()
    actual = native_ops(isa, quantization=quantization).head(last_norm, weights)(x, residual)
    reference = reference_ops(quantization).head(last_norm, as_read(weights, quantization))
    assert actual.dtype == torch.float32
    tolerance = 8e-2 if quantization == "w8a8" else TOLERANCE[dtype]
    torch.testing.assert_close(actual, reference(x, residual), atol=tolerance, rtol=tolerance)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_the_library_is_of_the_instruction_set_it_was_built_for(isa: str) -> None:
    assert isa == kernels_for(isa).ISA
