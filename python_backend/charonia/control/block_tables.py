"""The blocks of each request that has a row: found in the cache, allocated, published, given back.

Owns the way from a request's tokens to blocks of the pool. Must not know rows, steps or policy: who
is given blocks, and who loses them, is decided elsewhere.
"""

from charonia.control.blocks import BlockHasher
from charonia.control.kv_cache import KVCache
from charonia.control.limits import Limits
from charonia.control.request import Request
from charonia.control.step import NO_DRAFT, Draft


class BlockTables:
    """Block tables over one pool.

    Args:
        hash_secret: key of the block hash, 1 to 64 random bytes.

    Attributes:
        kv: the pool.
    """

    def __init__(self, limits: Limits, hash_secret: bytes) -> None:
        self.kv = KVCache(limits.num_blocks)
        self._limits = limits
        self._block_size = limits.block_size
        self._hasher = BlockHasher(hash_secret, limits.block_size)

    def hits(self, request: Request) -> list[int]:
        """Cached blocks of its prefix; the last known token is always computed, for its logits."""
        if not (self._limits.enable_prefix_caching and request.takes_hits):
            return []
        self._extend_keys(request)
        max_hits = (len(request.token_ids) - 1) // self._block_size
        return self.kv.find(request.block_keys[:max_hits])

    def num_left(self, request: Request, hits: list[int]) -> int:
        """Tokens that a waiting request would have to compute with these hits."""
        return len(request.token_ids) - len(hits) * self._block_size

    def num_taken(self, request: Request, hits: list[int]) -> int:
        """Free blocks that the known tokens of a waiting request would take with these hits."""
        num_new = self._limits.blocks_for(self.num_left(request, hits))
        return num_new + self.kv.count_free(hits)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that a request lacks to hold so many tokens."""
        num_tokens -= request.num_slots
        return -(-num_tokens // self._block_size) if num_tokens > 0 else 0

    def num_owed(self, request: Request) -> int:
        """Blocks that a running request lacks for its known tokens, and for one in flight."""
        return self.num_missing(request, len(request.token_ids) + request.num_sampling)

    def begin(self, request: Request, hits: list[int]) -> None:
        """Let a request begin with cached blocks, its cursors behind them."""
        self.kv.acquire(hits)
        request.block_ids = hits
        request.num_slots = len(hits) * self._block_size
        request.num_published = len(hits)
        request.num_computed = len(hits) * self._block_size
        request.num_draft_computed = self.kv.count_with_draft_kv(hits) * self._block_size

    def grow(self, request: Request, num_blocks: int) -> list[int]:
        """Allocate that many blocks for a request, which are free; return them."""
        new_block_ids = self.kv.allocate(num_blocks)
        request.block_ids += new_block_ids
        request.num_slots += num_blocks * self._block_size
        return new_block_ids

    def commit(self, request: Request, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        """Move the cursors over what a row has computed, and let others hit the blocks behind.

        Args:
            num_tokens: known ones that it computed. draft: what it drafted beside them.
            num_accepted: drafts that its request has taken.
        """
        num_known = request.num_computed + num_tokens
        request.num_computed = num_known + num_accepted
        if draft is not NO_DRAFT and draft.is_by_engine:
            first = request.num_draft_computed
            last = draft.computed_after(num_known, first, num_accepted)
            request.num_draft_computed = last
            size = self._block_size
            self.kv.note_draft_kv(request.block_ids[first // size : last // size])
        if request.num_computed // self._block_size > request.num_published:
            self._publish(request)

    def release(self, request: Request) -> None:
        """Take all blocks of a request. They keep their content."""
        self.kv.release(request.block_ids)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Have a request begin anew."""
        request.block_ids = []
        request.num_slots = 0
        request.num_published = 0
        request.num_computed = 0
        request.num_draft_computed = 0

    def _extend_keys(self, request: Request) -> None:
        self._hasher.extend(request.block_keys, request.token_ids, request.cache_scope)

    def _publish(self, request: Request) -> None:
        if not self._limits.enable_prefix_caching:
            return
        self._extend_keys(request)
        for index in range(request.num_published, request.num_computed // self._block_size):
            self.kv.publish(request.block_ids[index], request.block_keys[index])
            request.num_published += 1
