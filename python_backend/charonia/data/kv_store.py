"""The KV cache's memory: one pair of page tensors per layer, and how many blocks there are.

Owns the tensors and their size. Must not know which request a block belongs to: the control
plane hands blocks out, this is only where they lie.
"""

import contextlib
import math
import mmap
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from torch import Tensor

from charonia.data.comm import Place
from charonia.data.model.shard import num_local_kv_heads, stage_layers
from charonia.data.model.spec import ModelSpec
from charonia.data.ops.base import Ops, Pages
from charonia.errors import ConfigError
from charonia.protocol import KVLayout

PageShapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Of one block's keys and of its values; see `Ops.page_shapes`."""

_CPU_SHARE = 0.25
_CGROUP = Path("/sys/fs/cgroup")


class KVStore:
    """K and V of all layers, over `num_blocks` blocks; block 0 is the null block.

    The pages begin as zeros and only finite values are written to them (see `Ops`), so whatever
    is read beyond a row's context, or through padding, is finite.
    """

    def __init__(
        self, layout: KVLayout, shapes: PageShapes, num_blocks: int, device: torch.device
    ) -> None:
        dtype = getattr(torch, layout.dtype)
        self.num_blocks = num_blocks
        self.pages = [
            Pages(*(_zeros((num_blocks, *shape), dtype, device) for shape in shapes))
            for _ in range(layout.num_layers)
        ]


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
    spec: ModelSpec, ops: Ops[Any], block_size: int, dtype: torch.dtype, place: Place
) -> KVLayout:
    """Describe the KV cache of a rank's part of a model, as large as `ops` lay it out."""
    num_layers = len(stage_layers(spec, place))
    layout = KVLayout(
        num_layers=num_layers,
        num_kv_heads=num_local_kv_heads(spec, place),
        head_dim=spec.head_dim,
        block_size=block_size,
        dtype=str(dtype).removeprefix("torch."),
        bytes_per_block=0,
    )
    numbers = sum(math.prod(shape) for shape in ops.page_shapes(layout))
    return msgspec.structs.replace(layout, bytes_per_block=numbers * num_layers * dtype.itemsize)


def num_blocks_that_fit(
    bytes_per_block: int,
    device: torch.device,
    *,
    max_useful_blocks: int,
    gpu_memory_utilization: float,
    reserved_bytes: int,
    num_local_ranks: int = 1,
) -> int:
    """Size the cache by memory; call it when the weights are loaded.

    On a GPU: what `gpu_memory_utilization` of its memory leaves beside all that is in use and
    `reserved_bytes` for a step's intermediates. On a CPU, where memory is shared with everything
    else: a quarter of the memory available, shared out among the ranks of this machine, but no more
    blocks than `max_useful_blocks`, which is what all rows at their longest would fill. A block has
    `bytes_per_block` in all models together.

    Returns:
        Number of blocks, with the null block.

    Raises:
        ConfigError: there is no memory for even one block beside the null block.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(total * gpu_memory_utilization) - (total - free) - reserved_bytes
    else:
        budget = int(available_memory() * _CPU_SHARE) // num_local_ranks
    num_blocks = budget // bytes_per_block
    if device.type != "cuda":
        num_blocks = min(num_blocks, max_useful_blocks + 1)
    if num_blocks < 2:
        raise ConfigError(
            f"the KV cache needs at least 2 blocks of {bytes_per_block} bytes, but only"
            f" {max(budget, 0)} bytes are left for it on {device.type}; set"
            " num_gpu_blocks_override, a higher gpu_memory_utilization, or a smaller model"
        )
    return num_blocks


def available_memory() -> int:
    """Bytes that can be allocated: of the machine, or of the control group if that is less."""
    available = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(int(limit) - used, 0))
