"""The primitive operations in torch against the reference ones, over random block tables."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from charonia.data.ops.base import Pages, Rotation, StepBatch
from charonia.data.ops.reference import ReferenceOps
from charonia.data.ops.torch_ops import TorchOps
from support.batches import moved, random_batch, random_pages
from support.devices import DEVICES

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)
NUM_BLOCKS = 40

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


rows_of_a_step = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 60), st.just(1)),  # decode
        st.tuples(st.just(0), st.integers(2, 40)),  # the whole context
        st.tuples(st.integers(1, 30), st.integers(2, 20)),  # a later chunk
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    rows=rows_of_a_step,
    block_size=st.sampled_from([5, 16]),
    heads=st.sampled_from([(4, 4), (4, 2), (9, 3), (4, 1)]),
)
def test_attention_over_random_block_tables_equals_the_reference(
    seed: int,
    rows: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: str,
) -> None:
    while sum(-(-(before + new) // block_size) for before, new in rows) >= NUM_BLOCKS:
        rows = rows[:-1]
    generator = torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    batch = random_batch(generator, block_size, rows, NUM_BLOCKS)
    pages = random_pages(generator, NUM_BLOCKS, block_size, kv_heads, 8, dtype)
    query = torch.randn(len(batch.positions), num_heads, 8, generator=generator).to(dtype)
    expected = ReferenceOps().paged_attention(batch, dtype)(query, pages)
    on_device = Pages(pages.keys.to(device), pages.values.to(device))
    attend = TorchOps().paged_attention(moved(batch, device), dtype)
    assert_close(attend(query.to(device), on_device).cpu(), expected)


@pytest.mark.parametrize("cut", [1, 4, 5, 6, 15, 16, 17, 31])
def test_attention_does_not_depend_on_where_a_prompt_is_cut(
    cut: int, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(cut)
    whole = random_batch(generator, 16, [(0, 32)], NUM_BLOCKS)
    pages = Pages(
        *(part.to(device) for part in random_pages(generator, NUM_BLOCKS, 16, 2, 8, dtype))
    )
    query = torch.randn(32, 4, 8, generator=generator).to(device, dtype)
    tables = whole.block_tables.to(device)

    def attend(start: int, end: int) -> Tensor:
        batch = StepBatch(
            token_ids=torch.zeros(end - start, dtype=torch.int64, device=device),
            positions=torch.arange(start, end, device=device),
            slots=torch.zeros(end - start, dtype=torch.int64, device=device),
            query_starts=[0, end - start],
            context_lens=[end],
            block_tables=tables[:, : -(-end // 16)],
            block_size=16,
        )
        return TorchOps().paged_attention(batch, dtype)(query[start:end], pages)

    cut_in_two = torch.cat((attend(0, cut), attend(cut, 32)))
    assert_close(cut_in_two, attend(0, 32))


@pytest.mark.parametrize(("num_heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
def test_rotation_and_the_write_to_the_pages_equal_the_reference(
    num_heads: int, kv_heads: int, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, dim = 7, 8
    qkv = torch.randn(tokens, num_heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    angles = torch.rand(tokens, dim // 2, generator=generator) * 6
    rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
    slots = torch.randperm(NUM_BLOCKS * 4 - 4, generator=generator)[:tokens] + 4
    expected_pages = random_pages(generator, NUM_BLOCKS, 4, kv_heads, dim, dtype)
    pages = Pages(*(part.clone().to(device) for part in expected_pages))
    expected = ReferenceOps().rope_and_write(qkv, num_heads, rotation, slots, expected_pages)
    query = TorchOps().rope_and_write(
        qkv.to(device),
        num_heads,
        Rotation(rotation.cos.to(device), rotation.sin.to(device)),
        slots.to(device),
        pages,
    )
    assert_close(query.cpu(), expected)
    assert_close(pages.keys.cpu(), expected_pages.keys)
    assert_close(pages.values.cpu(), expected_pages.values)


@pytest.mark.parametrize("ops", [ReferenceOps(), TorchOps()], ids=lambda ops: type(ops).__name__)
def test_what_is_not_finite_never_reaches_the_pages(
    ops: ReferenceOps | TorchOps, dtype: torch.dtype, device: str
) -> None:
    qkv = torch.ones(3, 3, 4, dtype=dtype, device=device)
    qkv[0, 2], qkv[1, 2], qkv[2, 1] = float("nan"), float("inf"), float("-inf")
    rotation = Rotation(*torch.ones(2, 3, 2, dtype=dtype, device=device))
    pages = Pages(*torch.zeros(2, 2, 4, 1, 4, dtype=dtype, device=device))
    ops.rope_and_write(qkv, 1, rotation, torch.tensor([4, 5, 6], device=device), pages)
    assert pages.keys.isfinite().all()
    assert pages.values.isfinite().all()
    assert pages.values[1, 1].min() > 1e4


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("shape", [(5, 24), (5, 3, 8)])
def test_rms_norm_equals_the_reference(
    has_residual: bool, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, *shape, generator=generator).to(dtype)
    weight = torch.rand(shape[-1], generator=generator).to(dtype)
    expected = ReferenceOps().rms_norm(x, weight, 1e-6, residual if has_residual else None)
    actual = TorchOps().rms_norm(
        x.to(device), weight.to(device), 1e-6, residual.to(device) if has_residual else None
    )
    assert_close(actual[0].cpu(), expected[0])
    assert_close(actual[1].cpu(), expected[1])


def test_linear_and_silu_mul_equal_the_reference(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 16, generator=generator).to(dtype)
    weight = (torch.randn(12, 16, generator=generator) / 4).to(dtype)
    bias = torch.randn(12, generator=generator).to(dtype)
    ours, reference = TorchOps(), ReferenceOps()
    for one_bias in (bias, None):
        actual = ours.linear(
            x.to(device), weight.to(device), None if one_bias is None else one_bias.to(device)
        )
        assert_close(actual.cpu(), reference.linear(x, weight, one_bias))
    assert_close(ours.silu_mul(x.to(device)).cpu(), reference.silu_mul(x))


def test_decode_rows_gather_less_than_twice_their_contexts(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from charonia.data.ops import torch_ops

    gathered = []
    gather = torch_ops._gather

    def counting(pages: Tensor, block_ids: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        gathered.append(len(block_ids))
        return gather(pages, block_ids, head_dim, dtype)

    monkeypatch.setattr(torch_ops, "_gather", counting)
    lengths = [3, 17, 40, 100, 5, 90, 64]
    rows = [(length - 1, 1) for length in lengths]
    batch = random_batch(torch.Generator(), 16, rows, NUM_BLOCKS)
    pages = Pages(*torch.zeros(2, NUM_BLOCKS, 16, 1, 4, dtype=dtype, device=device))
    query = torch.zeros(len(lengths), 2, 4, dtype=dtype, device=device)
    TorchOps().paged_attention(moved(batch, device), dtype)(query, pages)
    needed = sum(-(-length // 16) for length in lengths)
    # K and V; and a short row never waits for the padding of the longest.
    assert 2 * needed <= sum(gathered) < 2 * 2 * needed
    assert len(gathered) <= 2 * 4
