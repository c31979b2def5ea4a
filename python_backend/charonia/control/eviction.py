"""In which order free blocks lose their content.

Owns the free blocks' order. Must not know requests or keys: whoever adds a block says whether it
has content worth keeping.
"""

from collections import OrderedDict


class LruEviction:
    """Free blocks, least recently used first; those without content before all.

    Blocks of one request are added tail first, so a child always precedes its parent.
    Everything is O(1).
    """

    def __init__(self) -> None:
        self._empty: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold content."""
        return len(self._cached)

    def add(self, block_id: int, *, has_content: bool) -> None:
        """A block became free."""
        if has_content:
            self._cached[block_id] = None
        else:
            self._empty.append(block_id)

    def take(self, block_id: int) -> None:
        """A free block with content was hit: it is no longer free."""
        del self._cached[block_id]

    def pop(self) -> int:
        """The next free block; its content, if any, is lost. There must be one."""
        if self._empty:
            return self._empty.pop()
        return self._cached.popitem(last=False)[0]
