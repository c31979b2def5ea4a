"""The CPU kernels of every instruction set that this processor has, and their pages' layout.

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

import pytest
from torch import Tensor
from torch.nn.functional import pad

from charonia.data.ops.base import Pages
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


def kernels_for(isa: str) -> ModuleType:
    """Load the kernels, building them where the cache lacks them (half a minute)."""
    return load_kernels(isa, print)


def native_ops(isa: str, num_threads: int = 2, *, is_int8: bool = False) -> NativeOps:
    """The operations with threads that are bound to no core."""
    return NativeOps(kernels_for(isa), ThreadLayout(num_threads, ()), is_int8=is_int8)


def packed(pages: Pages) -> Pages:
    """From [blocks, block_size, kv_heads, head_dim] to the layout of the kernels."""
    pair = 4 // pages.keys.element_size()  # numbers that share 32 bits
    blocks, block_size, heads, dim = pages.keys.shape
    filled = -(-dim // LANES) * LANES
    keys, values = (pad(part, (0, filled - dim)) for part in pages)
    keys = keys.view(blocks, block_size, heads, filled // pair, pair).permute(0, 2, 3, 1, 4)
    values = values.view(blocks, block_size // pair, pair, heads, filled).permute(0, 3, 1, 4, 2)
    return Pages(keys.contiguous(), values.contiguous())


def unpacked(pages: Pages, head_dim: int) -> Pages:
    """The other way round."""
    blocks, heads, _, block_size, _ = pages.keys.shape
    keys = pages.keys.permute(0, 3, 1, 2, 4).reshape(blocks, block_size, heads, -1)
    values = pages.values.permute(0, 2, 4, 1, 3).reshape(blocks, block_size, heads, -1)
    return Pages(keys[..., :head_dim], values[..., :head_dim])


def filling(pages: Pages, head_dim: int) -> Tensor:
    """What lies behind the heads' last dimensions; it must stay zero."""
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
