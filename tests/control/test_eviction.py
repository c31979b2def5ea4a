"""Which cached content goes first, by each policy."""

import random
from collections.abc import Iterable
from hashlib import blake2b
from typing import get_args, get_type_hints

import pytest

from charonia.config import EngineArgs
from charonia.control.cache import KVCache
from charonia.control.cache.eviction import (
    EVICTIONS,
    Adaptive,
    Arc,
    Eviction,
    Fifo,
    Lfu,
    Lru,
    S3Fifo,
    WTinyLfu,
)
from charonia.control.cache.eviction.frequency_sketch import FrequencySketch
from charonia.control.cache.eviction.reuse import ReuseTimes
from charonia.control.cache.eviction.scores import ByScore
from support.invariants import check_cache


def hashed(*names: int) -> bytes:
    return blake2b(repr(names).encode(), digest_size=16).digest()


def hashed_name(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


class Cache:
    """As many names as fit, each asked for alone; an entry is held only for a moment."""

    def __init__(self, eviction: Eviction, num_blocks: int) -> None:
        self.eviction = eviction
        self.entry_of: dict[str, int] = {}
        self._unused = list(range(num_blocks - 1, 0, -1))

    def ask(self, name: str) -> bool:
        """Whether it was there; it is now."""
        if is_hit := name in self.entry_of:
            self.eviction.hit(self.entry_of[name])
        else:
            if not self._unused:
                self.evict()
            self.entry_of[name] = self._unused.pop()
            self.eviction.insert(self.entry_of[name], hashed_name(name), 0)
        self.eviction.free(self.entry_of[name])
        return is_hit

    def evict(self) -> str:
        victim = self.eviction.victim()
        name = next(name for name, entry in self.entry_of.items() if entry == victim)
        self._unused.append(self.entry_of.pop(name))
        self.eviction.evict(victim)
        return name

    def order(self) -> str:
        """In which order all of them go."""
        return "".join(self.evict() for _ in range(len(self.entry_of)))


def cache_of(make: type, asked: Iterable[str], num_blocks: int = 5) -> Cache:
    cache = Cache(make(num_blocks), num_blocks)
    for name in asked:
        cache.ask(name)
    return cache


def test_every_policy_that_can_be_configured_exists():
    literal = get_type_hints(EngineArgs)["eviction_policy"]
    assert set(get_args(literal)) == set(EVICTIONS)


@pytest.mark.parametrize(
    ("make", "asked", "order"),
    [
        (Lru, "abcab", "cab"),
        (Fifo, "abcab", "abc"),
        (Lfu, "abcabad", "cdba"),
        (S3Fifo, "abcabad", "bcda"),  # what is hit twice gets into the main queue
        (Arc, "abcabd", "cdab"),
        (WTinyLfu, "abcaabd", "dcab"),
    ],
)
def test_in_which_order_entries_go(make: type, asked: str, order: str):
    assert cache_of(make, asked).order() == order


@pytest.mark.parametrize("make", EVICTIONS.values(), ids=EVICTIONS)
def test_held_entries_are_no_victims_and_every_free_one_is_found(make):
    rng = random.Random(1)
    for num_blocks in (2, 3, 12, 200):
        eviction = make(num_blocks)
        unused, free, held = list(range(1, num_blocks)), set[int](), set[int]()
        names = [rng.randbytes(16) for _ in range(2 * num_blocks)]
        for _ in range(3000):
            if unused and rng.random() < 0.5:
                entry = unused.pop()
                eviction.insert(entry, rng.choice(names), 0)
                held.add(entry)
            elif held and rng.random() < 0.5:
                entry = rng.choice(sorted(held))
                held.remove(entry)
                free.add(entry)
                eviction.free(entry)
            elif (free or held) and rng.random() < 0.5:
                entry = rng.choice(sorted(free | held))
                free.discard(entry)
                held.add(entry)
                eviction.hit(entry)
            elif free:
                entry = eviction.victim()
                assert entry in free
                if rng.random() < 0.2:  # what continues it goes first
                    entry = rng.choice(sorted(free))
                free.remove(entry)
                unused.append(entry)
                eviction.evict(entry)
        while free:
            entry = eviction.victim()
            free.remove(entry)
            eviction.evict(entry)


@pytest.mark.parametrize("make", [Adaptive, Arc, S3Fifo, WTinyLfu])
def test_what_is_asked_for_often_outlives_a_scan(make):
    """Of ten names asked for all the time, beside others that come once, in a cache for thirty."""
    hits = {}
    for policy in (make, Lru):
        cache = Cache(policy(31), 31)
        rng = random.Random(0)
        found = 0
        for turn in range(4000):
            cache.ask(f"once {turn}")
            if turn % 4 == 0:
                found += cache.ask(f"often {rng.randrange(10)}")
        hits[policy] = found
    assert hits[make] > 1.5 * hits[Lru], hits


def test_arc_learns_which_half_is_too_small():
    cache = cache_of(Arc, "aabbcde")  # full of a, b, d, e; c has gone
    arc = cache.eviction
    cache.ask("c")  # in place of d
    assert arc._target == 1
    assert set(cache.entry_of) == set("abce")
    cache.ask("f")
    assert set(cache.entry_of) == set("bcef"), "of those that were asked for once one may stay"
    arc._target = 3.0
    cache.ask("a")  # in place of b; of those that came once two have gone, c is back
    assert set(cache.entry_of) == set("acef")
    assert arc._target == 2.0
    assert hashed_name("a") not in arc._ghosts[1]
    arc._target = 4.0
    cache.ask("g")
    cache.ask("h")
    assert set(cache.entry_of) == set("efgh"), "only those that were asked for again went"


def test_arc_moves_its_target_by_how_many_ghosts_there_are_of_the_other_kind():
    arc = Arc(9)
    for name in "abc":
        arc._ghosts[0].add(hashed_name(name))
    arc._ghosts[1].add(hashed_name("x"))
    arc._target = 5.0
    arc.insert(1, hashed_name("x"), 0)
    assert arc._target == 2.0
    for name in "uvwxyz":
        arc._ghosts[1].add(hashed_name(name))
    arc.insert(2, hashed_name("a"), 0)
    assert arc._target == 4.0
    assert (len(arc._ghosts[0]), len(arc._ghosts[1])) == (2, 6)


def test_w_tiny_lfu_lets_in_who_is_asked_for_more_often_than_who_would_go():
    often = [f"often {number}" for number in range(10)]
    cache = cache_of(WTinyLfu, [*often, *often, "last"], num_blocks=12)
    for number in range(50):
        cache.ask(f"once {number}")
    assert set(often) <= set(cache.entry_of), "a scan leaves them alone"
    for number in range(5):
        cache.ask("new")
        cache.ask(f"then {number}")
    cache.ask("and another one")
    assert "new" in cache.entry_of
    assert len(set(often) & set(cache.entry_of)) == 9


def test_w_tiny_lfu_protects_no_more_than_its_share():
    lfu = WTinyLfu(101)
    for entry in range(1, 101):
        lfu.insert(entry, hashed(entry), 0)
        lfu.free(entry)
    for entry in range(1, 101):
        lfu.hit(entry)
    for entry in range(1, 101):
        lfu.free(entry)
    assert lfu._num_entries == [1, 20, 79]


@pytest.mark.parametrize(
    ("early", "late", "order"),
    [
        ("aaabbb", "a", "dba"),  # a hit in the main queue is a second chance
        ("aaaabbb", "", "dab"),  # what was hit in the small one counts no more there
        ("aaabbb", "aaab" + 6 * "b", "dab"),  # more than three hits are no more than three
    ],
)
def test_s3_fifo_gives_second_chances(early: str, late: str, order: str):
    cache = cache_of(S3Fifo, early + "cd")
    assert cache.evict() == "c"  # and two are in the main queue now
    for name in late:
        cache.ask(name)
    assert cache.order() == order


def test_lfu_forgets_what_was_evicted():
    cache = cache_of(Lfu, "aaab", num_blocks=3)
    assert cache.order() == "ba"
    for name in "cdd":
        cache.ask(name)
    assert cache.order() == "cd"


def test_ghosts_are_bounded():
    s3_fifo, arc = S3Fifo(30), Arc(30)
    for policy in (s3_fifo, arc):
        cache, rng = Cache(policy, 30), random.Random(0)
        for number in range(2000):
            cache.ask(f"once {number}")
            cache.ask(f"often {rng.randrange(40)}")
    assert len(s3_fifo._ghosts) == 27
    assert 20 < len(arc._ghosts[0]) <= 30
    assert len(arc._ghosts[0]) + len(arc._ghosts[1]) <= 60


def test_s3_fifo_takes_back_into_the_main_queue_what_it_evicted_lately():
    cache = cache_of(S3Fifo, "a" + "bcdefghij", num_blocks=10)
    assert "a" not in cache.entry_of
    cache.ask("a")
    for name in "klmnopqr":
        cache.ask(name)
    assert "a" in cache.entry_of


def test_where_all_come_back_too_late_some_are_kept():
    """Forty names in turns, in a cache for thirty: the least recently used one comes next."""
    hits = {}
    for policy in (Adaptive, Lru):
        cache = Cache(policy(31), 31)
        hits[policy] = sum(cache.ask(f"{turn % 40}") for turn in range(4000))
    assert hits[Lru] == 0
    assert hits[Adaptive] > 1000


def test_conversations_that_went_on_before_are_kept_longer():
    """Every fifth request is the next turn of one of twelve, the others come once."""
    hits = {}
    for policy in (Adaptive, Lru):
        kv, hits[policy] = KVCache(120, policy(120)), 0
        for number in range(5000):
            turn, talk = number // 60, number % 60 // 5
            goes_on = number % 5 == 0
            length = 2 + turn % 6 if goes_on else 3
            name = (talk, turn // 6) if goes_on else (number, -1)
            keys = [hashed(*name, depth) for depth in range(length)]
            found = kv.find(keys)
            kv.acquire(found)
            hits[policy] += len(found)
            block_ids = found + kv.allocate(length - len(found))
            for index in range(len(found), length):
                kv.publish(block_ids[index], keys[index], block_ids[index - 1] if index else 0)
            kv.release(block_ids)
            if number % 100 == 0:
                check_cache(kv)
    assert hits[Lru] == 0
    assert hits[Adaptive] > 500


@pytest.mark.parametrize("num_blocks", [17, 5000])
def test_what_adaptive_remembers_is_bounded(num_blocks: int):
    """Names that come once beside one that always comes, in a small cache and in one never full."""
    adaptive = Adaptive(num_blocks)
    cache = Cache(adaptive, num_blocks)
    for turn in range(6000):
        cache.ask("always")
        if num_blocks == 17 and turn % 10 == 0:
            cache.ask(f"{turn - 100}")  # which comes back once it was evicted
        if num_blocks == 17 or turn < 1000:
            cache.ask(f"{turn}")
    adaptive.victim()  # which takes note of the last ones
    horizon = adaptive._reuse.ends[-1]
    num_watched = sum(map(adaptive._is_watched, cache.entry_of.values()))
    assert len(adaptive._ghosts) <= horizon
    assert sum(map(len, adaptive._by_age)) <= len(adaptive._ghosts) + 2 * num_blocks
    assert sum(map(len, adaptive._cells.values())) <= len(cache.entry_of)
    assert sum(batch.num_free for cell in adaptive._cells.values() for batch in cell) == len(
        cache.entry_of
    )
    watched = [batch for batches in adaptive._by_age for batch in batches]
    assert sum(batch.num_watched for batch in watched) <= len(adaptive._ghosts) + num_watched
    assert len(set(adaptive._reuse._has_data)) == len(adaptive._reuse._has_data)


def test_adaptive_forgets_what_has_left_a_batch():
    """A long prefix that always comes, each time with another end."""
    num_blocks = 300
    adaptive = Adaptive(num_blocks)
    trunk = range(1, 101)
    for entry in trunk:
        adaptive.insert(entry, hashed(entry), entry - 1)
    for leaf in range(101, num_blocks):
        adaptive.insert(leaf, hashed(leaf), 100)
        for entry in (leaf, *reversed(trunk)):
            adaptive.free(entry)
        for entry in trunk:
            adaptive.hit(entry)
    adaptive.victim()
    batches = [batch for cell in adaptive._cells.values() for batch in cell]
    assert sum(batch.num_free for batch in batches) == num_blocks - 101
    assert sum(len(batch.entries) for batch in batches) < 12 * num_blocks


def test_adaptive_tells_entries_apart_by_how_often_they_were_asked_for_also_before_an_eviction():
    num_blocks = 50
    adaptive = Adaptive(num_blocks)
    cache = Cache(adaptive, num_blocks)

    def kind_of(name: str) -> int:
        adaptive.victim()  # which takes note of what became free
        return adaptive._batch_of[cache.entry_of[name]].kind

    kinds = []
    for _ in range(17):
        cache.ask("often")
        kinds.append(kind_of("often"))
    assert kinds == [0, 1, *[2] * 2, *[3] * 4, *[4] * 8, 5]
    for name in ("often", "twice", "twice"):
        cache.ask(name)
    while "often" in cache.entry_of or "twice" in cache.entry_of:
        cache.evict()
    for name in ("often", "twice", "once"):
        cache.ask(name)
    assert [kind_of(name) for name in ("often", "twice", "once")] == [4, 2, 0]


@pytest.mark.parametrize("is_hit", [True, False])
def test_what_stays_longer_than_adaptive_watches_is_no_news(is_hit: bool):
    adaptive = Adaptive(3)
    adaptive.insert(1, hashed(1), 0)
    adaptive.free(1)
    adaptive.insert(2, hashed(2), 0)
    for _ in range(5000):
        adaptive.free(2)
        adaptive.hit(2)
    before = adaptive._reuse._asked[-1][-1]
    if is_hit:
        adaptive.hit(1)
    else:
        assert adaptive.victim() == 1
        adaptive.evict(1)
    assert adaptive._reuse._asked[-1][-1] == before
    assert not adaptive._ghosts


def test_of_what_went_together_only_what_has_not_come_back_is_forgotten_with_time():
    adaptive = Adaptive(4)
    adaptive.insert(1, hashed(1), 0)
    adaptive.insert(2, hashed(2), 1)
    for entry in (2, 1):
        adaptive.free(entry)
    for entry in (2, 1):
        adaptive.evict(entry)
    assert set(adaptive._ghosts) == {hashed(1), hashed(2)}
    adaptive.insert(1, hashed(1), 0)
    assert set(adaptive._ghosts) == {hashed(2)}
    for _ in range(5000):
        adaptive.free(1)
        adaptive.hit(1)
    assert not adaptive._ghosts


def test_of_a_large_cache_only_some_entries_are_watched():
    adaptive = Adaptive(100_000)
    for entry in range(1, 20_000):
        adaptive.insert(entry, hashed(entry), 0)
        adaptive.free(entry)
    for entry in range(1, 10_000):
        adaptive.hit(entry)
        adaptive.free(entry)
    assert 50 < sum(adaptive._reuse._asked[-1]) < 200
    for entry in range(1, 20_000):
        adaptive.evict(entry)
    assert 100 < len(adaptive._ghosts) < 400


# ---------------------------------------------------------------------- what they are made of


def test_the_density_of_what_comes_back_is_learned_by_age():
    """Of one kind all come back at an age in the fourth step, of another one none."""
    reuse = ReuseTimes(3200, 2)
    before = [reuse.density(0, age) for age in range(12)]
    assert before == sorted(before, reverse=True), "until it is known otherwise the old go first"
    for kind in (0, 1):
        for age in range(12):
            reuse.note_reached(kind, age, 1e6 if age < 4 or kind else 0)
    for _ in range(1_000_000):
        reuse.note_asked(0, 3)
    assert {reuse.learn() for _ in range(4)} == {0, 1}
    ends = reuse.ends
    assert ends[:4] == [100, 200, 400, 800]
    assert reuse.density(0, 0) == pytest.approx(1 / (ends[2] + 200), rel=0.01)
    assert reuse.density(0, 3) == pytest.approx(1 / 200, rel=0.01)
    assert reuse.density(1, 0) < 0.01 * reuse.density(0, 0)


def test_what_was_counted_long_ago_weighs_less():
    reuse = ReuseTimes(32, 1)
    assert reuse.learn() is None
    for is_asked in (True, False):
        for _ in range(40):
            reuse.note_reached(0, 0, 100)
            for _ in range(100 * is_asked):
                reuse.note_asked(0, 0)
            reuse.pass_time(320)
        reuse.learn()
        reuse.learn()
        assert (reuse.density(0, 0) > 0.4) == is_asked
    for _ in range(400):
        reuse.pass_time(320)
    assert reuse._weight < 1e101


def test_a_sketch_counts_at_least_what_was_added_and_forgets_with_time():
    sketch, rng = FrequencySketch(64), random.Random(0)
    names = [rng.randbytes(16) for _ in range(64)]
    for number, name in enumerate(names):
        for _ in range(number % 8):
            sketch.add(name)
    counts = [sketch.count(name) for name in names]
    assert all(count >= number % 8 for number, count in enumerate(counts))
    assert sum(count == number % 8 for number, count in enumerate(counts)) > 48
    for _ in range(100):
        sketch.add(names[0])
    assert sketch.count(names[0]) == 15
    for name in (names[number % 64] for number in range(640 - 324)):
        sketch.add(name)
    assert sketch.count(names[0]) < 15


def test_scores_are_kept_in_order_whatever_leaves_and_comes_back():
    rng = random.Random(0)
    by_score, scores = ByScore(20), dict[int, int]()
    for _ in range(5000):
        entry = rng.randrange(1, 20)
        if entry in scores:
            del scores[entry]
            by_score.discard(entry)
        else:
            scores[entry] = rng.randrange(10)
            by_score.add(entry, scores[entry])
        by_score.discard(0)
        assert len(by_score) == len(scores)
        if scores:
            assert scores[by_score.first()] == min(scores.values())
        assert len(by_score._heap) <= 2 * 19 + 64
