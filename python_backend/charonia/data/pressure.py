"""How many KV blocks there is memory for while an engine runs beside others on its machine.

Owns the choice. Must not know what becomes of blocks.

    ├──────────────────────────── total ────────────────────────────────────────┤
    ├── others ──┬── KV cache, written ──┬───────────── available ──────────────┤
                 ├──────────── blocks in use ───────┼── spare ──┼─── reserve ───┤

Blocks take memory only once they are written to, so the memory of all that are in use is as good as
taken. Where too little is left for others, fewer are in use; where a reserve is spare, more may be.
"""

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

from charonia.data.memory import Memory, available_memory

_EVERY_S = 1.0
_STEP = 16
"""The pool changes by a sixteenth of all of its blocks at least, or not at all."""
_GROWTH = 8
"""It grows by an eighth of all of its blocks at most in a look: what is free for a moment is not
taken at once, and given back a second later."""
_STALLED = 0.1
"""Share of the time in which all that could run waited for memory. Then there is not enough of it,
where less than twice the reserve is free. The kernel counts the whole machine: where more is free,
others wait at the limit of their own control group, or for a slow disk."""
_PRESSURE = Path("proc/pressure/memory")


class Pressure:
    """Looks at the memory at most once a second.

    Args:
        num_blocks: that the KV cache has, with the null block.
        reserve: share of all memory that is to be left for others.
        written: tells for which share of the blocks memory was taken, as they were written to.
        clock: seconds, monotonic. memory: tells what is available.
        stalled: tells in how many seconds, since whenever, everything waited for memory.
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
        self._most = self._num_blocks = num_blocks  # just sized by the memory that there is
        self._num_in_use = num_blocks  # the memory of the others is given back
        self._bytes_per_block = bytes_per_block
        self._reserve = reserve
        self._written = written
        self._clock = clock
        self._memory = memory
        self._stalled = stalled or stalled_seconds
        self._looked_at = clock()
        self._stalled_s = self._stalled()

    def num_blocks(self) -> int:
        """For which there is memory, with the null block; at least one beside that."""
        now = self._clock()
        if now >= self._looked_at + _EVERY_S:
            self._look(now - self._looked_at)
            self._looked_at = now
        return self._num_blocks

    def note_plan(self, num_blocks: int | None, *, is_first: bool = False) -> None:
        """Take note of how many blocks are in use from a plan on, with the null block.

        What requests hold is not given back before they end, so it may take many plans until that
        are no more than there is memory for.

        Args:
            num_blocks: None is all.
            is_first: of an epoch. It says nothing: it begins with all blocks, and has yet to be
                told for how many there is memory.
        """
        if not is_first:
            self._num_in_use = self._most if num_blocks is None else num_blocks

    def _look(self, seconds: float) -> None:
        """See what there is, so many seconds after the last look."""
        available, total, _ = self._memory()
        reserve = int(total * self._reserve)
        step = max(1, self._most // _STEP)
        # What is written and not in use cannot be given back: its pages have others' blocks, too.
        num_written = min(int(self._written() * self._most), self._num_in_use)
        room = available + num_written * self._bytes_per_block
        num_fitting = (room - reserve) // self._bytes_per_block
        is_short = available < 2 * reserve
        is_stalled = self._stalled_since() >= _STALLED * seconds and is_short
        if num_fitting < self._num_in_use or is_stalled:
            self._num_blocks = max(2, min(self._num_in_use - step, num_fitting))
        else:
            # What was asked for and is held is kept. A late plan has what was said before.
            as_many = max(self._num_blocks, self._num_in_use)
            num_spare = (room - 2 * reserve) // self._bytes_per_block - as_many
            growth = min(num_spare, max(1, self._most // _GROWTH)) if num_spare >= step else 0
            self._num_blocks = min(self._most, as_many + growth)

    def _stalled_since(self) -> float:
        """Seconds of the time since the last look in which everything waited for memory."""
        before, self._stalled_s = self._stalled_s, self._stalled()
        return self._stalled_s - before


def stalled_seconds(root: Path = Path("/")) -> float:
    """The "full" line of the kernel's pressure stall information, in all; 0 without."""
    with contextlib.suppress(OSError):
        text = (root / _PRESSURE).read_text(encoding="ascii")
        if line := re.search(r"^full .* total=(\d+)$", text, re.MULTILINE):
            return int(line[1]) / 1e6
    return 0.0
