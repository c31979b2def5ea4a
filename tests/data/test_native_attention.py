"""Attention over pages and what is written to them, for every instruction set."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.data.ops.base import AttentionWeights, MatrixWeights, NormWeights, Pages
from charonia.data.ops.kv_format import FORMATS
from charonia.data.ops.reference import ReferenceOps
from support.attention import (
    HEAD_DIMS,
    HEADS,
    AttentionCase,
    random_step,
    rotation_of,
    rows_of_a_step,
)
from support.batches import random_pages
from support.kernels import (
    ISAS,
    assert_close,
    both_dtypes,
    kernels_for,
    native_ops,
    packed,
    unpacked,
)
from support.weights import HIDDEN, random_attention

pytestmark = pytest.mark.parametrize("isa", ISAS)


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
