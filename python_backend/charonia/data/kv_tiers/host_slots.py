"""Slots in this process's memory. They end with the process.

Owns that memory. Must not know blocks.
"""

import mmap
from itertools import accumulate
from typing import Literal

import numpy as np

from charonia.data.kv_tiers.slots import Pieces
from charonia.protocol import SlotContent


class HostSlots:
    """Implements `Slots`. A slot takes memory from its first use on.

    Args:
        num_slots, slot_bytes: the number of slots, and the size of each.
    """

    name: Literal["host"] = "host"

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, num_slots * slot_bytes, flags=flags)
        self._slots = np.frombuffer(self._memory, np.uint8).reshape(num_slots, slot_bytes)
        self._contents: dict[int, SlotContent] = {}

    def contents(self) -> list[SlotContent]:
        """See `Slots`."""
        return list(self._contents.values())

    def save(self, slot: int, key: bytes, has_draft: bool, pieces: Pieces) -> bool:
        """See `Slots`."""
        for end, piece in zip(accumulate(map(len, pieces)), pieces, strict=True):
            self._slots[slot, end - len(piece) : end] = piece
        self._contents.pop(slot, None)
        self._contents[slot] = SlotContent(slot, key, has_draft)
        return True

    def load(self, slot: int, key: bytes, pieces: Pieces) -> bool:
        """See `Slots`."""
        content = self._contents.get(slot)
        if content is None or content.key != key:
            return False
        for end, piece in zip(accumulate(map(len, pieces)), pieces, strict=True):
            piece[:] = self._slots[slot, end - len(piece) : end]
        return True

    def forget(self, slot: int) -> None:
        """See `Slots`."""
        self._contents.pop(slot, None)

    def close(self) -> None:
        """See `Slots`."""
