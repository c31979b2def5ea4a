"""The interface of a slower tier of the KV cache: numbered slots, each for one block's content.

Owns the protocol. Must not know where the slots are stored, or which contents are worth keeping.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from charonia.protocol import SlotContent

Pieces = Sequence[NDArray[np.uint8]]
"""The memory of one block: the same number of arrays, sizes and order for every block."""


class Slots(Protocol):
    """The slots of one tier of one rank."""

    @property
    def name(self) -> Literal["host", "file"]:
        """The tier's name."""
        ...

    @property
    def num_slots(self) -> int:
        """The number of slots; their numbers are below it."""
        ...

    def contents(self) -> list[SlotContent]:
        """The contents of the slots, in the order of their saves."""
        ...

    def save(self, slot: int, key: bytes, has_draft: bool, pieces: Pieces) -> bool:
        """Save a block's content, in place of the slot's previous content.

        Returns:
            Whether it was saved. If not, the slot is empty.
        """
        ...

    def load(self, slot: int, key: bytes, pieces: Pieces) -> bool:
        """Fill `pieces` with the content of a key.

        Returns:
            Whether the slot has it, undamaged. If not, `pieces` has arbitrary data.
        """
        ...

    def forget(self, slot: int) -> None:
        """Clear a slot."""
        ...

    def close(self) -> None:
        """Release the memory or file of the slots."""
        ...
