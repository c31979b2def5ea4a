"""A pool that has fewer blocks while there is less memory."""

import pytest

from charonia.control import PeakMemory
from support.stepping import Bench, make_request

NUM_BLOCKS = 33
ALL = NUM_BLOCKS - 1


def make_bench(**changes) -> Bench:
    values = {
        "num_blocks": NUM_BLOCKS,
        "max_model_len": 32,
        "max_num_seqs": 4,
        "watches_memory": True,
    } | changes
    return Bench(**values)


def say(bench: Bench, room: int) -> None:
    """Have the engine say, from its next step on, for how many blocks there is memory."""
    bench.engine.room = room


def test_blocks_are_set_aside_and_used_again_as_the_engine_says():
    bench = make_bench()
    kv = bench.scheduler.kv
    bench.add(make_request("a", max_tokens=24))
    say(bench, 21)
    first = bench.step()
    assert (first.discards, first.num_blocks) == ([], None)
    plan = bench.step()
    assert plan.discards == list(range(ALL, 20, -1)), "those that lie side by side"
    assert kv.num_usable == 20
    again = bench.step()
    assert again.discards == [], "it is said once"
    assert plan.num_blocks == again.num_blocks == 21
    say(bench, NUM_BLOCKS)
    bench.step()
    last = bench.step()
    assert (last.discards, last.num_blocks) == ([], None)
    assert kv.num_usable == ALL
    bench.ends()
    assert kv.num_free == ALL


def test_what_is_cached_makes_room_and_what_is_in_use_does_when_it_is_released():
    bench = make_bench()
    kv = bench.scheduler.kv
    for key in "abcdefgh":
        bench.add(make_request(key))
    bench.ends()
    assert kv.num_cached > ALL - 16
    bench.add(*(make_request(key, token_ids=[ord(key)] * 20) for key in "ijkl"))
    for _ in range(2):
        bench.step()
    num_used = kv.num_used
    assert num_used > 8
    say(bench, 9)
    bench.step()
    bench.step()
    assert (kv.num_usable, kv.num_cached) == (kv.num_used, 0)
    assert len(bench.ends()) == 4
    assert kv.num_usable == 8
    assert bench.scheduler.stats.preemptions > 0


def test_one_request_always_has_room():
    bench = make_bench()
    say(bench, 2)
    request = make_request("a", token_ids=[1] * 8, max_tokens=100)
    bench.add(request)
    bench.ends()
    assert len(request.token_ids) == 32
    assert bench.scheduler.kv.num_usable == 8


@pytest.mark.parametrize("expects", [False, True])
def test_one_request_has_room_to_its_end_where_that_is_asked(expects):
    bench = make_bench(peak_memory=PeakMemory(expects=expects))
    say(bench, 2)
    for now in (1.0, 3.0):
        bench.step(now)
    assert bench.scheduler.kv.num_usable == 8
    request = make_request("a", token_ids=[1] * 8, max_tokens=24)
    bench.add(request)
    assert bench.step(4.0).joins, "it waits until there is more memory"
    bench.ends()
    assert len(request.token_ids) == 32


def test_what_is_set_aside_is_no_room_until_the_end():
    bench = make_bench(peak_memory=PeakMemory(expects=False))
    say(bench, 17)
    for now in (1.0, 3.0):
        bench.step(now)
    assert bench.scheduler.kv.num_usable == 16
    bench.add(*(make_request(key, max_tokens=24) for key in "abc"))
    assert len(bench.step(4.0).joins) == 2
    assert len(bench.ends()) == 3
    assert bench.scheduler.stats.preemptions == 0


def test_nobody_is_admitted_by_blocks_that_the_same_plan_sets_aside():
    bench = make_bench(peak_memory=PeakMemory(expects=False))
    say(bench, 17)
    bench.add(make_request("first", max_tokens=1))
    bench.step(1.0)
    bench.add(*(make_request(key, max_tokens=24) for key in "abc"))
    plan = bench.step(2.0)
    assert (len(plan.discards), len(plan.joins)) == (16, 2)
    assert len(bench.ends()) == 3
    assert bench.scheduler.stats.preemptions == 0


def test_what_is_left_free_is_a_share_of_what_is_not_set_aside():
    bench = make_bench(num_blocks=1001)
    kv = bench.scheduler.kv
    assert kv.watermark == 10
    say(bench, 17)
    bench.add(make_request("first", token_ids=[1] * 8, max_tokens=24))
    for _ in range(2):
        bench.step()
    assert (kv.num_usable, kv.watermark) == (16, 1)
    bench.add(make_request("second", token_ids=[2] * 28, max_tokens=1))
    assert bench.step().joins, "a hundredth of the whole pool would be most of what there is"
    bench.ends()


def test_an_idle_engine_is_asked_once_a_second():
    bench = make_bench()
    say(bench, 20)
    bench.add(make_request("a", max_tokens=1))
    bench.step(now=100.0)
    assert bench.scheduler.plan(100.9) is not None, "it has been told of less memory"
    bench = make_bench()
    say(bench, NUM_BLOCKS)
    bench.add(make_request("a", max_tokens=1))
    bench.step(now=100.0)
    assert bench.scheduler.plan(100.9) is None
    plan = bench.step(now=101.0)
    assert (plan.rows, plan.discards) == ([], [])
    assert bench.scheduler.plan(101.9) is None


def test_an_engine_that_does_not_look_is_left_alone():
    bench = make_bench(watches_memory=False)
    bench.add(make_request("a", max_tokens=1))
    bench.step(now=100.0)
    assert bench.scheduler.plan(1000.0) is None


def test_a_new_epoch_begins_with_all_blocks():
    bench = make_bench()
    say(bench, 20)
    bench.add(make_request("a", max_tokens=20))
    bench.step()
    bench.step()
    assert bench.scheduler.kv.num_usable == 19
    bench.scheduler.reset()
    assert bench.scheduler.kv.num_usable == ALL
    bench.ends()
