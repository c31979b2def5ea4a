"""K and V in fewer bits in the CPU kernels: the same bytes as torch writes, read as torch reads."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from charonia.data.comm import Place
from charonia.data.kv_store import KVStore, kv_layout
from charonia.data.ops.base import AttentionWeights, MatrixWeights, NormWeights, Pages, Rotation
from charonia.data.ops.kv_format import FORMATS, format_of
from charonia.data.ops.reference import ReferenceOps
from charonia.protocol import BlockCopy
from support.attention import HEADS, AttentionCase, random_step, rotation_of, rows_of_a_step
from support.batches import random_batch, random_pages
from support.kernels import ISAS, kernels_for, native_ops, packed, unpacked
from support.long import one_in
from support.specs import spec_of

QUANTIZED = ["int8", "fp8", "int4"]
HEAD_DIMS = {"int8": [8, 32, 40, 64, 80, 96, 128], "int4": [32, 64, 96, 128]}
HEAD_DIMS["fp8"] = HEAD_DIMS["int8"]
# Of numbers about 1. With whole numbers queries and weights are rounded to 16 bits, whatever they
# are computed in.
TOLERANCE = {torch.float32: 4e-4, torch.bfloat16: 3e-2}

pytestmark = pytest.mark.parametrize(
    ("isa", "name", "dtype"), one_in(5, itertools.product(ISAS, QUANTIZED, TOLERANCE)), ids=str
)


def as_bytes(stored: Tensor) -> Tensor:
    return stored.contiguous().view(torch.uint8)


def encoded(name: str, pages: Pages) -> Pages:
    return Pages(*(FORMATS[name].encode(part) for part in pages))


def writer_of(numbers: Tensor) -> AttentionWeights:
    """Weights by which every token has these keys and values, [2, kv_heads, head_dim]."""
    _, kv_heads, head_dim = numbers.shape
    bias = torch.cat((torch.zeros(kv_heads * head_dim).to(numbers), numbers.flatten()))
    return AttentionWeights(
        norm=NormWeights(torch.ones(head_dim).to(numbers), 1e-5),
        qkv=MatrixWeights(torch.zeros(len(bias), head_dim).to(numbers), bias),
        output=MatrixWeights(torch.zeros(head_dim, kv_heads * head_dim).to(numbers), None),
        head_norms=None,
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


def unusual(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Heads that are like none that a model has, one after the other."""
    x = torch.randn(shape, generator=generator)
    info, dim = torch.finfo(dtype), shape[-1]
    x[1] = 0
    x[2] *= info.tiny
    x[3] *= 1e-30
    x[4, :6] = torch.tensor([float("nan"), float("inf"), -float("inf"), info.max, info.min, 0.0])
    x[5] = torch.randint(-127, 128, (dim,), generator=generator) / 2  # of which many are ties
    x[6] = 0.25
    x[7] = -x[7].abs()
    x[8] = torch.linspace(-1, 1, dim) ** 9  # of which many are small
    x[9] *= 1e15
    return x.to(dtype)


