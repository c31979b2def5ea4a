"""The KV cache's memory: one pair of page tensors per layer.

Owns the tensors and their shape. Must not know which request a block belongs to: the control
plane hands blocks out, this is only where they lie.
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

PageShapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Of one block's keys and of its values; see `Ops.page_shapes`."""


class KVStore:
    """K and V of all layers, over `num_blocks` blocks; block 0 is the null block.

    The pages begin as zeros and only finite values are written to them (see `Ops`), so whatever
    is read beyond a row's context, or through padding, is finite.
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
        self._first_small = num_blocks  # from this block on, no huge pages are wished for

    @property
    def num_bytes(self) -> int:
        """That all pages have."""
        return sum(tensor.nbytes for pages in self.pages for tensor in pages)

    def written(self) -> float:
        """For which share of the blocks a CPU's memory was taken, as they were written to.

        By the first layer's keys: all layers are written to alike. All where the kernel does not
        tell. What was only read may count, too; nothing is read that was not written.
        """
        keys = self.pages[0].keys
        first = keys.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        length = keys.data_ptr() + keys.nbytes - first
        pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        try:
            _call("mincore", ctypes.c_void_p(first), ctypes.c_size_t(length), pages)
        except OSError:
            return 1.0
        is_there = torch.frombuffer(pages, dtype=torch.uint8) & 1  # the other bits say nothing
        return int(is_there.sum()) / len(pages)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in all layers, as if one after the other."""
        origins: dict[int, int] = {}
        for copy in copies:
            origins[copy.target] = origins.get(copy.source, copy.source)
        device = self.pages[0].keys.device
        targets, sources = (
            torch.tensor([*ids]).to(device) for ids in (origins.keys(), origins.values())
        )
        for pages in self.pages:
            for tensor in pages:
                # Whatever they are: torch takes no float8 by an index.
                content = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
                content[targets] = content[sources]

    def discard(self, block_ids: Sequence[int]) -> None:
        """Give back the memory of blocks, as far as whole pages of it are theirs; they are zeros
        then. On a GPU it stays with torch.

        From the first of them on there are no new huge pages until `use_all`: the kernel collects
        small pages into huge ones (khugepaged), and would fill the holes between blocks that are in
        use. That is one range for all of them, because a process has few (vm.max_map_count).
        """
        first_small = min([self._first_small, *block_ids])
        for tensor in self._on_cpu():
            _give_back(tensor, block_ids)
            if first_small < self._first_small:
                _advise_from(tensor, first_small, mmap.MADV_NOHUGEPAGE)
        self._first_small = first_small

    def use_all(self) -> None:
        """Wish for huge pages again, as at first, where blocks were discarded: all are in use."""
        for tensor in self._on_cpu() if self._first_small < self.num_blocks else ():
            _advise_from(tensor, 0, mmap.MADV_HUGEPAGE)
        self._first_small = self.num_blocks

    def _on_cpu(self) -> Iterator[Tensor]:
        for pages in self.pages:
            yield from (tensor for tensor in pages if tensor.device.type == "cpu")


def _give_back(tensor: Tensor, block_ids: Sequence[int]) -> None:
    """Have the operating system take the memory of some first indices of a tensor of `_zeros`."""
    size = tensor[0].numel() * tensor.itemsize
    for first, end in _runs(block_ids):
        start = tensor.data_ptr() + first * size
        start, stop = -(-start // mmap.PAGESIZE), (tensor.data_ptr() + end * size) // mmap.PAGESIZE
        if start < stop:
            length = ctypes.c_size_t((stop - start) * mmap.PAGESIZE)
            address = ctypes.c_void_p(start * mmap.PAGESIZE)
            # Of a huge page nothing would be free before all of it is; this has it split.
            with contextlib.suppress(OSError):
                _call("madvise", address, length, _MADV_COLD)
            _call("madvise", address, length, mmap.MADV_DONTNEED)


def _advise_from(tensor: Tensor, first: int, advice: int) -> None:
    """Advise the kernel on whole pages of a tensor of `_zeros`, from an index on to its end."""
    size = tensor[0].numel() * tensor.itemsize
    start = -(-(tensor.data_ptr() + first * size) // mmap.PAGESIZE) * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    if length > 0:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            _call("madvise", ctypes.c_void_p(start), ctypes.c_size_t(length), advice)


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and behind the last of those that follow each other."""
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
    """Call the C library. Raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args):
        raise OSError(ctypes.get_errno(), name)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros; on a CPU they take memory only where they are written to.

    `torch.zeros` writes the zeros, which for a cache of gigabytes takes seconds of every start;
    memory that the operating system maps is zero without that. Huge pages are wished for, because
    a page's first touch costs time in the middle of a step.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    numbers = math.prod(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, numbers * dtype.itemsize, flags=flags)
    with contextlib.suppress(OSError):  # where there are none, small pages do
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
    """Describe the KV cache of a rank's part of a model, as large as `ops` lay it out.

    Args:
        dtype: what the model computes in. kv_cache_dtype: see `EngineArgs`.

    Raises:
        ConfigError: heads of this model's size cannot be kept so.
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
