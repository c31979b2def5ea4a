"""What tenants may take from each other of what is cached."""

import random
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b

import pytest

from charonia.control.cache import KVCache
from charonia.control.cache.eviction import EVICTIONS, Arc, Lfu, Lru
from charonia.control.cache.tenant_shares import TenantShares
from charonia.control.policies import by_arrival, fair
from support.counting import count_calls
from support.invariants import check_cache
from support.stepping import Bench, make_request

DEPTH = 3


def path(tenant: str, name: int, length: int = DEPTH) -> list[bytes]:
    """Keys of a prefix."""
    parts = (f"{tenant} {name} {depth}" for depth in range(length))
    return [blake2b(part.encode(), digest_size=16).digest() for part in parts]


def cache_of(
    num_blocks: int,
    weights: dict[str, float] | None = None,
    make: Callable[[int], Lru] = Lru,
) -> KVCache:
    return KVCache(
        num_blocks, make(num_blocks), weight_of=lambda name: (weights or {}).get(name, 1)
    )


def hold(cache: KVCache, tenant: str, keys: list[bytes]) -> list[int]:
    hits = cache.find(keys)
    cache.acquire(hits)
    block_ids = hits + cache.allocate(len(keys) - len(hits), tenant)
    for index in range(len(hits), len(keys)):
        cache.publish(block_ids[index], keys[index], block_ids[index - 1] if index else 0)
    return block_ids


def use(cache: KVCache, tenant: str, *names: int, length: int = DEPTH) -> None:
    for name in names:
        cache.release(hold(cache, tenant, path(tenant, name, length)))


def num_cached(cache: KVCache, tenant: str, *names: int, length: int = DEPTH) -> int:
    return sum(len(cache.find(path(tenant, name, length))) for name in names)


@pytest.mark.parametrize("make", EVICTIONS.values(), ids=EVICTIONS)
def test_who_floods_the_cache_leaves_others_their_shares_whatever_the_policy(make):
    cache = cache_of(31, make=make)
    use(cache, "a", *range(4))
    for number in range(100):
        use(cache, "b", number)
        assert num_cached(cache, "a", *range(4)) == 4 * DEPTH
    check_cache(cache)
    use(cache, "c", 0)
    for number in range(100, 200):
        use(cache, "b", number)
        # Of a prefix that was begun to be given up no more than the rest goes beyond.
        assert num_cached(cache, "a", *range(4)) > 10 - DEPTH
        assert num_cached(cache, "c", 0) == DEPTH
    check_cache(cache)


@pytest.mark.parametrize("make", EVICTIONS.values(), ids=EVICTIONS)
def test_while_there_is_room_nobody_is_limited_and_where_there_is_none_who_has_most_gives(make):
    cache = cache_of(31, {"a": 0.001, "b": 1000.0}, make=make)
    use(cache, "b", 0)
    use(cache, "a", *range(9))
    assert num_cached(cache, "a", *range(9)) == 27, "all that b has left"
    use(cache, "b", *range(1, 5))
    assert num_cached(cache, "a", *range(9)) == 15
    use(cache, "b", *range(5, 20))
    assert num_cached(cache, "a", *range(9)) == 0
    check_cache(cache)


def test_tenants_that_all_want_more_have_by_their_weights():
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    cache = cache_of(81, weights)
    rng = random.Random(0)
    for number in range(600):
        use(cache, rng.choice("abc"), number, length=rng.randrange(1, 4))
    entries = {name: owner.num_blocks for name, owner in cache._shares._tenants.items()}
    assert sum(entries.values()) == 80
    assert {name: round(num / 10) for name, num in entries.items()} == weights


def test_within_a_tenant_the_order_is_the_policys():
    cache = cache_of(7, make=Lfu)
    use(cache, "a", 0, 1, 2, 0, 2, length=1)
    use(cache, "b", 0, 1, 2, length=1)
    use(cache, "b", 3, length=1)
    assert [num_cached(cache, "b", name, length=1) for name in range(4)] == [0, 1, 1, 1]
    use(cache, "c", 0, length=1)
    assert [num_cached(cache, "a", name, length=1) for name in range(3)] == [1, 0, 1]