@pytest.mark.parametrize("kind", ["usual", "unusual"])
def test_what_is_written_is_what_torch_writes_bit_for_bit(
    isa: str, name: str, dtype: torch.dtype, kind: str
) -> None:
    for dim in HEAD_DIMS[name]:
        generator = torch.Generator().manual_seed(dim)
        shape = (40, dim)
        if kind == "usual":
            numbers = torch.randn(2, *shape, generator=generator).to(dtype)
        else:
            numbers = torch.stack([unusual(generator, shape, dtype) for _ in range(2)])
            numbers[0] = numbers[0].nan_to_num(0, 1, 1)  # as keys are multiplied by angles
        batch, num_blocks = random_step(generator, 16, [(3, 2), (0, 70)])
        before = encoded(name, random_pages(generator, num_blocks, 16, 40, dim, dtype))
        pages = packed(before)
        turned = Rotation(*(torch.ones(800, dim // 2).to(dtype) * factor for factor in (1, 0)))
        ops = native_ops(isa)
        residual = torch.ones(len(batch.positions), dim).to(dtype)
        ops.attention(writer_of(numbers))(None, residual, ops.begin(batch, turned), pages)
        for part, expected, x in zip(unpacked(pages, dim), before, numbers, strict=True):
            wanted = as_bytes(expected).flatten(0, 1)
            wanted[batch.slots] = as_bytes(FORMATS[name].encode(x))
            assert torch.equal(as_bytes(part).flatten(0, 1), wanted)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    rows=rows_of_a_step,
    block_size=st.sampled_from([16, 32, 48, 256]),
    heads=st.sampled_from(HEADS),
    data=st.data(),
)
def test_attention_over_random_block_tables_equals_the_reference(
    isa: str,
    name: str,
    dtype: torch.dtype,
    seed: int,
    rows: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    data: st.DataObject,
) -> None:
    dim = data.draw(st.sampled_from(HEAD_DIMS[name]))
    generator = torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    batch, num_blocks = random_step(generator, block_size, rows)
    numbers = random_pages(generator, num_blocks, block_size, kv_heads, dim, dtype)
    pages = encoded(name, numbers)
    query = torch.randn(len(batch.positions), num_heads, dim, generator=generator).to(dtype)
    # In float32, as of the kernels: what is computed in bfloat16 rounds what was read.
    expected = ReferenceOps().paged_attention(batch, torch.float32)(query.float(), pages)
    step = native_ops(isa).begin(batch, rotation_of(dim, dtype))
    actual = kernels_for(isa).paged_attention(query, step, packed(pages)).float()
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_keys_and_values_of_any_size_are_read(isa: str, name: str, dtype: torch.dtype) -> None:
    """Scales of bfloat16 are of any size, and so are what they become in products."""
    generator = torch.Generator().manual_seed(0)
    batch = random_batch(generator, 16, [(300, 1), (0, 20)], 40)
    for size in (1e-20, 1e-5, 1e4, 1e20):
        numbers = random_pages(generator, 40, 16, 2, 64, dtype)
        pages = encoded(name, Pages(numbers.keys / size**0.5, numbers.values * size))
        query = torch.randn(21, 4, 64, generator=generator).to(dtype) * size**0.5
        expected = ReferenceOps().paged_attention(batch, torch.float32)(query.float(), pages)
        step = native_ops(isa).begin(batch, rotation_of(64, dtype))
        actual = kernels_for(isa).paged_attention(query, step, packed(pages)).float()
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual / size, expected / size, atol=tolerance, rtol=tolerance)


def test_a_query_that_is_no_number_shows_in_its_own_result_alone(
    isa: str, name: str, dtype: torch.dtype
) -> None:
    """Wherever in the head it lies: rounded to digits it must not become a number."""
    generator = torch.Generator().manual_seed(0)
    batch = random_batch(generator, 16, [(300, 1), (0, 20)], 40)
    pages = packed(encoded(name, random_pages(generator, 40, 16, 2, 64, dtype)))
    query = torch.randn(21, 4, 64, generator=generator).to(dtype)
    step = native_ops(isa).begin(batch, rotation_of(64, dtype))
    expected = kernels_for(isa).paged_attention(query, step, pages)
    for place in (0, 3, 15, 40, 63):
        spoiled = query.clone()
        spoiled[[0, 7], [1, 2], place] = torch.nan
        actual = kernels_for(isa).paged_attention(spoiled, step, pages)
        assert actual[[0, 7], [1, 2]].isnan().all()
        actual[[0, 7], [1, 2]] = expected[[0, 7], [1, 2]]
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("head_norms", [False, True])
def test_the_attention_half_of_a_layer_equals_the_reference(
    isa: str, name: str, dtype: torch.dtype, head_norms: bool
) -> None:
    for seed, rows in enumerate([[(20, 1), (0, 5)], [(260, 3), (511, 1), (0, 33)]]):
        case = AttentionCase(seed, rows, head_dim=32, has_head_norms=head_norms)
        inputs = case.inputs(dtype)
        inputs.pages = encoded(name, inputs.pages)
        pages, ops = packed(inputs.pages), native_ops(isa)
        assert inputs.x is not None
        x, residual = inputs.x.clone(), inputs.residual.clone()
        step = ops.begin(inputs.batch, inputs.rotation)
        actual = ops.attention(inputs.weights)(x, residual, step, pages)
        expected = inputs.expected()
        # A number that was rounded otherwise before has another code, at times.
        tolerance = {torch.float32: 2e-3, torch.bfloat16: 0.1}[dtype]
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(residual, inputs.residual)
        for part, wanted in zip(unpacked(pages, 32), inputs.pages, strict=True):
            kv_format = format_of(part)
            same = as_bytes(part) == as_bytes(wanted)
            assert same.float().mean() > (0.99 if dtype == torch.float32 else 0.9)
            assert kv_format.decode(part.contiguous(), torch.float32).isfinite().all()


def test_what_lies_outside_of_a_context_never_spoils_a_sum(
    isa: str, name: str, dtype: torch.dtype
) -> None:
    """Nor does it decide how weights are rounded: the result is the same to the bit."""
    rows = [(299, 1), (33, 1), (0, 20), (250, 30)]
    for dim in (32, 64, 128):
        generator = torch.Generator().manual_seed(dim)
        batch, num_blocks = random_step(generator, 16, rows)
        numbers = random_pages(generator, num_blocks, 16, 2, dim, dtype)
        query = torch.randn(len(batch.positions), 6, dim, generator=generator).to(dtype)
        spoiled = Pages(*(torch.full_like(part, -6e4) for part in numbers))
        spoiled.keys[::2] = 6e4
        for row, length in enumerate(batch.context_lens):
            for position in range(length):
                block, offset = int(batch.block_tables[row, position // 16]), position % 16
                for part, whole in zip(spoiled, numbers, strict=True):
                    part[block, offset] = whole[block, offset]
        step = native_ops(isa).begin(batch, rotation_of(dim, dtype))
        attend = kernels_for(isa).paged_attention
        clean, dirty = (packed(encoded(name, pages)) for pages in (numbers, spoiled))
        assert torch.equal(attend(query, step, clean), attend(query, step, dirty))


def test_a_copied_block_is_read_as_the_one_that_it_is_a_copy_of(
    isa: str, name: str, dtype: torch.dtype
) -> None:
    spec, ops = spec_of(64), native_ops(isa)
    layout = kv_layout(spec, ops, 16, dtype, Place(), name)
    store = KVStore(layout, ops.page_shapes(layout), 12, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for pages in store.pages:
        filled = packed(encoded(name, random_pages(generator, 12, 16, 2, 64, dtype)))
        for part, content in zip(pages, filled, strict=True):
            part.view(torch.uint8).copy_(content.view(torch.uint8))
    batch = random_batch(generator, 16, [(60, 1)], 12)
    query = torch.randn(1, 4, 64, generator=generator).to(dtype)

    def attend(tables: Tensor, layer: int) -> Tensor:
        batch.block_tables.copy_(tables)
        step = ops.begin(batch, rotation_of(64, dtype))
        return kernels_for(isa).paged_attention(query, step, store.pages[layer])

    store.copy([BlockCopy(1, 8), BlockCopy(3, 10)])
    for layer in range(layout.num_layers):
        expected = attend(torch.tensor([[1, 2, 3, 4]]), layer)
        assert torch.equal(attend(torch.tensor([[8, 2, 10, 4]]), layer), expected)
        assert not torch.equal(attend(torch.tensor([[2, 2, 10, 4]]), layer), expected)


def test_pages_of_another_shape_are_refused(isa: str, name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = random_batch(generator, 16, [(20, 1)], 12)
    keys, values = packed(encoded(name, random_pages(generator, 12, 16, 2, 64, dtype)))
    step = native_ops(isa).begin(batch, rotation_of(64, dtype))
    query = torch.zeros(1, 4, 64).to(dtype)
    other = FORMATS["int8" if name != "int8" else "fp8"].storage
    wrong = {
        r"keys must be .*\[any, 2, any, \d+\]": (keys[..., :-1].contiguous(), values),
        "values must be .* not": (keys, values.view(other)),
        r"values must be .*\[12, 2, 16,": (keys, values[:-1]),
        "multiple of 16 tokens, not of 8": (keys[:, :, :8].contiguous(), values),
    }
    for words, pages in wrong.items():
        with pytest.raises(ValueError, match=words):
            kernels_for(isa).paged_attention(query, step, pages)


def test_the_same_memory_holds_more_tokens_with_their_scales(
    isa: str, name: str, dtype: torch.dtype
) -> None:
    spec, ratio = spec_of(64), {"int8": 1.9, "fp8": 1.9, "int4": 3.5}[name]
    plain = kv_layout(spec, native_ops(isa), 16, torch.bfloat16, Place())
    quantized = kv_layout(spec, native_ops(isa), 16, dtype, Place(), name)
    assert plain.bytes_per_block / quantized.bytes_per_block >= ratio
