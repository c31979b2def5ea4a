"""What requests ask of the cache, from their parameters to what others find there."""

from charonia.protocol import CacheRange
from core.bench import Bench
from support.echo import EchoExecutor


def served() -> Bench:
    """A core whose cache is full after a few requests, and gives up what was used longest ago."""
    return Bench(EchoExecutor(num_blocks=41, block_size=4), eviction_policy="lru")


def prompt(name: str, num_tokens: int = 16) -> list[int]:
    return [*([ord(name)] * num_tokens), 1]


def flood(bench: Bench, num_requests: int = 20) -> None:
    """Others that have nothing in common, and ask for nothing."""
    for number in range(num_requests):
        bench.add(f"{number} {bench.now}", prompt=[number + 1, number + 2] * 10, max_tokens=4)
        bench.run()


def ask(bench: Bench, key: str, **params) -> int:
    """A request whose name begins with its prompt's; what it finds in the cache."""
    params = {"max_tokens": 1} | params
    bench.add(key, prompt=prompt(key[0]), **params)
    bench.run()
    return bench.chunks[key][-1].timing["cached_tokens"]


def num_retained(bench: Bench) -> float:
    bench.core.step()
    return bench.core.metrics.gauges["charonia_kv_retained_blocks", ""]


def test_a_retained_prefix_survives_a_flood_and_another_one_does_not():
    bench = served()
    ask(bench, "a", cache_priority=90)
    ask(bench, "b")
    flood(bench)
    assert num_retained(bench) == 4
    assert ask(bench, "a again") == 16
    assert ask(bench, "b again") < 16


def test_what_is_not_worth_keeping_makes_room_for_the_rest():
    bench = served()
    ask(bench, "a")
    for number in range(20):
        bench.add(f"{number}", prompt=[number + 1] * 20, max_tokens=4, cache_priority=0)
        bench.run()
    assert ask(bench, "a again") == 16


def test_a_prefix_is_retained_for_its_time():
    bench = served()
    ask(bench, "a", cache_priority=90, cache_ttl_s=60)
    flood(bench)
    assert ask(bench, "a again") == 16
    bench.now += 61
    flood(bench)
    assert ask(bench, "a at last") == 0


def test_ranges_say_it_of_parts_of_the_prompt_and_of_what_is_generated():
    bench = served()
    half = CacheRange(end=8, priority=90)
    ask(bench, "a", cache_priority=(half,))
    answer = CacheRange(start=17, priority=80, ttl_s=1.0)
    ask(bench, "b", max_tokens=12, cache_priority=(answer, CacheRange(end=4, priority=90)))
    assert num_retained(bench) == 2 + 7, "of those between the ranges the last one needs all"
    flood(bench)
    assert ask(bench, "a again") == 8
    bench.now += 2
    flood(bench)
    assert ask(bench, "b again") == 4


def test_a_number_says_it_of_the_prompt_alone():
    bench = served()
    ask(bench, "a", max_tokens=20, cache_priority=90)
    assert num_retained(bench) == 5, "the last one begins in the prompt"


def test_wishes_outlive_the_engine():
    bench = served()
    bench.add("a", prompt=prompt("a"), max_tokens=8, cache_priority=90)
    bench.run(3)
    bench.executor.die_next = 1
    bench.run()
    assert bench.executor.num_restarts == 1
    flood(bench)
    assert ask(bench, "a again") == 16
