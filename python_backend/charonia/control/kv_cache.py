"""The pool of KV blocks: who holds them, and what the free ones still contain.

Owns reference counts and the map from block keys to blocks. Must not know tensors, requests or
policy. Block 0 is the null block and never leaves.

    free, empty ──allocate──► held ──publish──► held, keyed
        ▲                       │                   │ release (last reference)
        │                    release                ▼
        └───────────────────────┴──evict─── free, keyed ──acquire (a hit)──► held, keyed
"""

import itertools
from collections.abc import Sequence

from charonia.control.eviction import LruEviction


class KVCache:
    """Blocks with reference counts and content that outlives its request.

    Several blocks may have the same key (two requests that computed the same prefix at the same
    time); a hit takes any of them. As each request releases its blocks tail first, a cached
    block's parent key is always cached as well.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._blocks_of: dict[bytes, list[int]] = {}
        self._has_draft_kv = [False] * num_blocks
        self._free = LruEviction()
        for block_id in range(num_blocks - 1, 0, -1):
            self._free.add(block_id, has_content=False)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: empty ones and evictable ones."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold content."""
        return self._free.num_cached

    @property
    def num_used(self) -> int:
        """Blocks that live requests reference."""
        return self.num_blocks - 1 - len(self._free)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of `keys`. Changes nothing."""
        found = []
        for key in keys:
            blocks = self._blocks_of.get(key)
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    def count_free(self, block_ids: Sequence[int]) -> int:
        """How many of these cached blocks are free: acquiring them takes from `num_free`."""
        return sum(self._refs[block_id] == 0 for block_id in block_ids)

    def num_references(self, block_id: int) -> int:
        """How many requests hold a block."""
        return self._refs[block_id]

    def count_with_draft_kv(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks, from the first on, hold the draft model's KV as well."""
        with_kv = itertools.takewhile(self._has_draft_kv.__getitem__, block_ids)
        return sum(1 for _ in with_kv)

    def note_draft_kv(self, block_ids: Sequence[int]) -> None:
        """Say that the draft model computed all of these held blocks; eviction forgets it."""
        for block_id in block_ids:
            self._has_draft_kv[block_id] = True

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Take references to cached blocks (a hit)."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                self._free.take(block_id)
            self._refs[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks for writing, evicting content where no empty one is left.

        The caller has checked `num_free`.
        """
        block_ids = []
        for _ in range(count):
            block_id = self._free.pop()
            self._forget(block_id)
            self._has_draft_kv[block_id] = False
            self._refs[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def publish(self, block_id: int, key: bytes) -> None:
        """Say that a held block is full and computed: from now on it can be hit."""
        assert self._refs[block_id] > 0, f"block {block_id} is published but nobody holds it"
        assert self._key_of[block_id] is None, f"block {block_id} is published twice"
        self._key_of[block_id] = key
        self._blocks_of.setdefault(key, []).append(block_id)

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back a request's references; `block_ids` in the order of its table."""
        for block_id in reversed(block_ids):
            assert self._refs[block_id] > 0, f"block {block_id} is released but nobody holds it"
            self._refs[block_id] -= 1
            if self._refs[block_id] == 0:
                self._free.add(block_id, has_content=self._key_of[block_id] is not None)

    def _forget(self, block_id: int) -> None:
        key = self._key_of[block_id]
        if key is None:
            return
        self._key_of[block_id] = None
        blocks = self._blocks_of[key]
        blocks.remove(block_id)
        if not blocks:
            del self._blocks_of[key]
