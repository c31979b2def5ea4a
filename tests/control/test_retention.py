"""What requests ask to be kept, or given up, before the rest."""

import random
from collections.abc import Callable
from math import inf

import pytest

from charonia.control import KVPool, Limits
from charonia.control.cache import KVCache
from charonia.control.cache.eviction import EVICTIONS, Eviction, Lfu, Lru
from charonia.control.cache.prefix_index import PrefixIndex
from charonia.control.state.step import NO_DRAFT
from charonia.protocol import DEFAULT_CACHE_PRIORITY, CacheRange
from support.counting import count_calls
from support.invariants import check_cache
from support.stepping import make_request

LONG = 9.0


def path(name: int, length: int) -> list[bytes]:
    """The keys of a prefix of that many blocks."""
    return [bytes([name, *[0] * depth]) for depth in range(length)]


def hold(cache: KVCache, keys: list[bytes]) -> list[int]:
    """The blocks of a request for this prefix, cached or computed."""
    block_ids = cache.find(keys)
    cache.acquire(block_ids)
    for key in keys[len(block_ids) :]:
        previous = block_ids[-1] if block_ids else 0
        block_ids += cache.allocate(1)
        cache.publish(block_ids[-1], key, previous)
    return block_ids


def use(
    cache: KVCache,
    keys: list[bytes],
    priority: int | None = None,
    *,
    first: int = 0,
    ttl_s: float | None = None,
) -> None:
    """A request for this prefix comes and goes, and asks for this from one block on."""
    block_ids = hold(cache, keys)
    if priority is not None:
        for block_id in block_ids[first:]:
            cache.set_retention(block_id, priority, ttl_s)
    check_cache(cache)
    cache.release(block_ids)
    check_cache(cache)


def flood(cache: KVCache, num_blocks: int, first: int = 100) -> None:
    """So many others come and go, each with a prompt of one block."""
    for name in range(first, first + num_blocks):
        use(cache, path(name, 1))


def num_cached(cache: KVCache, keys: list[bytes]) -> int:
    return len(cache.find(keys))


@pytest.mark.parametrize("eviction", EVICTIONS.values())
def test_what_has_a_priority_survives_what_has_none_whatever_the_eviction(
    eviction: Callable[[int], Eviction],
):
    cache = KVCache(17, eviction(17))
    use(cache, path(1, 4), 36)
    use(cache, path(2, 4))
    flood(cache, 50)
    assert num_cached(cache, path(1, 4)) == 4
    assert num_cached(cache, path(2, 4)) < 4


def test_lower_priorities_go_first_and_of_equal_ones_what_was_used_longest_ago():
    cache = KVCache(17, Lru(17))
    for name, priority in ((1, 50), (2, 90), (3, 50), (4, None), (5, 10), (6, 0), (7, 10)):
        use(cache, path(name, 2), priority)
    order = []
    for _ in range(16):
        before = {name for name in range(1, 8) if num_cached(cache, path(name, 1))}
        cache.allocate(1)
        check_cache(cache)
        order += [name for name in before if not num_cached(cache, path(name, 1))]
    assert order == [6, 5, 7, 4, 1, 3, 2]


def test_nothing_is_refused_where_all_that_is_left_is_retained():
    cache = KVCache(9, Lru(9))
    use(cache, path(1, 4), 100)
    assert cache.num_free == 8
    cache.allocate(8)
    check_cache(cache)
    assert cache.num_retained == 0


def test_the_prefix_of_what_is_retained_is_retained_and_what_continues_it_is_not():
    cache = KVCache(17, Lru(17))
    use(cache, path(1, 4), 60, first=3)
    assert cache.num_retained == 4
    use(cache, path(1, 6))
    flood(cache, 20)
    assert num_cached(cache, path(1, 6)) == 4
    cache.allocate(16)
    check_cache(cache)
    assert (cache.num_retained, num_cached(cache, path(1, 6))) == (0, 0)


def test_what_is_behind_an_entry_of_low_priority_is_not_given_up_with_it():
    cache = KVCache(9, Lru(9))
    use(cache, path(2, 2))
    use(cache, path(1, 2), 0)
    use(cache, path(1, 4))
    cache.allocate(2)
    assert num_cached(cache, path(1, 4)) == 4, "the others came before"
    cache.allocate(2)
    check_cache(cache)
    assert (num_cached(cache, path(2, 2)), num_cached(cache, path(1, 4))) == (0, 4)
    cache.allocate(2)
    assert num_cached(cache, path(1, 4)) == 2
    use(cache, path(3, 1))
    cache.allocate(1)
    assert num_cached(cache, path(3, 1)) == 1, "nothing is behind these any more"
    check_cache(cache)


