"""The blocks of each request that has a row: found in the cache, allocated, published, given back.

Owns the way from a request's tokens to blocks of the pool. Must not know rows, steps or policy: who
is given blocks, and who loses them, is decided elsewhere.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from charonia.control.cache import BlockHasher, CacheEvents, KVCache, Tiers
from charonia.control.cache.eviction import Eviction
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request
from charonia.control.state.stats import SchedulerStats
from charonia.control.state.step import NO_DRAFT, Draft
from charonia.protocol import DEFAULT_CACHE_PRIORITY, BlockCopy


class BlockTables:
    """Block tables over one pool.

    Args:
        hash_secret: key of the block hash, 1 to 64 random bytes.
        eviction, stats, events, tiers, weight_of, new_hasher: see `Scheduler`.

    Attributes:
        kv: the pool.
    """

    def __init__(
        self,
        limits: Limits,
        hash_secret: bytes,
        eviction: Callable[[int], Eviction],
        stats: SchedulerStats,
        events: CacheEvents | None = None,
        tiers: Tiers | None = None,
        weight_of: Callable[[str], float] | None = None,
        new_hasher: Callable[[bytes, int], BlockHasher] = BlockHasher,
    ) -> None:
        num_blocks = limits.num_blocks
        self.kv = KVCache(num_blocks, eviction(num_blocks), stats, events, tiers, weight_of)
        self._events = events
        self._limits = limits
        self._block_size = limits.block_size
        self._hasher = new_hasher(hash_secret, limits.block_size)

    def hits(self, request: Request) -> list[int]:
        """Blocks that a waiting request would begin with: another sample's, or cached ones.

        The last known token is always computed, for its logits.
        """
        source = self._source(request)
        if source is None:
            return self._cached(request)
        return source.block_ids[: (request.num_prompt - 1) // self._block_size]

    def _source(self, request: Request) -> Request | None:
        """Who has computed the prompt that a request begins with, and holds it."""
        if len(request.group.members) < 2 or request.num_generated:
            return None
        return next(request.group.forks(request.num_prompt - 1), None)

    def _cached(self, request: Request) -> list[int]:
        if not (self._limits.enable_prefix_caching and request.takes_hits):
            return []
        self._extend_keys(request)
        max_hits = (len(request.token_ids) - 1) // self._block_size
        return self.kv.find(request.block_keys[:max_hits])

    def missing_keys(self, request: Request, hits: Sequence[int], most: int) -> list[bytes]:
        """Keys of the next blocks that a waiting request might hit as well, if they were there.

        Args:
            hits: of this moment. most: keys.
        """
        if self._source(request) is not None or not request.takes_hits:
            return []
        max_hits = (len(request.token_ids) - 1) // self._block_size
        return request.block_keys[len(hits) : min(max_hits, len(hits) + most)]

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

    def num_owed(self, requests: Iterable[Request]) -> int:
        """Blocks that running requests lack for their known tokens, and for those in flight."""
        num_blocks = 0
        for one in requests:
            num_tokens = len(one.token_ids) + one.num_sampling - one.num_slots
            if num_tokens > 0:
                num_blocks += self._limits.blocks_for(num_tokens)
        return num_blocks

    def reserve(self, request: Request) -> int:
        """Keep what a waiting request will hit, as far as that can be; how many blocks it has."""
        self.kv.reserve(request.key, self._cached(request))
        return len(request.block_keys)

    def displace(self, request: Request) -> None:
        """Take all blocks of a request that will wait for them."""
        if request.takes_hits:
            self.kv.reserve_first(request.key, request.block_ids[: request.num_published])
        self.release(request)

    def take_loaded(
        self, request: Request, first: int, block_ids: Sequence[int], num_loaded: int
    ) -> None:
        """Let requests hit blocks that were loaded, and take them back.

        Nobody can hit them if what comes before them has been evicted meanwhile.

        Args:
            request: for which they were loaded. first: the place of the first one in its table.
            num_loaded: how many of them, from the first one on, have the request's content.
        """
        before = self.kv.find(request.block_keys[:first])
        if len(before) < first:
            num_loaded = 0
        previous = before[-1] if before else 0
        for place, block_id in enumerate(block_ids[:num_loaded], first):
            if self.kv.publish(block_id, request.block_keys[place], previous):
                self._note_stored(request, place)
            previous = block_id
        if num_loaded and request.row is None and not request.is_ended:
            self.kv.reserve(request.key, [*before, *block_ids[:num_loaded]], were_loaded=True)
        self.kv.release(block_ids)

    def begin(self, request: Request, hits: list[int]) -> BlockCopy | None:
        """Let a request begin with blocks that are there, its cursors behind them.

        Args:
            hits: of this moment.

        Returns:
            What must be copied first, into a block of its own: the other sample goes on in the
            block in which their prompt ends.
        """
        source = self._source(request)
        if source is not None:
            return self._fork(request, hits, source)
        self.kv.acquire(hits, request.key)
        request.block_ids = hits
        self._retain(request, 0, len(hits))
        request.num_slots = len(hits) * self._block_size
        request.num_published = len(hits)
        request.num_computed = len(hits) * self._block_size
        request.num_draft_computed = self.kv.count_with_draft_kv(hits) * self._block_size
        return None

    def _fork(self, request: Request, hits: list[int], source: Request) -> BlockCopy | None:
        """Let a request begin with all of its prompt but the last token, as another computed it."""
        self.kv.share(hits)
        self.kv.unreserve(request.key)
        request.block_ids = hits
        request.num_slots = len(hits) * self._block_size
        request.num_published = min(len(hits), source.num_published)
        request.block_keys = source.block_keys[: request.num_published]
        request.num_computed = request.num_prompt - 1
        request.num_draft_computed = min(source.num_draft_computed, request.num_computed)
        if request.num_computed == request.num_slots:
            return None
        return BlockCopy(source.block_ids[len(hits)], *self.grow(request, 1))

    def grow(self, request: Request, num_blocks: int) -> list[int]:
        """Allocate that many blocks for a request, which are free; return them."""
        new_block_ids = self.kv.allocate(num_blocks, request.tenant)
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
        request.refused_from = inf

    def _extend_keys(self, request: Request) -> None:
        self._hasher.extend(request.block_keys, request.token_ids, request.cache_scope)

    def _publish(self, request: Request) -> None:
        if not self._limits.enable_prefix_caching:
            return
        self._extend_keys(request)
        block_ids, keys = request.block_ids, request.block_keys
        num_full = request.num_computed // self._block_size
        for index in range(request.num_published, num_full):
            previous = block_ids[index - 1] if index else 0
            is_new = self.kv.publish(block_ids[index], keys[index], previous)
            if is_new:
                self._note_stored(request, index)
        self._retain(request, request.num_published, num_full)
        request.num_published = num_full

    def _note_stored(self, request: Request, index: int) -> None:
        """Tell that the block at one place of a request's table can be hit."""
        if self._events is not None:
            keys, first = request.block_keys, index * self._block_size
            token_ids = request.token_ids[first : first + self._block_size]
            self._events.stored(keys[index], keys[index - 1] if index else None, token_ids)

    def _retain(self, request: Request, first: int, end: int) -> None:
        """Say of blocks from one place of its table to another how its request wants them kept.

        A block counts to the range in which its first token lies. Who is refused asks for nothing
        more until it begins anew: what is behind needs as much room, and a try costs its depth.
        """
        for one in request.retention:
            low = min(one.priority, DEFAULT_CACHE_PRIORITY)
            until = end if one.end is None else min(end, self._limits.blocks_for(one.end))
            for index in range(max(first, self._limits.blocks_for(one.start)), until):
                priority = one.priority if index < request.refused_from else low
                if not self.kv.set_retention(request.block_ids[index], priority, one.ttl_s):
                    request.refused_from = index
