"""Blocks, what they contain, and which content is given up."""

import random

from charonia.control.cache import KVCache
from charonia.control.cache.eviction import Lru
from charonia.control.cache.prefix_index import PrefixIndex
from support.counting import count_calls
from support.invariants import check_cache


def key(*names: int) -> bytes:
    return bytes(names)


def compute(cache: KVCache, keys: list[bytes]) -> list[int]:
    """Blocks of a request that computes all of these, without a hit."""
    block_ids = cache.allocate(len(keys))
    publish(cache, block_ids, keys)
    return block_ids


def publish(cache: KVCache, block_ids: list[int], keys: list[bytes], first: int = 0) -> None:
    for index in range(first, len(keys)):
        cache.publish(block_ids[index], keys[index], block_ids[index - 1] if index else 0)


class Chosen(Lru):
    """Evicts what the test says, or any entry, and what comes of that."""

    choice = 0

    def victim(self) -> int:
        return self.choice or random.choice(list(self._free))


def test_a_free_block_can_be_hit_until_it_is_evicted_and_its_prefix_stays_longer():
    cache = KVCache(5, Lru(5))
    cache.release(compute(cache, [key(1), key(1, 2), key(1, 2, 3)]))
    assert (cache.num_cached, cache.num_free, cache.num_used) == (3, 4, 0)
    assert len(cache.find([key(1), key(1, 2), key(1, 2, 3)])) == 3
    other = cache.allocate(2)
    assert len(cache.find([key(1), key(1, 2), key(1, 2, 3)])) == 2
    hits = cache.find([key(1), key(9)])
    cache.acquire(hits)
    cache.allocate(1)
    assert cache.find([key(1), key(1, 2)]) == hits, "what is held is not evicted"
    assert cache.num_free == 0
    cache.release(hits)
    cache.release(other)
    assert (cache.num_cached, cache.num_free) == (1, 3)


def test_of_two_blocks_with_the_same_content_one_stays():
    keys = [key(1), key(1, 2)]
    for first_to_go in (0, 1):
        cache = KVCache(8, Lru(8))
        both = [compute(cache, keys), compute(cache, keys)]
        assert cache.find(keys) == both[0]
        cache.release(both[first_to_go])
        check_cache(cache)
        assert cache.num_cached == 0
        assert cache.find(keys) == both[1 - first_to_go]
        cache.release(both[1 - first_to_go])
        check_cache(cache)
        assert (cache.num_cached, cache.num_free) == (2, 7)


def test_whoever_computes_again_what_is_cached_takes_its_place():
    cache = KVCache(8, Lru(8))
    keys = [key(1), key(1, 2)]
    first, second = compute(cache, keys), cache.allocate(3)
    cache.release(first)
    publish(cache, second, keys)
    check_cache(cache)
    assert cache.find(keys) == second[:2]
    assert (cache.num_cached, cache.num_free) == (0, 4)
    publish(cache, second, [*keys, key(1, 2, 3)], first=2)
    cache.release(second)
    check_cache(cache)
    assert cache.num_cached == 3


def test_what_continues_a_victim_goes_before_it():
    chosen = Chosen(16)
    cache = KVCache(16, chosen)
    trunk = compute(cache, [key(1), key(1, 2)])
    branch = [*trunk, *cache.allocate(2)]
    cache.acquire(trunk)
    publish(cache, branch, [key(1), key(1, 2), key(1, 2, 3), key(1, 2, 3, 4)], first=2)
    cache.acquire(trunk)
    twig = [*trunk, *cache.allocate(1)]
    publish(cache, twig, [key(1), key(1, 2), key(1, 2, 5)], first=2)
    other = compute(cache, [key(7)])
    cache.release(branch)
    cache.release(twig)
    cache.release(trunk)
    cache.release(other)
    cache.allocate(cache.num_free - cache.num_cached)
    chosen.choice = cache._index.entry_of(trunk[0])
    order = []
    for _ in range(5):
        before = {b for b in {*branch, *twig, *other} if cache._index.entry_of(b)}
        cache.allocate(1)
        check_cache(cache)
        order += [b for b in before if not cache._index.entry_of(b)]
    assert sorted(order) == sorted({*branch, *twig})
    assert order.index(branch[3]) < order.index(branch[2]) < order.index(trunk[1])
    assert order.index(twig[2]) < order.index(trunk[1]) < order.index(trunk[0])