def test_what_is_loaded_behind_a_free_entry_of_low_priority_goes_before_it():
    """The request for which it was loaded has left, so nobody holds what is before it."""
    cache = KVCache(9, Lru(9))
    use(cache, path(2, 1))
    use(cache, path(1, 2), 0)
    loaded = cache.allocate(1)
    cache.publish(loaded[0], path(1, 3)[-1], cache.find(path(1, 2))[-1])
    cache.release(loaded)
    check_cache(cache)
    taken = cache.allocate(5)
    assert num_cached(cache, path(1, 3)) == 3, "the other one came before"
    taken += cache.allocate(1)
    check_cache(cache)
    assert num_cached(cache, path(1, 3)) == 2
    taken += cache.allocate(2)
    check_cache(cache)
    cache.release(taken)
    flood(cache, 20)


def test_a_wish_lasts_its_time_from_when_nobody_holds_it():
    cache = KVCache(17, Lru(17))
    blocks = hold(cache, path(1, 2))
    for block_id in blocks:
        cache.set_retention(block_id, 90, 1.5)
    cache.pass_time(LONG)
    cache.release(blocks)
    cache.pass_time(LONG + 1.4)
    check_cache(cache)
    assert cache.num_retained == 2
    use(cache, path(1, 2))  # the time begins anew
    cache.pass_time(LONG + 2.8)
    assert cache.num_retained == 2
    cache.pass_time(LONG + 2.9)
    check_cache(cache)
    assert cache.num_retained == 0
    flood(cache, 20)
    assert num_cached(cache, path(1, 2)) == 0


def test_a_low_priority_lasts_its_time_too_and_what_is_behind_stays_as_it_is():
    cache = KVCache(17, Lru(17))
    use(cache, path(1, 2), 0, ttl_s=1.0)
    use(cache, path(1, 4), 80, first=2)
    use(cache, path(2, 2), 0, ttl_s=1.0)
    cache.pass_time(1.0)
    check_cache(cache)
    assert cache.num_retained == 4
    flood(cache, 11)
    assert num_cached(cache, path(2, 2)) == 1
    assert num_cached(cache, path(1, 4)) == 4


def test_where_many_run_out_at_once_a_step_does_not_wait_for_all_of_them():
    cache = KVCache(1002, Lru(1002))
    use(cache, path(1, 400), 90, ttl_s=1.0)
    found = []
    for _ in range(5):
        cache.pass_time(1.0)
        check_cache(cache)
        found.append(len(cache._retention._expiring))
    assert found == [272, 144, 16, 0, 0]
    assert cache.num_retained == 0


def test_what_is_asked_for_last_counts_and_nothing_asked_for_changes_nothing():
    cache = KVCache(17, Lru(17))
    use(cache, path(1, 2), 90)
    use(cache, path(1, 2))
    assert cache.num_retained == 2
    use(cache, path(1, 2), 60)
    assert cache.num_retained == 2
    use(cache, path(1, 2), DEFAULT_CACHE_PRIORITY)
    assert cache.num_retained == 0
    use(cache, path(1, 2), 0)
    use(cache, path(1, 3), 90, first=2)
    assert cache.num_retained == 3, "with its prefix"
    use(cache, path(1, 3), DEFAULT_CACHE_PRIORITY, first=2)
    assert cache.num_retained == 0
    use(cache, path(2, 2))
    cache.allocate(12)
    check_cache(cache)
    assert num_cached(cache, path(1, 3)) == 2
    cache.allocate(2)
    assert (num_cached(cache, path(1, 3)), num_cached(cache, path(2, 2))) == (0, 2)


def test_before_anybody_asks_for_more_than_the_default_nothing_is_kept_of_it():
    cache = KVCache(9, Lru(9))
    use(cache, path(1, 2), DEFAULT_CACHE_PRIORITY)
    assert cache._retention is None


def test_half_of_the_cache_is_retained_and_no_more():
    cache = KVCache(17, Lru(17))
    use(cache, path(1, 12), 100)
    assert cache.num_retained == 8
    use(cache, path(2, 2), 99)
    assert cache.num_retained == 8
    flood(cache, 20)
    assert num_cached(cache, path(1, 12)) == 8
    assert num_cached(cache, path(2, 2)) == 0