def test_one_tenant_alone_notices_nothing():
    rng = random.Random(1)
    shared, alone = cache_of(40), KVCache(40, Lru(40))
    for _ in range(2000):
        name, length = rng.randrange(20), rng.randrange(1, 6)
        use(shared, "a", name, length=length)
        use(alone, "a", name, length=length)
        assert num_cached(shared, "a", *range(20)) == num_cached(alone, "a", *range(20))
    check_cache(shared)


def test_what_is_held_counts_and_is_not_given():
    cache = cache_of(11)
    use(cache, "a", 0, 1, length=2)
    held = hold(cache, "b", path("b", 0, 5))
    use(cache, "b", 1, length=1)
    use(cache, "c", 0, length=1)
    assert num_cached(cache, "b", 1, length=1) == 0, "b has more than a, with what it holds"
    use(cache, "c", 1, length=1)
    assert num_cached(cache, "a", 0, 1, length=2) == 3, "b can give nothing"
    cache.release(held)
    use(cache, "c", 2, length=1)
    assert num_cached(cache, "b", 0, length=5) == 4
    check_cache(cache)


def test_a_weight_that_changes_counts_from_then_on():
    weights = {"a": 1.0, "b": 1.0}
    cache = cache_of(13, weights)
    use(cache, "a", *range(10), length=1)
    use(cache, "b", *range(10), length=1)
    assert num_cached(cache, "a", *range(10), length=1) == 6
    weights["b"] = 3.0
    use(cache, "b", *range(10, 30), length=1)
    assert num_cached(cache, "a", *range(10), length=1) == 3


def test_a_weight_that_changes_counts_for_a_tenant_that_does_nothing():
    weights = {"idle": 4.0}
    cache = cache_of(31, weights)
    use(cache, "idle", *range(5))
    use(cache, "busy", *range(20))
    assert num_cached(cache, "idle", *range(5)) == 15
    weights["idle"] = 0.1
    use(cache, "busy", *range(20, 30))
    assert num_cached(cache, "idle", *range(5)) < DEPTH


def test_what_stands_in_line_can_be_hit_and_goes_behind_all_others_again():
    cache = cache_of(7)
    use(cache, "a", 0, 1, length=1)
    use(cache, "b", 0, 1, 2, 3, length=1)
    use(cache, "b", 4, length=1)  # before its own the policy gives up those of a
    shares = cache._shares
    assert len(shares._tenants["a"].in_line) == 2
    use(cache, "a", 0, length=1)
    assert len(shares._tenants["a"].in_line) == 1
    check_cache(cache)
    use(cache, "a", 2, 3, length=1)
    assert [num_cached(cache, "a", name, length=1) for name in range(4)] == [1, 0, 1, 1]


def test_what_the_policy_gave_up_and_is_hit_comes_back_to_it_as_from_its_ghosts():
    cache = cache_of(7, make=Arc)
    use(cache, "a", 0, length=1)
    use(cache, "b", 0, 1, 2, 3, 4, length=1)
    use(cache, "b", 5, length=1)
    arc = cache._shares._policy
    assert arc._target == 0
    use(cache, "a", 0, length=1)
    assert arc._target == 1


def test_who_waits_keeps_what_it_waits_for_though_its_tenant_is_to_give():
    cache = cache_of(7)
    use(cache, "a", 0, 1, 2, 3, 4, length=1)
    use(cache, "b", 0, length=1)
    cache.reserve("waiting", cache.find(path("a", 0, 1)))
    use(cache, "b", 1, 2, length=1)
    assert [num_cached(cache, "a", name, length=1) for name in range(5)] == [1, 0, 0, 1, 1]
    cache.unreserve("waiting")
    check_cache(cache)
    use(cache, "b", 3, 4, length=1)
    assert num_cached(cache, "a", 0, length=1) == 1


