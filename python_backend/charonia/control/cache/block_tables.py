"""The block table of each running request: its blocks are found, allocated, published, released.

Owns the mapping from a request's tokens to blocks of the pool. Knows nothing about rows, steps or
policy: others decide which request gets blocks, and which loses them.
"""

from collections.abc import Iterable, Sequence
from math import inf

from charonia.control.cache.block_keys import BlockHasher
from charonia.control.cache.cache_events import CacheEvents
from charonia.control.cache.kv_cache import KVCache
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request
from charonia.control.state.step import NO_DRAFT, Draft
from charonia.protocol import DEFAULT_CACHE_PRIORITY, BlockCopy


class BlockTables:
    """Block tables over one pool.

    Args:
        kv: the engine's blocks.
        hasher: makes the keys of full blocks.
        events: told about published blocks; None tells nothing.
    """

    def __init__(
        self,
        limits: Limits,
        kv: KVCache,
        hasher: BlockHasher,
        events: CacheEvents | None = None,
    ) -> None:
        self.kv = kv
        self._events = events
        self._limits = limits
        self._block_size = limits.block_size
        self._hasher = hasher

    def hits(self, request: Request) -> list[int]:
        """Blocks that a waiting request would begin with: another sample's, or cached ones.

        They never include the last known token, which is always computed for its logits.
        """
        source = self._source(request)
        if source is None:
            return self._cached(request)
        return source.block_ids[: (request.num_prompt - 1) // self._block_size]

    def _source(self, request: Request) -> Request | None:
        """Another sample of the group that has computed the prompt and holds its blocks."""
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
        """Keys of the next blocks behind its hits that a waiting request could use.

        Args:
            hits: its hits, looked up just now. most: most keys to return.
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
        """Blocks that a request lacks to hold `num_tokens` tokens."""
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
        """Reserve a waiting request's cached blocks, if possible; return its number of keys."""
        self.kv.reserve(request.key, self._cached(request))
        return len(request.block_keys)

    def displace(self, request: Request) -> None:
        """Release all blocks of a preempted request, and reserve its published ones for it."""
        if request.takes_hits:
            self.kv.reserve_first(request.key, request.block_ids[: request.num_published])
        self.release(request)

    def take_loaded(
        self, request: Request, first: int, block_ids: Sequence[int], num_loaded: int
    ) -> None:
        """Publish blocks that were loaded from a tier, and release them.

        They are not published if blocks before them have been evicted meanwhile.

        Args:
            request: the request for which they were loaded.
            first: index of the first one in its block table.
            num_loaded: how many of them, from the first one on, were really loaded.
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
        """Begin a request with cached or shared blocks, its cursors behind them.

        Args:
            hits: its hits, looked up just now.

        Returns:
            A block that must be copied first, if any: the block in which the prompt of a shared
            prefix ends, because the other sample continues to write into it.
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
        """Begin a request with all but the last token of a prompt that another sample computed."""
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
        """Allocate blocks for a request and return them. So many must be free."""
        new_block_ids = self.kv.allocate(num_blocks, request.tenant)
        request.block_ids += new_block_ids
        request.num_slots += num_blocks * self._block_size
        return new_block_ids

    def commit(self, request: Request, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        """Move the cursors over what a row has computed, and publish the full blocks behind them.

        Args:
            num_tokens: known tokens that it computed. draft: its drafts in the step.
            num_accepted: drafts that were accepted.
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
        """Release all blocks of a request. They keep their content."""
        self.kv.release(request.block_ids)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Reset a request's table and cursors, without releasing blocks."""
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
        """Publish the event that a block of a request's table can be hit."""
        if self._events is not None:
            keys, first = request.block_keys, index * self._block_size
            token_ids = request.token_ids[first : first + self._block_size]
            self._events.stored(keys[index], keys[index - 1] if index else None, token_ids)

    def _retain(self, request: Request, first: int, end: int) -> None:
        """Set the request's retention for the blocks `first` to `end` - 1 of its table.

        A block belongs to the range that contains its first token. Once a block is refused, the
        request asks for no later one until it begins again: those need as much room, and each try
        costs time proportional to its depth.
        """
        for one in request.retention:
            low = min(one.priority, DEFAULT_CACHE_PRIORITY)
            until = end if one.end is None else min(end, self._limits.blocks_for(one.end))
            for index in range(max(first, self._limits.blocks_for(one.start)), until):
                priority = one.priority if index < request.refused_from else low
                if not self.kv.set_retention(request.block_ids[index], priority, one.ttl_s):
                    request.refused_from = index