def test_what_somebody_waits_for_is_evicted_last():
    cache = KVCache(7, Lru(7))
    awaited, other = [key(1), key(1, 2)], [key(3), key(3, 4)]
    cache.release(compute(cache, awaited))
    cache.release(compute(cache, other))
    for num_found in (1, 2, 2, 1):  # it waits for what was found since, too
        cache.reserve("a", cache.find(awaited)[:num_found])
        check_cache(cache)
    assert cache.num_free == 6
    taken = cache.allocate(4)
    assert len(cache.find(awaited)) == 2
    assert not cache.find(other)
    hits = cache.find(awaited)
    cache.acquire(hits, "a")
    check_cache(cache)
    cache.release(hits)
    assert cache.num_free == 2
    cache.release(taken)
    cache.unreserve("a")
    check_cache(cache)


def test_where_all_is_waited_for_who_came_last_loses_it():
    cache = KVCache(7, Lru(7))
    keys = {name: [key(number), key(number, 1)] for number, name in enumerate("abc")}
    for name in "abc":
        cache.release(compute(cache, keys[name]))
    for name in "cab":
        cache.reserve(name, cache.find(keys[name]))
    cache.reserve("d", cache.find(keys["c"]))  # two wait for these
    taken = cache.allocate(1)
    check_cache(cache)
    assert [len(cache.find(keys[name])) for name in "abc"] == [2, 1, 2]
    cache.unreserve("a")
    taken += cache.allocate(3)
    assert [len(cache.find(keys[name])) for name in "abc"] == [0, 0, 2]
    cache.unreserve("c")
    check_cache(cache)
    cache.release(taken)


def test_what_is_computed_again_while_somebody_waits_for_it_stays_reserved():
    cache = KVCache(8, Lru(8))
    keys = [key(1), key(1, 2)]
    cache.release(compute(cache, keys))
    cache.reserve("a", cache.find(keys))
    again = compute(cache, keys)
    check_cache(cache)
    cache.release(again)
    check_cache(cache)
    cache.release(cache.allocate(5))
    cache.unreserve("a")
    cache.unreserve("a")
    check_cache(cache)
    assert cache.find(keys) == again


def test_reservations_are_bounded():
    cache = KVCache(4, Lru(4))
    cache.release(compute(cache, [key(1), key(1, 2)]))
    for name in range(100):
        cache.reserve(str(name), cache.find([key(1), key(1, 2)]))
    check_cache(cache)
    assert cache._num_reservations == 16


def test_what_a_running_request_keeps_is_not_what_is_lost_first():
    """One waits for what is free, and those behind it for what runs."""
    cache = KVCache(9, Lru(9))
    runs, free = [key(1), key(1, 2)], [key(3), key(3, 4), key(3, 5)]
    running = compute(cache, runs)
    cache.release(compute(cache, free[:2]))
    cache.reserve("first", cache.find(free[:2]))
    for name in ("second", "third"):
        cache.reserve(name, cache.find(runs))
    cache.allocate(5)
    check_cache(cache)
    assert list(cache._reserved) == ["second", "third"]
    cache.release(running)
    check_cache(cache)
    assert cache.find(runs) == running


