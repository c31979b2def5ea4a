"""How K and V are kept in fewer bits: what is read back, what it takes, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from charonia.data.comm import Place
from charonia.data.kv_store import kv_layout
from charonia.data.ops import torch_ops
from charonia.data.ops.base import Pages
from charonia.data.ops.composed import ComposedOps
from charonia.data.ops.kv_format import FORMATS, IN_PLACE_OF_INFINITY, Quantized, format_name
from charonia.data.ops.reference import ReferenceOps
from charonia.data.ops.torch_ops import TorchOps
from charonia.errors import ConfigError
from support.batches import random_batch
from support.specs import spec_of

QUANTIZED = ["int8", "fp8", "int4"]
ERROR = {"int8": 0.51 / 127, "fp8": 1 / 15, "int4": 0.23}
"""At most so much of the largest number of those that share a scale."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

each_format = pytest.mark.parametrize("name", QUANTIZED)


def read_back(name: str, x: Tensor) -> Tensor:
    kv_format = FORMATS[name]
    stored = kv_format.encode(x)
    assert stored.shape == (*x.shape[:-1], kv_format.width(x.shape[-1]))
    assert stored.dtype == kv_format.storage
    return kv_format.decode(stored, x.dtype)


@each_format
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    groups=st.integers(1, 8),
    exponent=st.integers(-3, 3),
)
def test_numbers_are_read_back_within_the_error_of_their_format(
    name: str, seed: int, dtype: torch.dtype, groups: int, exponent: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(5, 3, groups * 32, generator=generator) * 10**exponent).to(dtype)
    x[2, 1] = 0
    actual = read_back(name, x)
    group = FORMATS[name].group or x.shape[-1]
    largest = x.float().unflatten(-1, (-1, group)).abs().amax(-1, keepdim=True)
    error = (actual.float() - x.float()).unflatten(-1, (-1, group)).abs()
    rounding = torch.finfo(dtype).eps
    assert (error <= (ERROR[name] + rounding) * largest).all()
    assert not actual[2, 1].any()


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_huge_or_tiny_is_read_back_finite(name: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    values = [float("nan"), float("inf"), float("-inf"), info.max, info.min, info.tiny, -info.tiny]
    x = torch.randn(len(values), 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:, 5] = torch.tensor(values).to(dtype)
    tiny = torch.full((1, 32), info.tiny).to(dtype)
    actual = read_back(name, torch.cat((x, tiny)))
    assert actual.isfinite().all()
    assert actual[1, 5].item() == pytest.approx(IN_PLACE_OF_INFINITY, rel=0.07)
    assert actual[2, 5].item() == pytest.approx(-IN_PLACE_OF_INFINITY, rel=0.07)
    assert actual[3, 5].item() == pytest.approx(info.max, rel=0.07)
    assert actual[4, 5].item() == pytest.approx(info.min, rel=0.07)


@each_format
def test_memory_of_zeros_is_read_as_finite_numbers(name: str) -> None:
    """So the null block, and blocks that nothing was written to, spoil no sum."""
    kv_format = FORMATS[name]
    stored = torch.zeros(3, kv_format.width(64), dtype=torch.uint8).view(kv_format.storage)
    assert not kv_format.decode(stored, torch.float32).any()


@each_format
def test_what_is_kept_of_a_head_depends_on_that_head_alone(name: str) -> None:
    x = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(0))
    whole = FORMATS[name].encode(x).view(torch.uint8)
    for token in range(4):
        for head in range(3):
            alone = FORMATS[name].encode(x[token, head]).view(torch.uint8)
            assert torch.equal(alone, whole[token, head])


@pytest.mark.parametrize(("name", "error"), [("int8", 0.006), ("fp8", 0.023), ("int4", 0.083)])
def test_of_several_scales_the_one_with_the_least_error_is_taken(name: str, error: float) -> None:
    """Relative errors (root of the mean square) of normally distributed numbers."""
    x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    assert (read_back(name, x) - x).norm() / x.norm() < error


@pytest.mark.parametrize(("setting", "ratio"), [("int8", 1.9), ("fp8", 1.9), ("int4", 3.5)])
def test_the_same_memory_holds_more_tokens_with_their_scales(setting: str, ratio: float) -> None:
    spec, ops = spec_of(64), ComposedOps(TorchOps())
    plain = kv_layout(spec, ops, 16, torch.bfloat16, Place())
    assert (plain.dtype, plain.bytes_per_block) == ("bfloat16", 2 * 3 * 16 * 2 * 64 * 2)
    quantized = kv_layout(spec, ops, 16, torch.bfloat16, Place(), setting)
    assert quantized.dtype == setting
    assert plain.bytes_per_block / quantized.bytes_per_block >= ratio


def test_heads_that_groups_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype = 'int4' .* every 32 .* have 40"):
        kv_layout(spec_of(40), ComposedOps(TorchOps()), 16, torch.float32, Place(), "int4")
    assert format_name("int8", torch.float32, 40) == "int8"
    assert format_name("fp8_e4m3", torch.float32, 40) == "fp8"
    assert format_name("auto", torch.float16, 40) == "float16"


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [[(20, 1), (33, 1), (0, 1)], [(0, 17), (5, 9), (2, 1)]])
def test_attention_equals_the_reference_over_what_is_stored(
    name: str, dtype: torch.dtype, rows: list[tuple[int, int]]
) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = random_batch(generator, 16, rows, 12)
    numbers = torch.randn(2, 12, 16, 2, 32, generator=generator).to(dtype)
    pages = Pages(*(FORMATS[name].encode(part) for part in numbers))
    query = torch.randn(len(batch.positions), 4, 32, generator=generator).to(dtype)
    expected = ReferenceOps().paged_attention(batch, dtype)(query, pages)
    actual = TorchOps().paged_attention(batch, dtype)(query, pages)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    # And it is what was quantized that was read, not what it was made of.
    unquantized = ReferenceOps().paged_attention(batch, dtype)(query, Pages(*numbers))
    assert not torch.allclose(actual, unquantized, atol=1e-4)


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_however_long_contexts_are_so_many_numbers_are_read_at_once(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And attention is the same to the bit."""
    generator = torch.Generator().manual_seed(0)
    batch = random_batch(generator, 16, [(77, 1), (60, 1), (5, 90), (0, 1)], 30)
    numbers = torch.randn(2, 30, 16, 2, 32, generator=generator).to(dtype)
    pages = Pages(*(FORMATS[name].encode(part) for part in numbers))
    query = torch.randn(len(batch.positions), 4, 32, generator=generator).to(dtype)
    decode, at_once = Quantized.decode, []

    def counting(self: Quantized, stored: Tensor, dtype: torch.dtype) -> Tensor:
        decoded = decode(self, stored, dtype)
        at_once.append(decoded.numel())
        return decoded

    monkeypatch.setattr(Quantized, "decode", counting)
    whole = TorchOps().paged_attention(batch, dtype)(query, pages)
    block = 16 * 2 * 32
    assert max(at_once) >= 6 * block
    for most in (1, 2 * block, 4 * block - 1):
        monkeypatch.setattr(torch_ops, "_NUMBERS_AT_ONCE", most)
        at_once.clear()
        assert torch.equal(TorchOps().paged_attention(batch, dtype)(query, pages), whole)
        assert max(at_once) == max(most // block, 1) * block
