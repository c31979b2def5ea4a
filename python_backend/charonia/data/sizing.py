"""Number of KV blocks that fit on a rank, by the free memory after running the largest step.

Owns the arithmetic and its report. Must not know how a step is run, or how many blocks fit on other
ranks.

    ├── in use ──┼──────────── available, after the step ─────────────┤
                 ├── the step at its peak ──┼── KV cache ──┼── left ──┤
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from charonia.config import EngineArgs
from charonia.data.basis import Basis
from charonia.data.loaded_models import Models
from charonia.data.memory import available_memory
from charonia.data.usage import transient_bytes, used_bytes
from charonia.errors import ConfigError
from charonia.protocol import MemoryReport

_MIB = 2**20


class Room(NamedTuple):
    """The KV blocks that fit on a rank, or that all ranks of an engine allocate.

    Attributes:
        num_blocks: how many fit; the ranks agree on the least.
        slot_bytes: size of a block in all models; the ranks agree on the most.
    """

    num_blocks: int
    slot_bytes: int


class Sizing(NamedTuple):
    """The KV blocks that fit on this rank.

    Attributes:
        num_blocks: including the null block.
        step_bytes: peak memory of the largest step; None if it was not run, because the arguments
            set the KV cache's size.
        weight_bytes: memory in use before that step.
        num_useful: the most blocks that `max_num_seqs` requests can use, including the null block;
            None if the cache may be larger.
    """

    num_blocks: int
    bytes_per_block: int
    step_bytes: int | None
    weight_bytes: int
    num_useful: int | None = None

    @property
    def room(self) -> Room:
        """The numbers to agree upon with other ranks."""
        return Room(self.num_blocks, self.bytes_per_block)

    def shortage(self, num_blocks: int) -> str | None:
        """A log line if fewer blocks fit than can be used, else None.

        Args:
            num_blocks: the number that all ranks have agreed upon.
        """
        if self.num_useful is None or num_blocks >= self.num_useful:
            return None
        return (
            f"memory: {self.num_useful} blocks could be used at most, but there is memory for"
            f" {num_blocks} now; the KV cache has no more until the engine is loaded again"
        )

    def report(self, room: Room, device: torch.device, num_local_ranks: int) -> MemoryReport:
        """Account for this rank's memory.

        Args:
            room: the numbers that all ranks have agreed upon.
            num_local_ranks: ranks of this machine. On a CPU they share its memory. Each of the
                others takes as much for a step as this one, and at most as much as `room` for its
                KV cache.
        """
        available, total, source = _left(device)
        kv_cache = room.num_blocks * self.bytes_per_block
        step = self.step_bytes or 0
        num_others = 0 if device.type == "cuda" else num_local_ranks - 1
        others = num_others * (step + room.num_blocks * room.slot_bytes)
        return MemoryReport(
            weights=self.weight_bytes,
            step=self.step_bytes,
            kv_cache=kv_cache,
            left=max(available - step - kv_cache - others, 0),
            total=total,
            source=source,
        )


def size(basis: Basis, models: Models, run_step: Callable[[int], None]) -> Sizing:
    """Compute how many KV blocks fit. All models have the same block ids.

    Args:
        run_step: runs the largest step, see `run_largest_step`. Its argument is the most tokens
            that the KV cache can have.

    Raises:
        ConfigError: there is not even memory for one block besides the null block.
        Exception: the step's own error.
    """
    args, device = basis.args, basis.device
    bytes_per_block = sum(
        model.layout.bytes_per_block for model in (models.target, models.draft) if model
    )
    weight_bytes = used_bytes(device)
    if args.num_gpu_blocks_override is not None:
        return Sizing(args.num_gpu_blocks_override, bytes_per_block, None, weight_bytes)
    if args.kv_cache_memory_bytes is not None:
        num_blocks = _blocks(args.kv_cache_memory_bytes, bytes_per_block, device)
        return Sizing(num_blocks, bytes_per_block, None, weight_bytes)

    num_useful = None
    if device.type != "cuda":
        num_useful = args.most_rows * -(-basis.max_model_len // args.block_size) + 1

    def num_blocks_beside(step_bytes: int) -> int:
        budget = _budget(args, device, step_bytes, basis.local_rank.count)
        num_blocks = _blocks(budget, bytes_per_block, device)
        return num_blocks if num_useful is None else min(num_blocks, num_useful)

    pool_tokens = num_blocks_beside(0) * args.block_size
    step_bytes = transient_bytes(lambda: run_step(pool_tokens), device)
    num_blocks = num_blocks_beside(step_bytes)
    return Sizing(num_blocks, bytes_per_block, step_bytes, weight_bytes, num_useful)


def line_of(report: MemoryReport, num_blocks: int) -> str:
    """The report as a log line."""
    step = "not measured" if report.step is None else f"{report.step / _MIB:.1f} MiB"
    return (
        f"memory: {report.weights / _MIB:.1f} MiB in use with the weights; largest step {step};"
        f" KV cache {report.kv_cache / _MIB:.1f} MiB, {num_blocks} blocks;"
        f" {report.left / _MIB:.1f} MiB of {report.total / _MIB:.1f} MiB are left"
        f" ({report.source})"
    )


def _left(device: torch.device) -> tuple[int, int, str]:
    """A device's available and total memory, and the source of the limit."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total, str(device)
    return available_memory()


def _budget(args: EngineArgs, device: torch.device, step_bytes: int, num_local_ranks: int) -> int:
    """Bytes for the KV cache, besides the memory in use and that of a step."""
    available, total, _ = _left(device)
    if device.type == "cuda":
        return int(total * args.gpu_memory_utilization) - (total - available) - step_bytes
    return int((available // num_local_ranks - step_bytes) * args.cpu_memory_utilization)


def _blocks(budget: int, bytes_per_block: int, device: torch.device) -> int:
    num_blocks = budget // bytes_per_block
    if num_blocks < 2:
        which = "gpu" if device.type == "cuda" else "cpu"
        raise ConfigError(
            f"the KV cache needs at least 2 blocks of {bytes_per_block} bytes, but only"
            f" {max(budget, 0)} bytes are left for it on {device.type}; set"
            f" num_gpu_blocks_override, a larger {which}_memory_utilization or"
            " kv_cache_memory_bytes, a smaller max_num_batched_tokens, or a smaller model"
        )
    return num_blocks