def test_while_blocks_are_set_aside_half_of_the_others_is_retained():
    cache = KVCache(33, Lru(33))
    cache.resize(16)
    use(cache, path(1, 12), 100)
    assert cache.num_retained == 8
    cache.resize(32)
    use(cache, path(1, 12), 100)
    use(cache, path(2, 4), 60)
    assert cache.num_retained == 16
    cache.resize(20)
    cache.pass_time(1.0)
    check_cache(cache)
    assert cache.num_retained == 10
    flood(cache, 30)
    assert [num_cached(cache, path(name, 12)) for name in (1, 2)] == [10, 0], "by priority"


def test_what_is_held_stays_retained_while_blocks_are_set_aside_until_it_is_released():
    cache = KVCache(33, Lru(33))
    held = hold(cache, path(1, 16))
    assert all(cache.set_retention(block_id, 90, None) for block_id in held)
    others = hold(cache, path(2, 2))
    cache.resize(20)
    cache.pass_time(1.0)
    assert cache.num_retained == 16
    assert not cache.set_retention(others[0], 100, None), "there are more than half already"
    cache.release(others)
    cache.release(held[12:])
    cache.pass_time(2.0)
    check_cache(cache)
    assert cache.num_retained == 12
    cache.release(held[:12])
    cache.pass_time(3.0)
    check_cache(cache)
    assert cache.num_retained == 10


def test_where_many_are_beyond_half_at_once_a_step_does_not_wait_for_all_of_them():
    cache = KVCache(1001, Lru(1001))
    use(cache, path(1, 500), 90)
    cache.resize(400)
    found = []
    for now in range(4):
        cache.pass_time(now)
        check_cache(cache)
        found.append(cache.num_retained)
    assert found == [272, 200, 200, 200]


def test_where_half_is_retained_who_comes_takes_the_place_of_what_would_go_first():
    cache = KVCache(17, Lru(17))
    for name, priority in ((1, 50), (2, 80), (3, 50), (4, 50)):
        use(cache, path(name, 2), priority)
    assert cache.num_retained == 8
    use(cache, path(5, 3), 60)
    assert cache.num_retained == 8
    flood(cache, 20)
    cached = [num_cached(cache, path(name, 3)) for name in range(1, 6)]
    assert cached == [0, 2, 1, 2, 3]


def test_what_is_held_gives_no_room_to_others():
    cache = KVCache(9, Lru(9))
    held = hold(cache, path(1, 4))
    for block_id in held:
        cache.set_retention(block_id, 40, None)
    use(cache, path(2, 2), 90)
    assert cache.num_retained == 4
    cache.release(held)
    use(cache, path(2, 2), 90)
    check_cache(cache)
    flood(cache, 20)
    assert [num_cached(cache, path(name, 4)) for name in (1, 2)] == [2, 2]


def test_what_somebody_waits_for_is_kept_before_what_is_retained():
    cache = KVCache(9, Lru(9))
    use(cache, path(1, 2), 100)
    use(cache, path(2, 2))
    use(cache, path(3, 2), 0)
    for name in (2, 3):
        cache.reserve(str(name), cache.find(path(name, 2)))
    cache.allocate(4)
    check_cache(cache)
    assert [num_cached(cache, path(name, 2)) for name in (1, 2, 3)] == [0, 2, 2]
    cache.unreserve("3")
    cache.allocate(2)
    check_cache(cache)
    assert [num_cached(cache, path(name, 2)) for name in (1, 2, 3)] == [0, 2, 0]


class Roots(Lfu):
    """Evicts the entry with the smallest number: of a prefix the first one."""

    def free(self, entry: int) -> None:
        self._free.add(entry, entry)


def test_a_path_that_is_walked_is_left_when_its_root_is_retained():
    cache = KVCache(17, Roots(17))
    use(cache, path(1, 4))
    use(cache, path(2, 4))
    cache.allocate(9)
    assert num_cached(cache, path(1, 4)) == 3
    use(cache, path(1, 1), 90)
    cache.allocate(2)
    assert num_cached(cache, path(1, 4)) == 1, "its other entries have the default"
    cache.allocate(1)
    check_cache(cache)
    assert (num_cached(cache, path(1, 4)), num_cached(cache, path(2, 4))) == (1, 3)


class Watched(KVCache):
    """Checks of each entry that is evicted that it was its turn."""

    def _evict(self) -> None:
        while self.num_cached == self._num_reserved:
            self.unreserve(self._last_in_line())
        before = {entry: self._priority(entry) for entry in self._index.entries()}
        ordered = [entry for entry in before if self._is_ordered(entry)]
        leaves = [entry for entry in ordered if not self._index.child_of(entry)]
        first = min(before[entry] for entry in leaves)
        super()._evict()
        (gone,) = before.keys() - set(self._index.entries())
        assert gone in leaves
        assert before[gone] == first

    def _priority(self, entry: int) -> int:
        retention = self._retention
        return DEFAULT_CACHE_PRIORITY if retention is None else retention._priority[entry]


