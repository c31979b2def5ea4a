"""What a slower tier of the KV cache is: numbered slots, each with the content of one block.

Owns the protocol. Must not know where the slots lie, nor which of them is worth keeping.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from charonia.protocol import SlotContent

Pieces = Sequence[NDArray[np.uint8]]
"""Of one block, always the same number, of the same sizes, in the same order."""


class Slots(Protocol):
    """Slots of one tier, of one rank."""

    @property
    def name(self) -> Literal["host", "file"]:
        """Of the tier."""
        ...

    @property
    def num_slots(self) -> int:
        """They have numbers below this."""
        ...

    def contents(self) -> list[SlotContent]:
        """What they contain, in the order in which it was saved."""
        ...

    def save(self, slot: int, key: bytes, has_draft: bool, pieces: Pieces) -> bool:
        """Keep a block's content in place of what is there.

        Returns:
            Whether it is kept. Else the slot is empty.
        """
        ...

    def load(self, slot: int, key: bytes, pieces: Pieces) -> bool:
        """Fill `pieces` with the content of a key.

        Returns:
            Whether the slot has it, whole. Else what is in `pieces` means nothing.
        """
        ...

    def forget(self, slot: int) -> None:
        """What a slot contains is of no use."""
        ...

    def close(self) -> None:
        """Let go of what the slots lie in."""
        ...