class Told(Lru):
    """Writes down what it is told."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.calls: list[tuple[str, int]] = []

    def insert(self, entry: int, key: bytes, parent: int) -> None:
        self.calls.append(("insert", entry))
        super().insert(entry, key, parent)

    def hit(self, entry: int) -> None:
        self.calls.append(("hit", entry))
        super().hit(entry)

    def free(self, entry: int) -> None:
        self.calls.append(("free", entry))
        super().free(entry)

    def evict(self, entry: int) -> None:
        self.calls.append(("evict", entry))
        super().evict(entry)

    def take(self) -> str:
        calls, self.calls = self.calls, []
        return " ".join(f"{name} {entry}" for name, entry in calls)


def test_an_eviction_is_told_of_each_request_that_asks_and_of_the_deepest_first():
    told = Told(8)
    cache = KVCache(8, told)
    keys = [key(1), key(1, 2), key(1, 2, 3)]
    first = compute(cache, keys)
    assert told.take() == "insert 1 insert 2 insert 3"
    cache.release(first)
    assert told.take() == "free 3 free 2 free 1"
    cache.reserve("a", cache.find(keys[:2]))
    assert told.take() == "hit 1 hit 2", "when it comes"
    hits = cache.find(keys)
    cache.acquire(hits, "a")
    assert told.take() == "hit 3", "and not again when it begins, but for what it had not asked for"
    cache.reserve_first("a", hits)
    cache.release(hits)
    assert told.take() == "", "who is displaced has not asked again"
    cache.acquire(hits, "a")
    cache.release(hits)
    assert told.take() == "free 3 free 2 free 1"
    cache.reserve("b", cache.find(keys))
    cache.unreserve("b")
    assert told.take() == "hit 1 hit 2 hit 3 free 3 free 2 free 1"
    again = compute(cache, keys)
    assert told.take() == "hit 1 hit 2 hit 3", "who computes it again has asked as well"
    cache.release(again)
    told.take()
    cache.allocate(5)
    assert told.take() == "evict 3"


def test_a_long_prefix_of_which_the_root_is_chosen_is_walked_through_once(monkeypatch):
    """Two roots are chosen in turns, as by a policy that looks at other things than recency."""
    chosen = Chosen(402)
    cache = KVCache(402, chosen)
    roots = []
    for number in (1, 2):
        keys = [key(number, *[0] * depth) for depth in range(200)]
        block_ids = compute(cache, keys)
        roots.append(cache._index.entry_of(block_ids[0]))
        cache.release(block_ids)
    calls = count_calls(monkeypatch, PrefixIndex, "child_of")
    for turn in range(300):
        chosen.choice = roots[(turn + 1) % 2] if turn < 150 else roots[1]
        cache.allocate(1)
    check_cache(cache)
    assert calls["child_of"] < 1000


def test_whatever_is_chosen_the_cache_stays_sound():
    """Requests over few prefixes, in small pools, some of which wait before they begin."""
    random.seed(0)
    num_exhausted = 0
    for num_blocks in [*range(5, 13)] * 4:
        cache = KVCache(num_blocks, Chosen(num_blocks))
        running: list[list[int]] = []
        displaced: list[str] = []
        for step in range(100):
            if running and (cache.num_free < 4 or random.random() < 0.4):
                gone = running.pop(random.randrange(len(running)))
                if random.random() < 0.3:
                    cache.reserve_first(f"{step}", gone)
                    displaced.append(f"{step}")
                cache.release(gone)
            elif displaced and random.random() < 0.3:
                cache.unreserve(displaced.pop(random.randrange(len(displaced))))
            elif cache.num_free >= 4:
                names = random.choices([0, 1], k=4)
                keys = [key(*names[: end + 1]) for end in range(4)]
                if random.random() < 0.8:
                    cache.reserve(str(names), cache.find(keys))
                if random.random() < 0.1:
                    cache.unreserve(str(names))
                hits = cache.find(keys) if random.random() < 0.5 else []
                cache.acquire(hits, str(names) if hits or random.random() < 0.5 else "")
                num_exhausted += 0 < cache.num_cached == cache._num_reserved
                new = cache.allocate(4 - len(hits))
                publish(cache, [*hits, *new], keys, first=len(hits))
                running.append([*hits, *new])
            check_cache(cache)
    assert num_exhausted > 5, "all that is free was waited for"
