"""Slots of blocks for tests, and contents that tell them apart."""

import numpy as np

from charonia.data.kv_tiers.file_slots import FileSlots, bytes_for
from charonia.data.kv_tiers.identity import Identity
from charonia.data.kv_tiers.slots import Slots

SIZES = (5, 700, 3000)
NUM_SLOTS = 12
FULL = bytes_for(NUM_SLOTS, sum(SIZES))
IDENTITY = Identity(b"an engine", b"rank 0")
GIB = 2**30


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content(number: int) -> list[np.ndarray]:
    """Pieces that no other number has."""
    state = np.random.default_rng(number)
    return [state.integers(0, 256, size, dtype=np.uint8) for size in SIZES]


def empty() -> list[np.ndarray]:
    return [np.zeros(size, np.uint8) for size in SIZES]


def save(slots: Slots, slot: int, number: int, *, has_draft: bool = False) -> None:
    assert slots.save(slot, key(number), has_draft, content(number))


def has(slots: Slots, slot: int, number: int) -> bool:
    """Whether a slot gives a content; what it gives is that content."""
    pieces = empty()
    if not slots.load(slot, key(number), pieces):
        return False
    assert all(map(np.array_equal, pieces, content(number))), "it gives something else"
    return True


def fill(*files: FileSlots) -> None:
    for file in files:
        for slot in range(NUM_SLOTS):
            save(file, slot, slot)
