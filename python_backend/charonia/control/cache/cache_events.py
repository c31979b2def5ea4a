"""Who is told what the prefix cache holds, so that others can know it elsewhere.

Owns the protocol. Must not know who listens, nor what they do with it.
"""

from collections.abc import Sequence
from typing import Protocol


class CacheEvents(Protocol):
    """Told of every change to the set of keys that can be hit, in order, as it happens.

    A second block with the same content is no change, nor is a block that is given back.
    """

    def stored(self, key: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        """A block can be hit from now on.

        Args:
            parent: key of the block before it, which is stored; None if it is the first one.
            token_ids: of this block alone.
        """

    def removed(self, key: bytes) -> None:
        """A block cannot be hit any more; none continues it."""

    def cleared(self) -> None:
        """No block can."""
