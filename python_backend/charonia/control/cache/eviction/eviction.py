"""The protocol of an eviction policy, which decides which cached content is evicted first.

A policy knows entries of the prefix index by number (see `prefix_index`), and keeps data about them
in lists of its own::

    insert ──► held ──free──► free ──victim()──► evict
                ▲               │
                └──────hit──────┘      hit is also called for held entries
"""

from typing import Protocol


class Eviction(Protocol):
    """An order of the free entries. A call takes O(log n) or less, amortized."""

    def insert(self, entry: int, key: bytes, parent: int) -> None:
        """A request has computed an entry and holds it.

        Args:
            parent: the entry that it continues; ROOT if it is the first of its prefix.
        """
        ...

    def hit(self, entry: int) -> None:
        """A request found an entry and holds it; others may have held it already."""
        ...

    def free(self, entry: int) -> None:
        """An entry is not held any more and may be evicted.

        If several become free together, those deeper in the prefix come first.
        """
        ...

    def victim(self) -> int:
        """The free entry that is worth least; there must be one. Does not remove it.

        If others continue it, they are evicted before it.
        """
        ...

    def evict(self, entry: int) -> None:
        """A free entry has lost its content; its number will be reused."""
        ...
