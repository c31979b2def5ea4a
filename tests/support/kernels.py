"""The CPU kernels of every instruction set that this processor has, and their pages' layout.

Also how close their results must be to the reference's.

Owns the conversion between the pages of `NativeOps` and those of `ComposedOps`, written down a
second time here so that the layout is tested and not only used.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from charonia.config import Quantization
from charonia.data.ops.base import Pages
from charonia.data.ops.kv_format import Quantized, format_of
from charonia.data.ops.native.build import (
    KernelsUnavailableError,
    build_kernels,
    load_kernels,
    supported_isas,
)
from charonia.data.ops.native.ops import NativeOps
from charonia.data.ops.native.threads import ThreadLayout

ISAS = supported_isas()
LANES = 16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2}

both_dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def kernels_for(isa: str) -> ModuleType:
    """Load the kernels, building them where the cache lacks them (half a minute)."""
    return load_kernels(isa, print)


def native_ops(
    isa: str, num_threads: int = 2, *, quantization: Quantization | None = None
) -> NativeOps:
    """The operations with threads that are bound to no core."""
    return NativeOps(kernels_for(isa), ThreadLayout(num_threads, ()), quantization)


def matrix_of(
    isa: str, weight: Tensor, bias: Tensor | None, quantization: Quantization | None
) -> Any:
    """A matrix of the kernels."""
    kernels = kernels_for(isa)
    kept_as = getattr(kernels.Quantization, quantization or "none")
    return kernels.Matrix(weight, bias, quantization=kept_as)


def assert_close(
    actual: Tensor, expected: Tensor, *, quantization: Quantization | None = None
) -> None:
    """Assert that results of an operation equal the reference's.

    The reference's int8 weights went through their own dtype, which the kernels' do not. Where
    rows are rounded to int8, a last bit may decide between two steps: of 1,500 MLPs, each with
    9,600 numbers, 14 had one or two that were off by more than 8e-2, by up to three times that.
    """
    tolerance = TOLERANCE[expected.dtype] * (2 if quantization == "int8" else 1)
    if quantization == "w8a8":
        tolerance = max(tolerance, 8e-2)
        are_close = torch.isclose(actual, expected, atol=tolerance, rtol=tolerance)
        num_far = int(are_close.logical_not().sum())
        assert num_far <= 3, f"{num_far} numbers are off by more than {tolerance}"
        tolerance *= 4
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def packed(pages: Pages) -> Pages:
    """Convert from [blocks, block_size, kv_heads, width] to the layout of the kernels."""
    kv_format = format_of(pages.keys)
    if isinstance(kv_format, Quantized):
        return Pages(*(_packed_codes(part, kv_format, columns) for part, columns in _sides(pages)))
    pair = 4 // pages.keys.element_size()  # numbers that share 32 bits
    blocks, block_size, heads, dim = pages.keys.shape
    filled = -(-dim // LANES) * LANES
    keys, values = (pad(part, (0, filled - dim)) for part in pages)
    keys = keys.view(blocks, block_size, heads, filled // pair, pair).permute(0, 2, 3, 1, 4)
    values = values.view(blocks, block_size // pair, pair, heads, filled).permute(0, 3, 1, 4, 2)
    return Pages(keys.contiguous(), values.contiguous())


def unpacked(pages: Pages, head_dim: int) -> Pages:
    """The other way round."""
    kv_format = format_of(pages.keys)
    if isinstance(kv_format, Quantized):
        return Pages(
            *(
                _unpacked_codes(part, kv_format, columns, head_dim)
                for part, columns in _sides(pages)
            )
        )
    blocks, heads, _, block_size, _ = pages.keys.shape
    keys = pages.keys.permute(0, 3, 1, 2, 4).reshape(blocks, block_size, heads, -1)
    values = pages.values.permute(0, 2, 4, 1, 3).reshape(blocks, block_size, heads, -1)
    return Pages(keys[..., :head_dim], values[..., :head_dim])


def _sides(pages: Pages) -> list[tuple[Tensor, bool]]:
    """Keys and values, and whether the numbers of a head are columns."""
    return [(pages.keys, False), (pages.values, True)]


_PLACES = {torch.int8: [0, 1, 2, 3], torch.float8_e4m3fn: [0, 2, 1, 3], torch.uint8: [0, 1, 2, 3]}
"""Bytes of four consecutive numbers; in int4 the next four have the upper halves of these."""


def _packed_codes(part: Tensor, kv_format: Quantized, is_by_column: bool) -> Tensor:
    blocks, block_size, heads, _ = part.shape
    codes, scales = _split(part.view(torch.uint8), kv_format)
    dim = codes.shape[-1] * 8 // kv_format.bits
    if kv_format.bits == 4:
        groups = codes.unflatten(-1, (-1, 16))
        codes = torch.cat((groups & 15, groups >> 4), -1).flatten(-2)
    if part.dtype == torch.int8:
        codes = codes ^ 128
    codes = pad(codes, (0, -dim % LANES))
    numbers = codes.permute(0, 2, 1, 3)  # [blocks, heads, block_size, dim]
    if not is_by_column:
        numbers = numbers.transpose(2, 3)
    words = numbers.unflatten(2, (-1, 32 // kv_format.bits)).transpose(3, 4)
    if kv_format.bits == 4:
        words = words[..., :4] | words[..., 4:] << 4
    words = words[..., _PLACES[part.dtype]].flatten(2)
    behind = scales.permute(0, 2, 3, 1).flatten(2).contiguous().view(torch.uint8)
    return torch.cat((words, behind), -1).view(blocks, heads, block_size, -1).view(part.dtype)


def _unpacked_codes(
    part: Tensor, kv_format: Quantized, is_by_column: bool, head_dim: int
) -> Tensor:
    blocks, heads, block_size, _ = part.shape
    filled = -(-head_dim // LANES) * LANES
    step = 32 // kv_format.bits
    flat = part.view(torch.uint8).flatten(2)
    words, behind = flat.tensor_split([block_size * filled * kv_format.bits // 8], -1)
    rows, columns = (block_size, filled) if is_by_column else (filled, block_size)
    words = words.view(blocks, heads, rows // step, columns, 4)[..., _PLACES[part.dtype]]
    if kv_format.bits == 4:
        words = torch.cat((words & 15, words >> 4), -1)
    numbers = words.transpose(3, 4).flatten(2, 3)
    if not is_by_column:
        numbers = numbers.transpose(2, 3)
    codes = numbers.permute(0, 2, 1, 3)[..., :head_dim]
    if part.dtype == torch.int8:
        codes = codes ^ 128
    if kv_format.bits == 4:
        halves = codes.unflatten(-1, (-1, 2, 16))
        codes = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2)
    scales = behind.contiguous().view(torch.bfloat16).view(blocks, heads, -1, block_size)
    scales = scales.permute(0, 3, 1, 2).flatten().view(torch.uint8)
    return torch.cat((codes, scales.view(blocks, block_size, heads, -1)), -1).view(part.dtype)


def _split(stored: Tensor, kv_format: Quantized) -> tuple[Tensor, Tensor]:
    """Codes and scales of bytes [..., width], as kv_format.py has them."""
    width = stored.shape[-1]
    num_scales = width // (kv_format.group * kv_format.bits // 8 + 2) if kv_format.group else 1
    codes, scales = stored.tensor_split([width - 2 * num_scales], -1)
    return codes, scales.contiguous().view(torch.bfloat16)


def filling(pages: Pages, head_dim: int) -> Tensor:
    """Sum the content behind the heads' last dimensions; it must stay zero."""
    keys = pages.keys.permute(0, 1, 3, 2, 4).flatten(-2)
    values = pages.values.permute(0, 1, 2, 4, 3)
    return keys[..., head_dim:].abs().sum() + values[..., head_dim:].abs().sum()


def build_kernels_of(items: list[pytest.Item]) -> None:
    """Build what these tests ask for, before the first one: a test's time does not include it."""
    wanted = {
        item.callspec.params.get(name)
        for item in items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        for name in ("isa", "cpu_kernels")
    }
    missing = [isa for isa in ISAS if isa in wanted]
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        missing.reverse()  # so that two processes do not wait for the same
    for isa in missing:
        # suppressed: the tests will say so
        with _alone(isa), suppress(KernelsUnavailableError):
            build_kernels(isa, lambda line: None)


@contextmanager
def _alone(isa: str) -> Iterator[None]:
    """Have no other process of tests build these kernels meanwhile."""
    path = Path(tempfile.gettempdir(), f"tests-kernels-{isa}-{os.getuid()}")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
