"""Events about the content of the prefix cache.

Owns the protocol. Knows nothing about the listeners.
"""

from collections.abc import Sequence
from typing import Protocol


class CacheEvents(Protocol):
    """Receives every change to the set of keys that can be hit, in order, as it happens.

    A second block with the same content is no change, and neither is the release of a block.
    """

    def stored(self, key: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        """A block can be hit from now on.

        Args:
            parent: key of the block before it, which is stored; None if it is the first one.
            token_ids: tokens of this block alone.
        """

    def removed(self, key: bytes) -> None:
        """A block cannot be hit any more; no stored block continues it."""

    def cleared(self) -> None:
        """No block can be hit any more."""
