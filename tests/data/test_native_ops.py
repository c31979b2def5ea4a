"""The CPU kernels of every instruction set against the reference operations and plain torch."""

import itertools
from dataclasses import replace
from typing import Any

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
    Ops,
    Pages,
)
from charonia.data.ops.composed import ComposedOps
from charonia.data.ops.kv_format import FORMATS
from charonia.data.ops.quantize import group_bounds, quantize_int8, quantize_rows, w8a8_linear
from charonia.data.ops.reference import ReferenceOps
from support.attention import (
    HEAD_DIMS,
    HEADS,
    AttentionCase,
    AttentionInputs,
    attention_cases,
    random_step,
    rotation_of,
    rows_of_a_step,
)
from support.batches import random_pages
from support.kernels import ISAS, filling, kernels_for, matrix_of, native_ops, packed, unpacked
from support.weights import (
    HIDDEN,
    QUANTIZATIONS,
    as_read,
    mlp_as_read,
    random_attention,
    random_matrix,
    random_mlp,
    random_norm,
    reference_ops,
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2}

pytestmark = pytest.mark.parametrize("isa", ISAS)
both_dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
in_8_bits = pytest.mark.parametrize("quantization", ["int8", "w8a8"])


def assert_close(
    actual: Tensor, expected: Tensor, *, quantization: Quantization | None = None
) -> None:
    # The reference's int8 weights went through their own dtype, which the kernels' do not. Where
    # rows are rounded to int8, a last bit may decide between two steps: of 1,500 MLPs, each with
    # 9,600 numbers, 14 had one or two that were off by more than 8e-2, by up to three times that.
    tolerance = TOLERANCE[expected.dtype] * (2 if quantization == "int8" else 1)
    if quantization == "w8a8":
        tolerance = max(tolerance, 8e-2)
        are_close = torch.isclose(actual, expected, atol=tolerance, rtol=tolerance)
        assert are_close.logical_not().sum() <= 3
        tolerance *= 4
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@both_dtypes
@pytest.mark.parametrize("num_threads", [1, 2])
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    rows=rows_of_a_step,
    block_size=st.sampled_from([16, 32, 48, 256]),
    heads=st.sampled_from(HEADS),
    dim=st.sampled_from(HEAD_DIMS),
)
def test_attention_over_random_block_tables_equals_the_reference(
    isa: str,
    dtype: torch.dtype,
    num_threads: int,
    seed: int,
    rows: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    dim: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    batch, num_blocks = random_step(generator, block_size, rows)
    pages = random_pages(generator, num_blocks, block_size, kv_heads, dim, dtype)
    query = torch.randn(len(batch.positions), num_heads, dim, generator=generator).to(dtype)
    expected = ReferenceOps().paged_attention(batch, dtype)(query, pages)
    step = native_ops(isa, num_threads).begin(batch, rotation_of(dim, dtype))
    assert_close(kernels_for(isa).paged_attention(query, step, packed(pages)), expected)


@both_dtypes
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 60) | st.sampled_from([191, 192, 193, 400]),
    inputs=st.integers(1, 70).map(lambda half: 2 * half) | st.sampled_from([600, 1026, 2100]),
    outputs=st.integers(1, 100),
    has_bias=st.booleans(),
    quantization=st.sampled_from(QUANTIZATIONS),
    as_float32=st.booleans(),
)
def test_a_product_of_any_size_equals_torch(
    isa: str,
    dtype: torch.dtype,
    seed: int,
    rows: int,
    inputs: int,
    outputs: int,
    has_bias: bool,
    quantization: Quantization | None,
    as_float32: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight, bias = vars(random_matrix(generator, outputs, inputs, has_bias, dtype)).values()
    wide = weight.double()
    if quantization is not None:
        whole, steps = quantize_int8(weight)
        wide = whole.double() * steps.double()[:, None]
    rows_of_x = x.double()
    if quantization == "w8a8":
        numbers, steps = quantize_rows(x)
        sizes = torch.tensor(group_bounds(inputs)).diff()
        rows_of_x = numbers.double() * steps.double().repeat_interleave(sizes, dim=1)
    expected = rows_of_x @ wide.T + (0 if bias is None else bias.double())
    actual = matrix_of(isa, weight, bias, quantization)(x, as_float32)
    assert actual.dtype == (torch.float32 if as_float32 else dtype)
    # In float32 nothing is rounded but the sum itself, whatever the inputs are.
    tolerance = 2e-5 if as_float32 else TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@both_dtypes
@in_8_bits
@pytest.mark.parametrize("inputs", [2, 30, 32, 34, 64, 96, 600])
def test_all_whole_numbers_of_int8_are_exact(
    isa: str, dtype: torch.dtype, quantization: Quantization, inputs: int
) -> None:
    """Every output holds the largest one, so that a step is 1, at another place."""
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randint(-127, 128, (300, inputs), generator=generator).to(dtype)
    weight[torch.arange(300), torch.arange(300) % inputs] = 127.0
    assert inputs < 30 or weight.unique().numel() == 255
    rows = 127 * torch.eye(inputs, dtype=dtype)  # so that a step of these is 1, too
    product = matrix_of(isa, weight, None, quantization)(rows, True)
    assert torch.equal(product.T, 127 * weight.float())


@in_8_bits
def test_the_largest_weight_of_an_output_and_its_opposite_are_exact_in_int8(
    isa: str, quantization: Quantization
) -> None:
    weight = torch.tensor([[0.5, -0.5, 0.0, 0.25], [0.0, 0.0, 0.0, 0.0], [-3e-5, 0, 3e-5, 0]])
    product = matrix_of(isa, weight, None, quantization)(torch.eye(4), False)
    assert product[:, 1].tolist() == [0.0] * 4
    assert product[:3, 0].tolist() == pytest.approx([0.5, -0.5, 0.0], rel=1e-6)
    assert product[3, 0].item() == pytest.approx(64 / 127 / 2, rel=1e-6)  # 63.5 is rounded to even
    assert product[:, 2].tolist() == pytest.approx([-3e-5, 0.0, 3e-5, 0.0], rel=1e-6)


@both_dtypes
@in_8_bits
def test_an_output_with_a_weight_that_is_not_finite_is_nan_and_the_others_are_not(
    isa: str, dtype: torch.dtype, quantization: Quantization
) -> None:
    """As whole numbers such weights would be zeros, and nobody would notice."""
    weight, rows = torch.randn(70, 96).to(dtype), torch.randn(3, 96).to(dtype)
    expected = matrix_of(isa, weight, None, quantization)(rows, True)
    weight[0, 0], weight[1, 95], weight[2, 40] = torch.nan, torch.inf, -torch.inf
    actual = matrix_of(isa, weight, None, quantization)(rows, True)
    assert actual[:, :3].isnan().all()
    assert torch.equal(actual[:, 3:], expected[:, 3:])


@both_dtypes
@pytest.mark.parametrize("inputs", [48, 1026, 2100])
def test_rows_are_rounded_group_by_group_and_sums_added_up_in_order(
    isa: str, dtype: torch.dtype, inputs: int
) -> None:
    """Halves of a step are rounded to even, and one huge number spoils its own group alone."""
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(70, inputs, generator=generator).to(dtype)
    rows = torch.randn(40, inputs, generator=generator).to(dtype)
    rows[:, 1], rows[:, 2] = rows.abs().amax(1), rows.abs().amax(1) / 2
    rows[3], rows[5, 7] = 0, 1e4
    second = group_bounds(inputs)[1]
    weight[:30, :second] = 0
    actual = matrix_of(isa, weight, None, "w8a8")(rows, True)
    expected = w8a8_linear(weight, None)(rows.float())
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(actual[3], torch.zeros(70))
    exact = (rows.double() @ weight.double().T)[:, :30]
    error = (actual[:, :30] - exact).abs()
    assert error.max() < 0.05 * max(1.0, exact.abs().max().item())


@both_dtypes
@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
def test_a_row_is_multiplied_as_it_is_alone(
    isa: str, dtype: torch.dtype, quantization: Quantization | None
) -> None:
    """Three groups of inputs, all heights of tiles, and more rows than are multiplied at once."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = vars(random_matrix(generator, 70, 2100, True, dtype)).values()
    x = torch.randn(1100, 2100, generator=generator).to(dtype)
    matrix = matrix_of(isa, weight, bias, quantization)
    alone = torch.cat([matrix(row[None], True) for row in x])
    for num_threads in (1, 2, 3):
        native_ops(isa, num_threads)  # sets the threads of the kernels
        for rows in (1, 2, 4, 5, 6, 7, 11, 12, 13, 16, 17, 32, 33, 49, 193, 400, 769, 1100):
            assert torch.equal(matrix(x[:rows], True), alone[:rows])


@both_dtypes
def test_long_rows_are_multiplied_by_many_panels_as_by_each(isa: str, dtype: torch.dtype) -> None:
    """More panels than take turns with a block of inputs, and some."""
    generator = torch.Generator().manual_seed(0)
    weight = random_matrix(generator, 1210, 2100, False, dtype).weight
    x = torch.randn(500, 2100, generator=generator).to(dtype)
    matrix = matrix_of(isa, weight, None, None)
    alone = torch.cat([matrix(row[None], True) for row in x])
    for num_threads in (1, 2, 3):
        native_ops(isa, num_threads)  # sets the threads of the kernels
        for rows in (33, 65, 128, 385, 500):
            assert torch.equal(matrix(x[:rows], True), alone[:rows])


@both_dtypes
def test_rows_of_what_is_no_number_stay_alone_and_give_none(isa: str, dtype: torch.dtype) -> None:
    rows = torch.ones(4, 600, dtype=dtype)
    rows[1, 300], rows[2, 599] = float("nan"), float("inf")
    product = matrix_of(isa, torch.ones(3, 600, dtype=dtype), None, "w8a8")(rows, True)
    assert not product[1:3].isfinite().any()
    assert torch.equal(product[0], product[3])
    torch.testing.assert_close(product[0], torch.full((3,), 600.0), atol=1e-3, rtol=1e-5)


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
    isa: str,
    dtype: torch.dtype,
    seed: int,
    tokens: int,
    size: int,
    has_x: bool,
    scale: float,
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


@both_dtypes
def test_what_is_not_finite_never_reaches_the_pages(isa: str, dtype: torch.dtype) -> None:
    """A token of NaN, ±infinity or the largest numbers beside sane ones, in the same block."""
    generator = torch.Generator().manual_seed(0)
    dim = 24
    weights = random_attention(generator, (4, 2), dim, dtype, has_bias=True, has_head_norms=False)
    batch, num_blocks = random_step(generator, 16, [(0, 1)] * 4 + [(0, 12)])
    pages = packed(random_pages(generator, num_blocks, 16, 2, dim, dtype))
    residual = torch.randn(16, HIDDEN, generator=generator).to(dtype)
    sane = residual.clone()
    big = torch.finfo(dtype).max
    for row, value in enumerate((float("nan"), float("inf"), float("-inf"), big)):
        residual[row, row] = value
    ops = native_ops(isa)
    step = ops.begin(batch, rotation_of(dim, dtype))
    out = ops.attention(weights)(None, residual, step, pages)
    assert pages.keys.isfinite().all()
    assert pages.values.isfinite().all()
    assert max(part.abs().max() for part in pages) <= torch.tensor(6e4).to(dtype)
    undisturbed = ops.attention(weights)(None, sane, step, packed(unpacked(pages, dim)))
    assert torch.equal(out[4:], undisturbed[4:])


@both_dtypes
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_tokens_are_written_together_as_one_by_one(isa: str, dtype: torch.dtype, dim: int) -> None:
    """Whole blocks, parts of blocks, and tokens of what is no number in the middle of either."""
    generator = torch.Generator().manual_seed(0)
    weights = random_attention(generator, (2, 1), dim, dtype, has_bias=True, has_head_norms=False)
    ops, num_tokens = native_ops(isa), 70
    attention, rotation = ops.attention(weights), rotation_of(dim, dtype)
    residual = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    residual[40, 0], residual[63, HIDDEN - 1] = float("nan"), float("inf")
    for block_size, first in itertools.product((16, 32, 48), (0, 8, 16)):
        batch, num_blocks = random_step(generator, block_size, [(first, num_tokens)])
        pages = random_pages(generator, num_blocks, block_size, 1, dim, dtype)
        together, alone = packed(pages), packed(pages)
        attention(None, residual.clone(), ops.begin(batch, rotation), together)
        for i in range(num_tokens):
            token = replace(
                batch,
                token_ids=batch.token_ids[i : i + 1],
                positions=batch.positions[i : i + 1],
                slots=batch.slots[i : i + 1],
                query_starts=[0, 1],
                context_lens=[first + i + 1],
            )
            attention(None, residual[i : i + 1].clone(), ops.begin(token, rotation), alone)
        for ours, expected in zip(together, alone, strict=True):
            assert ours.isfinite().all()
            assert torch.equal(ours, expected)


@both_dtypes
def test_infinite_biases_reach_the_pages_as_the_largest_number_stored(
    isa: str, dtype: torch.dtype
) -> None:
    dim = 16
    bias = torch.zeros(3 * dim, dtype=dtype)
    bias[2 * dim :] = torch.tensor([float("inf"), float("-inf")] * 7 + [float("nan")] * 2)
    weights = AttentionWeights(
        norm=NormWeights(torch.ones(dim, dtype=dtype), 1e-5),
        qkv=MatrixWeights(torch.zeros(3 * dim, dim, dtype=dtype), bias),
        output=MatrixWeights(torch.eye(dim, dtype=dtype), None),
        head_norms=None,
        num_heads=1,
        num_kv_heads=1,
        head_dim=dim,
    )
    batch, num_blocks = random_step(torch.Generator(), 16, [(0, 1)])
    pages = packed(Pages(*torch.zeros(2, num_blocks, 16, 1, dim, dtype=dtype)))
    ops = native_ops(isa)
    out = ops.attention(weights)(
        None, torch.ones(1, dim, dtype=dtype), ops.begin(batch, rotation_of(dim, dtype)), pages
    )
    largest = torch.tensor(6e4).to(dtype).item()
    assert out[0].tolist() == pytest.approx([largest, -largest] * 7 + [0, 0])


@both_dtypes
@pytest.mark.parametrize("scale", [1e5, 1e15])
def test_large_keys_and_values_are_stored_as_they_are(
    isa: str, dtype: torch.dtype, scale: float
) -> None:
    """As in transformers, whose models have them where a head has an outlier."""
    inputs = AttentionCase(seed=3, rows=[(20, 1), (0, 5)]).inputs(dtype)
    _, values = inputs.weights.qkv.weight.view(-1, 16, HIDDEN).split([6, 2])
    values *= scale
    inputs.weights.qkv.bias.view(-1, 16)[6:] *= scale
    x, residual = inputs.x.clone(), inputs.residual.clone()
    pages, ops = packed(inputs.pages), native_ops(isa)
    step = ops.begin(inputs.batch, inputs.rotation)
    actual = ops.attention(inputs.weights)(x, residual, step, pages)
    assert_close(actual / scale, inputs.expected() / scale)
    stored = unpacked(pages, 16).values
    assert stored.abs().max() > scale
    assert_close(stored / scale, inputs.pages.values / scale)


@both_dtypes
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    rows=rows_of_a_step,
    heads=st.sampled_from(HEADS),
    dim=st.sampled_from(HEAD_DIMS),
)
def test_what_lies_outside_of_a_context_never_spoils_a_sum(
    isa: str,
    dtype: torch.dtype,
    seed: int,
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
) -> None:
    """The rest of a last block, the null block and foreign blocks at the largest number stored."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    batch, num_blocks = random_step(generator, 16, rows)
    pages = random_pages(generator, num_blocks, 16, kv_heads, dim, dtype)
    query = torch.randn(len(batch.positions), num_heads, dim, generator=generator).to(dtype)
    spoiled = Pages(*(torch.full_like(part, -6e4) for part in pages))
    spoiled.keys[::2] = 6e4
    for row, length in enumerate(batch.context_lens):
        for position in range(length):
            block, offset = int(batch.block_tables[row, position // 16]), position % 16
            for part, whole in zip(spoiled, pages, strict=True):
                part[block, offset] = whole[block, offset]
    step = native_ops(isa).begin(batch, rotation_of(dim, dtype))
    attend = kernels_for(isa).paged_attention
    assert torch.equal(attend(query, step, packed(spoiled)), attend(query, step, packed(pages)))


@both_dtypes
def test_a_query_that_is_no_number_shows_in_its_own_result_alone(
    isa: str, dtype: torch.dtype
) -> None:
    """Among those that are multiplied together, in one chunk of a context and in several."""
    generator = torch.Generator().manual_seed(0)
    batch, num_blocks = random_step(generator, 16, [(300, 1), (0, 20), (500, 40)])
    pages = packed(random_pages(generator, num_blocks, 16, 2, 40, dtype))
    query = torch.randn(61, 6, 40, generator=generator).to(dtype)
    step = native_ops(isa).begin(batch, rotation_of(40, dtype))
    attend = kernels_for(isa).paged_attention
    expected = attend(query, step, pages)
    spoiled = query.clone()
    spoiled[[0, 7, 30, 60], [1, 2, 5, 0], [0, 15, 16, 39]] = torch.nan
    actual = attend(spoiled, step, pages)
    is_spoiled = spoiled.isnan().any(-1)
    assert actual[is_spoiled].isnan().all()
    assert torch.equal(actual[~is_spoiled], expected[~is_spoiled])


def test_a_matrix_with_an_odd_number_of_inputs_is_refused(isa: str) -> None:
    with pytest.raises(ValueError, match="odd number of inputs"):
        kernels_for(isa).Matrix(torch.zeros(4, 3), None)


def test_another_dtype_is_refused(isa: str) -> None:
    with pytest.raises(ValueError, match=r"float32 and bfloat16, not .*Half"):
        kernels_for(isa).Matrix(torch.zeros(4, 2, dtype=torch.float16), None)


def test_the_library_is_of_the_instruction_set_it_was_built_for(isa: str) -> None:
    assert isa == kernels_for(isa).ISA


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_queries_become_whole_numbers_where_the_instruction_set_multiplies_those(
    isa: str, name: str
) -> None:
    """Beside a number of 1, one of 5e-6 becomes 0 in 16 bits; keys have 0 beside the former."""
    generator = torch.Generator().manual_seed(0)
    batch, num_blocks = random_step(generator, 16, [(40, 1)])
    keys, values = random_pages(generator, num_blocks, 16, 2, 32, torch.float32)
    keys *= 1000
    keys[..., 0] = 0
    pages = packed(Pages(*(FORMATS[name].encode(part) for part in (keys, values))))
    step = native_ops(isa).begin(batch, rotation_of(32, torch.float32))
    query = torch.zeros(1, 4, 32)
    query[..., 0] = 1
    faint = query + 5e-6
    results = [kernels_for(isa).paged_attention(x, step, pages) for x in (query, faint)]
    is_whole = name != "fp8" and isa in ("amx_bf16", "avx512_bf16", "avx512_vnni")
    assert torch.equal(*results) == is_whole
