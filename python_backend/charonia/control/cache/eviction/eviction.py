"""What decides which cached content goes first.

An eviction is told of entries of the prefix index by number (see `prefix_index`), and keeps what it
likes of each in lists of its own::

    insert ──► held ──free──► free ──victim()──► evict
                ▲               │
                └──────hit──────┘      hit is also told of what is held already
"""

from typing import Protocol


class Eviction(Protocol):
    """An order of the entries that nobody holds. A call takes O(log n) or less, amortized."""

    def insert(self, entry: int, key: bytes, parent: int) -> None:
        """A request has computed an entry, and holds it.

        Args:
            parent: the entry that it continues; ROOT if it is the first of its prefix.
        """
        ...

    def hit(self, entry: int) -> None:
        """A request found an entry and holds it, whether others did or nobody."""
        ...

    def free(self, entry: int) -> None:
        """Nobody holds an entry any more: it may be evicted.

        Of several that become free together, those deeper in the prefix come first.
        """
        ...

    def victim(self) -> int:
        """The free entry that is worth least; there must be one. It stays where it is.

        Where others continue it, these go before it.
        """
        ...

    def evict(self, entry: int) -> None:
        """A free entry has lost its content; its number will be given to another one."""
        ...
