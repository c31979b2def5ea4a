"""The optimum that policies of eviction are held against, and what is replayed."""

import random
from functools import cache
from itertools import combinations

import pytest

from cache_bench import EVICTIONS, CacheRun, keys_of, optimum, replay, table
from charonia.control.cache import KVCache
from charonia.traces import TraceRequest


def sequences_of(rng: random.Random, num_requests: int) -> list[list[bytes]]:
    """Prefixes of a few documents that go apart somewhere."""
    found = []
    for _ in range(num_requests):
        document, length, own = rng.randrange(4), rng.randrange(1, 5), rng.randrange(3)
        found.append([bytes([document, depth, own * (depth > 1)]) for depth in range(length)])
    return found


def hits_of(policy: str, sequences: list[list[bytes]], num_blocks: int) -> int:
    kv, num_hits = KVCache(num_blocks, EVICTIONS[policy](num_blocks)), 0
    for keys in sequences:
        hits = kv.find(keys)
        kv.acquire(hits)
        num_hits += len(hits)
        block_ids = hits + kv.allocate(len(keys) - len(hits))
        for index in range(len(hits), len(keys)):
            kv.publish(block_ids[index], keys[index], block_ids[index - 1] if index else 0)
        kv.release(block_ids)
    return num_hits


@pytest.mark.parametrize("policy", EVICTIONS)
def test_no_policy_beats_the_optimum(policy: str):
    for seed in range(30):
        sequences = sequences_of(random.Random(seed), 60)
        for num_blocks in (6, 9, 14):
            assert hits_of(policy, sequences, num_blocks) <= optimum(sequences, num_blocks)


def test_the_optimum_is_what_trying_all_ways_finds():
    for seed in range(20):
        rng = random.Random(seed)
        names = [rng.randrange(5) for _ in range(12)]

        @cache
        def best(place: int, cached: frozenset[int], names=tuple(names)) -> int:
            if place == len(names):
                return 0
            now = cached | {names[place]}
            keeps = [frozenset(kept) for kept in combinations(now, min(2, len(now)))]
            return (names[place] in cached) + max(best(place + 1, kept) for kept in keeps)

        assert optimum([[bytes([name])] for name in names], 3) == best(0, frozenset())


def test_blocks_of_a_trace_are_cut_to_those_of_the_engine():
    one = TraceRequest(timestamp=0, input_length=700, output_length=1, hash_ids=[3, 8])
    whole = TraceRequest(timestamp=0, input_length=512, output_length=1, hash_ids=[3])
    keys, of_whole = keys_of([one, whole], 512, 256)
    assert len(keys) == 2, "a block that is not full is none"
    assert of_whole == keys[:1], "the last token of a prompt is computed"


def test_the_table_marks_the_best():
    runs = [
        CacheRun("agents", 600_000, "lru", 0.25, 1.0, 0.375, 2e6),
        CacheRun("agents", 600_000, "arc", 0.5, 1.0, 0.5, 1e6),
        CacheRun("agents", 600_000, "optimum", 0.75),
        CacheRun("agents", 600_000, "optimum of the rest", 0.625, held=0.375),
    ]
    assert "| agents | 0.6 M | 25.0 | **50.0** | 75.0 | 62.5 | 37.5 |" in table(runs)
    assert "| lru | 2,000,000 |" in table(runs)
    assert replay([[b"a" * 16, b"b" * 16]] * 2, 4, "lru") > 0