@pytest.mark.parametrize("name", EVICTIONS)
def test_whatever_is_asked_for_what_is_evicted_has_the_lowest_priority(name: str):
    """Requests over few prefixes, some of which wait, wishes of all kinds, and a cache that shrinks
    and grows."""
    random.seed(name)
    num_retained = 0
    for num_blocks in range(6, 26):
        cache = Watched(num_blocks, EVICTIONS[name](num_blocks))
        running: list[list[int]] = []
        for step in range(150):
            cache.pass_time(step)
            if random.random() < 0.1:
                cache.resize(random.randrange(num_blocks // 2, num_blocks))
            if running and (cache.num_free < 5 or random.random() < 0.5):
                cache.release(running.pop(random.randrange(len(running))))
            elif cache.num_free >= 5:
                names = random.choices(range(3), k=5)
                keys = [bytes(names[: end + 1]) for end in range(5)]
                if random.random() < 0.3:
                    cache.reserve(str(names), cache.find(keys))
                blocks = hold(cache, keys)
                cache.unreserve(str(names))
                priority = random.choice([0, 20, 35, 60, 100])
                ttl_s = random.choice([None, 3.0, 30.0])
                for block_id in blocks[random.randrange(6) :]:
                    cache.set_retention(block_id, priority, ttl_s)
                running.append(blocks)
            num_retained += cache.num_retained
            check_cache(cache)
    assert num_retained > 1000


def test_a_deep_range_is_raised_once(monkeypatch):
    """Each entry costs the way to what is protected, and not to the first of its prefix."""
    cache = KVCache(1002, Lru(1002))
    blocks = hold(cache, path(1, 400))
    calls = count_calls(monkeypatch, PrefixIndex, "parent_of")
    for block_id in blocks[200:]:
        cache.set_retention(block_id, 90, None)
    cache.release(blocks)
    assert cache.num_retained == 400
    assert calls["parent_of"] < 1500


def test_a_wish_that_cannot_be_granted_costs_little(monkeypatch):
    """Half is retained and held; a long prompt asks for as much."""
    cache = KVCache(1002, Lru(1002))
    held, blocks = hold(cache, path(1, 500)), hold(cache, path(2, 501))
    assert all(cache.set_retention(block_id, 90, None) for block_id in held)
    calls = count_calls(monkeypatch, PrefixIndex, "parent_of")
    assert not any(cache.set_retention(block_id, 100, None) for block_id in blocks)
    assert calls["parent_of"] == 0
    assert cache.num_retained == 500


def test_who_is_refused_asks_for_no_more_until_it_begins_anew(monkeypatch):
    """There is room for a few entries, and each of many ranges is behind hundreds."""
    limits = Limits(
        num_blocks=1003, block_size=4, max_model_len=4000, max_num_seqs=2, max_num_batched_tokens=8
    )
    tables = KVPool(b"secret").open(limits)
    held = hold(tables.kv, path(1, 480))
    assert all(tables.kv.set_retention(block_id, 100, None) for block_id in held)
    ranges = [CacheRange(start=1600 + 8 * i, end=1604 + 8 * i, priority=90) for i in range(24)]
    ranges.append(CacheRange(start=1900, priority=10))
    tokens = list(range(2000))
    first = make_request("first", token_ids=tokens)
    tables.begin(first, [])
    tables.grow(first, 500)
    tables.commit(first, 2000, NO_DRAFT, 0)
    calls = count_calls(monkeypatch, PrefixIndex, "parent_of")
    other = make_request("other", token_ids=[*tokens, 1], retention=tuple(ranges))
    tables.begin(other, tables.hits(other))
    assert calls["parent_of"] == 401, "it looked once how many come before the first"
    check_cache(tables.kv)
    assert other.refused_from == 400
    tables.release(other)
    assert other.refused_from == inf
    tables.release(first)
    check_cache(tables.kv)
    assert tables.kv.num_retained == 480
    tables.kv.allocate(tables.kv.num_free - tables.kv.num_cached + 25)
    assert len(tables.hits(other)) == 475, "what it wants to be given up goes first all the same"


def test_what_is_too_deep_to_be_retained_with_all_before_it_is_not():
    cache = KVCache(17, Lru(17))
    use(cache, path(1, 2), 90)
    use(cache, path(2, 12), 90, first=9)
    check_cache(cache)
    assert cache.num_retained == 2, "it takes nobody's place in vain"