def test_what_is_retained_counts_and_goes_last():
    cache = cache_of(9)
    block_ids = hold(cache, "a", path("a", 0, 3))
    for block_id in block_ids:
        assert cache.set_retention(block_id, 80, None)
    cache.release(block_ids)
    use(cache, "a", 1, 2, length=1)
    use(cache, "b", *range(9), length=1)
    assert num_cached(cache, "a", 0) == 3
    assert num_cached(cache, "a", 1, 2, length=1) == 1
    assert num_cached(cache, "b", *range(9), length=1) == 4
    check_cache(cache)
    held = hold(cache, "b", path("b", 9, 6))
    assert num_cached(cache, "a", 0) == 2, "there was nothing else"
    check_cache(cache)
    cache.release(held)
    check_cache(cache)


def test_nothing_is_kept_of_tenants_that_have_nothing():
    cache = cache_of(9)
    for number in range(200):
        use(cache, f"tenant {number}", 0, length=1)
    shares = cache._shares
    assert len(shares._tenants) == 8
    assert len(shares._unused) == 1
    check_cache(cache)


def test_the_policy_is_asked_no_more_than_once_for_each_entry_that_became_free(monkeypatch):
    calls = count_calls(monkeypatch, Lru, "victim")
    freed = count_calls(monkeypatch, Lru, "free")
    cache = cache_of(200)
    rng = random.Random(0)
    for number in range(3000):
        tenant = f"tenant {min(rng.randrange(12), rng.randrange(12))}"
        use(cache, tenant, number if rng.random() < 0.5 else rng.randrange(20))
    assert calls.total() <= freed.total()
    assert cache._stats.blocks_evicted > 1000


def test_whatever_tenants_do_who_gives_is_who_has_the_most_for_its_weight(monkeypatch):
    """Of those that can give something; but for the rest of a prefix that is being given up."""
    rng = random.Random(3)
    weights = {name: rng.choice([0.5, 1.0, 3.0]) for name in "abcdef"}
    cache = cache_of(60, weights)
    shares = cache._shares
    given: Counter[str] = Counter()
    evict = TenantShares.evict

    def checked(self: TenantShares, entry: int) -> None:
        holding = {
            name: owner.num_blocks / weights[name]
            for name, owner in self._tenants.items()
            if owner.num_free
        }
        giver = self._giver[entry].name
        assert holding[giver] == max(holding.values())
        given[giver] += 1
        evict(self, entry)

    monkeypatch.setattr(TenantShares, "evict", checked)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and (len(held) > 8 or rng.random() < 0.5):
            cache.release(held.pop(rng.randrange(len(held))))
        else:
            name = rng.choice("aaabbcdef")
            held.append(hold(cache, name, path(name, rng.randrange(12), rng.randrange(1, 6))))
    check_cache(cache)
    assert shares is cache._eviction
    assert len(given) == 6


def test_a_tenant_that_floods_a_server_costs_others_no_hits_beyond_its_share():
    def asks(tenant: str, name: str, first: int):
        return make_request(
            name,
            token_ids=list(range(first, first + 25)),
            tenant=tenant,
            cache_scope=tenant.encode(),
            max_tokens=1,
        )

    cached = {}
    for weight_of in (None, lambda tenant: 1.0):
        bench = Bench(
            fair(by_arrival, lambda tenant: 1.0), vocab_size=5000, cache_weight_of=weight_of
        )
        bench.add(asks("a", "first", 0))
        bench.ends()
        for number in range(20):
            bench.add(asks("b", f"{number}", 100 + 30 * number))
            bench.ends()
        again = asks("a", "again", 0)
        bench.add(again)
        bench.ends()
        cached[weight_of is not None] = again.num_cached
    assert cached == {False: 0, True: 24}
