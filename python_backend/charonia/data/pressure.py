"""How many KV blocks there is memory for while an engine runs beside others on its machine.

Owns the choice. Must not know what becomes of blocks.

    ├──────────────── total ─────────────────────────────────────────┤
    ├── in use ──┬───── available ────────────────┤
                 │        reserve      2 reserves
                 │  fewer ───┼─── as many ──┼── more, step by step, up to all
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
_STALLED_PERCENT = 10.0
"""Of the time in which all that could run waited for memory: then there is not enough."""
_PRESSURE = Path("proc/pressure/memory")


class Pressure:
    """Looks at the memory at most once a second.

    Args:
        num_blocks: that the KV cache has, with the null block.
        reserve: share of all memory that is to be left for others.
        clock: seconds, monotonic. memory: tells what is available.
        stalled: tells the percentage of the time in which everything waited for memory.
    """

    def __init__(
        self,
        num_blocks: int,
        bytes_per_block: int,
        reserve: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        memory: Callable[[], Memory] = available_memory,
        stalled: Callable[[], float] | None = None,
    ) -> None:
        self._most = self._num_blocks = num_blocks
        self._num_in_use = num_blocks  # the memory of the others is given back
        self._bytes_per_block = bytes_per_block
        self._reserve = reserve
        self._clock = clock
        self._memory = memory
        self._stalled = stalled or stalled_percent
        self._look_at = clock()

    def num_blocks(self) -> int:
        """For which there is memory, with the null block; at least one beside that."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + _EVERY_S
            self._look()
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

    def _look(self) -> None:
        available, total, _ = self._memory()
        reserve = int(total * self._reserve)
        step = max(1, self._most // _STEP)
        lacking = -(-(reserve - available) // self._bytes_per_block)
        spare = (available - 2 * reserve) // self._bytes_per_block
        if lacking > 0 or self._stalled() >= _STALLED_PERCENT:
            self._num_blocks = max(2, self._num_in_use - max(step, lacking))
        else:
            # What was asked for and is held is kept. A late plan has what was said before.
            as_many = max(self._num_blocks, self._num_in_use)
            self._num_blocks = min(self._most, as_many + (spare if spare >= step else 0))


def stalled_percent(root: Path = Path("/")) -> float:
    """The last ten seconds' "full" line of the kernel's pressure stall information; 0 without."""
    with contextlib.suppress(OSError):
        text = (root / _PRESSURE).read_text(encoding="ascii")
        if line := re.search(r"^full avg10=([0-9.]+) ", text, re.MULTILINE):
            return float(line[1])
    return 0.0
