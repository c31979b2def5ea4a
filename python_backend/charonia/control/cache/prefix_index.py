"""Index of cached prefixes and their blocks: a tree of entries.

Owns the map from keys to entries, and the tree. Knows nothing about who holds a block.

An entry is the content of one full block behind one prefix; its key covers all tokens up to its
end. Requests that compute the same prefix at the same time each hold a block with the same content.
One of these blocks is the entry's own; the others are its duplicates::

    key k1 ── entry 7, blocks 12 and 40 ──► key k2 ── entry 3, block 13
                                       └──► key k5 ── entry 9, block 41

Entries have numbers below the number of blocks, so that data about them can be kept in lists. An
entry allocates nothing but its place in the map.
"""

from collections.abc import Iterable, Sequence

ROOT = 0
"""Parent of the first block of a prefix; not an entry."""


class PrefixIndex:
    """Entries of at most `num_blocks - 1` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._by_key: dict[bytes, int] = {}
        self._entry_of = [ROOT] * num_blocks  # by block
        self._duplicates: dict[int, list[int]] = {}  # blocks by entry
        self._unused = list(range(num_blocks - 1, 0, -1))
        self._key_of = [b""] * num_blocks  # these by entry
        self._block_of = [0] * num_blocks
        self._parent_of = [ROOT] * num_blocks
        self._oldest_of = [ROOT] * num_blocks  # children
        self._youngest_of = [ROOT] * num_blocks
        self._older = [ROOT] * num_blocks  # children of the same parent
        self._younger = [ROOT] * num_blocks

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of `keys`."""
        found = []
        for key in keys:
            entry = self._by_key.get(key)
            if entry is None:
                break
            found.append(self._block_of[entry])
        return found

    def entry_of(self, block_id: int) -> int:
        """The entry whose content a block has; ROOT if none."""
        return self._entry_of[block_id]

    def entry_with(self, key: bytes) -> int:
        """The entry with a key; ROOT if none."""
        return self._by_key.get(key, ROOT)

    def entries(self) -> Iterable[int]:
        """All entries."""
        return self._by_key.values()

    def block_of(self, entry: int) -> int:
        """The block of an entry."""
        return self._block_of[entry]

    def key_of(self, entry: int) -> bytes:
        """The key of an entry."""
        return self._key_of[entry]

    def child_of(self, entry: int) -> int:
        """The oldest child of an entry; ROOT if it has none."""
        return self._oldest_of[entry]

    def parent_of(self, entry: int) -> int:
        """The parent of an entry; ROOT if it is the first of its prefix."""
        return self._parent_of[entry]

    def is_only_child(self, entry: int) -> bool:
        """Return whether the parent of an entry has no other child."""
        return not self._older[entry] and not self._younger[entry]

    def add(self, key: bytes, block_id: int, parent: int) -> int:
        """Add an entry for a block whose key no entry has; return it."""
        entry = self._unused.pop()
        self._by_key[key] = entry
        self._key_of[entry] = key
        self._block_of[entry] = block_id
        self._entry_of[block_id] = entry
        self._parent_of[entry] = parent
        older = self._older[entry] = self._youngest_of[parent]
        self._younger[entry] = ROOT
        if older:
            self._younger[older] = entry
        else:
            self._oldest_of[parent] = entry
        self._youngest_of[parent] = entry
        return entry

    def add_twin(self, entry: int, block_id: int) -> None:
        """Add another block with the same content to an entry."""
        self._entry_of[block_id] = entry
        self._duplicates.setdefault(entry, []).append(block_id)

    def drop_twin(self, block_id: int) -> bool:
        """Forget a block if another one has the same content; return whether one has."""
        entry = self._entry_of[block_id]
        duplicates = self._duplicates.get(entry)
        if duplicates is None:
            return False
        if self._block_of[entry] == block_id:
            self._block_of[entry] = duplicates.pop()
        else:
            duplicates.remove(block_id)
        if not duplicates:
            del self._duplicates[entry]
        self._entry_of[block_id] = ROOT
        return True

    def remove(self, entry: int) -> int:
        """Remove an entry without children and duplicates; return its block."""
        assert not self._oldest_of[entry], "what continues it could never be found again"
        parent, older, younger = self._parent_of[entry], self._older[entry], self._younger[entry]
        if older:
            self._younger[older] = younger
        else:
            self._oldest_of[parent] = younger
        if younger:
            self._older[younger] = older
        else:
            self._youngest_of[parent] = older
        del self._by_key[self._key_of[entry]]
        block_id = self._block_of[entry]
        self._entry_of[block_id] = ROOT
        self._unused.append(entry)
        return block_id
