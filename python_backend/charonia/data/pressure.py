"""Number of KV blocks that fit into memory while an engine shares its machine with other processes.

Owns the choice. Must not know how blocks are used.

    ├──────────────────────────── total ────────────────────────────────────────┤
    ├── others ──┬── KV cache, written ──┬───────────── available ──────────────┤
                 ├──────────── blocks in use ───────┼── spare ──┼─── reserve ───┤

A block takes memory only once it is written, so the memory of all blocks in use counts as taken. If
too little memory is left for other processes, fewer blocks may be used. If a reserve more is spare,
more may be used.
"""

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

from charonia.data.memory import Memory, available_memory

_EVERY_S = 1.0
_STEP = 16
"""The pool changes by at least a sixteenth of all its blocks, or not at all."""
_GROWTH = 8
"""The pool grows by at most an eighth of all its blocks at a time, so that memory which is free for
a moment is not taken and returned a second later."""
_STALLED = 0.1
"""Share of the time in which all runnable tasks waited for memory. From this share on memory is
short, if less than twice the reserve is free. The kernel counts the whole machine: if more is free,
other processes wait at the limit of their own control group, or for a slow disk."""
_PRESSURE = Path("proc/pressure/memory")


class Pressure:
    """Checks the memory, at most once a second.

    Args:
        num_blocks: of the KV cache, including the null block.
        reserve: share of all memory to leave to other processes.
        written: returns the share of the blocks that have taken memory, by being written.
        clock: seconds, monotonic. memory: returns the available memory.
        stalled: returns the total seconds in which all tasks waited for memory.
    """

    def __init__(
        self,
        num_blocks: int,
        bytes_per_block: int,
        reserve: float,
        *,
        written: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        memory: Callable[[], Memory] = available_memory,
        stalled: Callable[[], float] | None = None,
    ) -> None:
        self._most = self._num_blocks = num_blocks  # just sized by the available memory
        self._num_in_use = num_blocks  # the memory of the others was returned
        self._bytes_per_block = bytes_per_block
        self._reserve = reserve
        self._written = written
        self._clock = clock
        self._memory = memory
        self._stalled = stalled or stalled_seconds
        self._looked_at = clock()
        self._stalled_s = self._stalled()

    def num_blocks(self) -> int:
        """The number of blocks that fit, including the null block; at least one besides it."""
        now = self._clock()
        if now >= self._looked_at + _EVERY_S:
            self._look(now - self._looked_at)
            self._looked_at = now
        return self._num_blocks

    def note_plan(self, num_blocks: int | None, *, is_first: bool = False) -> None:
        """Note how many blocks are in use from a plan on, including the null block.

        Requests keep their blocks until they end, so it may take many plans until no more are in
        use than fit.

        Args:
            num_blocks: None means all.
            is_first: whether it is the first plan of an epoch. It is ignored, because an epoch
                begins with all blocks until it is told how many fit.
        """
        if not is_first:
            self._num_in_use = self._most if num_blocks is None else num_blocks

    def _look(self, seconds: float) -> None:
        """Check the memory, `seconds` after the last check."""
        available, total, _ = self._memory()
        reserve = int(total * self._reserve)
        step = max(1, self._most // _STEP)
        # Written blocks that are not in use cannot be returned if their pages contain other blocks.
        num_written = min(int(self._written() * self._most), self._num_in_use)
        room = available + num_written * self._bytes_per_block
        num_fitting = (room - reserve) // self._bytes_per_block
        is_short = available < 2 * reserve
        is_stalled = self._stalled_since() >= _STALLED * seconds and is_short
        if num_fitting < self._num_in_use or is_stalled:
            self._num_blocks = max(2, min(self._num_in_use - step, num_fitting))
        else:
            # Blocks in use stay in use. A plan in flight still has the number told before.
            as_many = max(self._num_blocks, self._num_in_use)
            num_spare = (room - 2 * reserve) // self._bytes_per_block - as_many
            growth = min(num_spare, max(1, self._most // _GROWTH)) if num_spare >= step else 0
            self._num_blocks = min(self._most, as_many + growth)

    def _stalled_since(self) -> float:
        """Seconds since the last check in which all tasks waited for memory."""
        before, self._stalled_s = self._stalled_s, self._stalled()
        return self._stalled_s - before


def stalled_seconds(root: Path = Path("/")) -> float:
    """Total seconds of the "full" line of the kernel's pressure stall information; 0 without it."""
    with contextlib.suppress(OSError):
        text = (root / _PRESSURE).read_text(encoding="ascii")
        if line := re.search(r"^full .* total=(\d+)$", text, re.MULTILINE):
            return int(line[1]) / 1e6
    return 0.0
