"""The KV cache's memory: one pair of page tensors per layer.

Owns the tensors and their shape. Must not know which request a block belongs to: the control plane
assigns blocks.
"""

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from charonia.data.comm import Place
from charonia.data.model.shard import num_local_kv_heads, stage_layers
from charonia.data.model.spec import ModelSpec
from charonia.data.ops.base import Ops, Pages
from charonia.data.ops.kv_format import FORMATS, format_name
from charonia.protocol import BlockCopy, KVLayout

_MADV_COLD = 20  # Linux, since 5.4
_MAX_BYTES = 2**63 - 1

PageShapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Shapes of one block's keys and values; see `Ops.page_shapes`."""


class KVStore:
    """K and V of all layers, over `num_blocks` blocks; block 0 is the null block.

    The pages begin as zeros, and only finite values are written to them (see `Ops`). So values read
    beyond a row's context, or through padding, are finite.
    """

    def __init__(
        self, layout: KVLayout, shapes: PageShapes, num_blocks: int, device: torch.device
    ) -> None:
        dtype = FORMATS[layout.dtype].storage
        self.num_blocks = num_blocks
        self.pages = [
            Pages(*(_zeros((num_blocks, *shape), dtype, device) for shape in shapes))
            for _ in range(layout.num_layers)
        ]
        self._first_small = num_blocks  # from this block on, huge pages are disabled

    @property
    def num_bytes(self) -> int:
        """The size of all pages."""
        return sum(tensor.nbytes for pages in self.pages for tensor in pages)

    def written(self) -> float:
        """The share of the blocks that have taken a CPU's memory, by being written.

        Measured on the first layer's keys, because all layers are written alike; 1 if the kernel
        does not report it. Memory that was only read may count, too, but blocks are not read before
        they are written.
        """
        keys = self.pages[0].keys
        first = keys.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        length = keys.data_ptr() + keys.nbytes - first
        pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        try:
            _call("mincore", ctypes.c_void_p(first), ctypes.c_size_t(length), pages)
        except OSError:
            return 1.0
        is_there = torch.frombuffer(pages, dtype=torch.uint8) & 1  # the other bits are undefined
        return int(is_there.sum()) / len(pages)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in all layers, with the effect of one copy after the other."""
        origins: dict[int, int] = {}
        for copy in copies:
            origins[copy.target] = origins.get(copy.source, copy.source)
        device = self.pages[0].keys.device
        targets, sources = (
            torch.tensor([*ids]).to(device) for ids in (origins.keys(), origins.values())
        )
        for pages in self.pages:
            for tensor in pages:
                # As bytes: torch cannot index float8.
                content = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
                content[targets] = content[sources]

    def discard(self, block_ids: Sequence[int]) -> None:
        """Return the memory of blocks to the operating system; their content becomes zeros.

        Only whole pages can be returned. On a GPU torch keeps the memory. Huge pages are disabled
        from the first of these blocks on, until `use_all`: khugepaged collects small pages into
        huge ones, and would fill the gaps between blocks in use. It is one range for all blocks,
        because a process may have only a limited number (vm.max_map_count).
        """
        first_small = min([self._first_small, *block_ids])
        for tensor in self._on_cpu():
            _give_back(tensor, block_ids)
            if first_small < self._first_small:
                _advise_from(tensor, first_small, mmap.MADV_NOHUGEPAGE)
        self._first_small = first_small

    def use_all(self) -> None:
        """Enable huge pages again, because all blocks are in use."""
        for tensor in self._on_cpu() if self._first_small < self.num_blocks else ():
            _advise_from(tensor, 0, mmap.MADV_HUGEPAGE)
        self._first_small = self.num_blocks

    def _on_cpu(self) -> Iterator[Tensor]:
        for pages in self.pages:
            yield from (tensor for tensor in pages if tensor.device.type == "cpu")


def _give_back(tensor: Tensor, block_ids: Sequence[int]) -> None:
    """Return the memory of some indices, in the first dimension, of a tensor of `_zeros`."""
    size = tensor[0].numel() * tensor.itemsize
    for first, end in _runs(block_ids):
        start = tensor.data_ptr() + first * size
        start, stop = -(-start // mmap.PAGESIZE), (tensor.data_ptr() + end * size) // mmap.PAGESIZE
        if start < stop:
            length = ctypes.c_size_t((stop - start) * mmap.PAGESIZE)
            address = ctypes.c_void_p(start * mmap.PAGESIZE)
            # This splits a huge page, which would otherwise be freed only as a whole.
            with contextlib.suppress(OSError):
                _call("madvise", address, length, _MADV_COLD)
            _call("madvise", address, length, mmap.MADV_DONTNEED)


def _advise_from(tensor: Tensor, first: int, advice: int) -> None:
    """Call madvise on the whole pages of a tensor of `_zeros`, from an index to the end."""
    size = tensor[0].numel() * tensor.itemsize
    start = -(-(tensor.data_ptr() + first * size) // mmap.PAGESIZE) * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    if length > 0:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            _call("madvise", ctypes.c_void_p(start), ctypes.c_size_t(length), advice)


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of consecutive ids, as first and end."""
    first = end = -1
    for one in sorted(ids):
        if one != end:
            if end > first:
                yield first, end
            first = one
        end = one + 1
    if end > first:
        yield first, end


def _call(name: str, *args: Any) -> None:
    """Call the C library. Raises OSError if the call fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args):
        raise OSError(ctypes.get_errno(), name)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros; on a CPU they take memory only once they are written.

    `torch.zeros` writes the zeros, which takes seconds at every start for a cache of gigabytes.
    Freshly mapped memory is zero anyway. Huge pages are requested because the first access to a
    page costs time in the middle of a step.

    Raises:
        OverflowError: 64 bits do not count its bytes. OSError, torch.OutOfMemoryError: there is not
            so much memory.
    """
    numbers = math.prod(shape)
    num_bytes = numbers * dtype.itemsize
    if num_bytes > _MAX_BYTES:  # for which torch would raise a mere RuntimeError
        raise OverflowError(f"{num_bytes} bytes are more than {_MAX_BYTES}")
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes, flags=flags)
    with contextlib.suppress(OSError):  # without huge pages, small ones will do
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=numbers).view(shape)


def kv_layout(
    spec: ModelSpec,
    ops: Ops[Any],
    block_size: int,
    dtype: torch.dtype,
    place: Place,
    kv_cache_dtype: str = "auto",
) -> KVLayout:
    """Describe the KV cache of a rank's part of a model, in the layout of `ops`.

    Args:
        dtype: of the model's computation. kv_cache_dtype: see `EngineArgs`.

    Raises:
        ConfigError: the format does not support heads of this size.
    """
    num_layers = len(stage_layers(spec, place))
    layout = KVLayout(
        num_layers=num_layers,
        num_kv_heads=num_local_kv_heads(spec, place),
        head_dim=spec.head_dim,
        block_size=block_size,
        dtype=(name := format_name(kv_cache_dtype, dtype, spec.head_dim)),
        bytes_per_block=0,
    )
    numbers = sum(math.prod(shape) for shape in ops.page_shapes(layout))
    num_bytes = numbers * num_layers * FORMATS[name].storage.itemsize
    return msgspec.structs.replace(layout, bytes_per_block=num_bytes)
