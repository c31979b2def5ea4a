"""Requests that come together with a long common prefix: one computes it."""

import msgspec
import pytest

from charonia.control import PrefixSharing
from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.policies import (
    DeadlineWatch,
    DisplacementByPriority,
    by_deadline,
    by_priority,
    ranked,
)
from charonia.control.scheduling.fitting import MAX_AWAITING
from charonia.control.state.limits import Limits
from charonia.control.state.stats import SchedulerStats
from support.stepping import Bench, make_request

COMMON = [7] * 32
"""Eight blocks of four tokens."""


class FixedTime(PrefixSharing):
    """A token of a prompt takes so long, whatever steps take."""

    def __init__(self, per_token: float = 1.0) -> None:
        super().__init__()
        self._per_token = per_token

    def seconds(self, num_blocks: int, num_before: int) -> float:
        return self._per_token * num_blocks * 4


def make_bench(sharing: PrefixSharing | None, **changes) -> Bench:
    values = {
        "sharing": sharing,
        "num_blocks": 80,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 40,
    } | changes
    return Bench(**values)


def make_common(key: str, **changes):
    """34 tokens, of which the last two are its own; it runs for as long as a test looks."""
    values = {"token_ids": COMMON + [ord(key[-1])] * 2, "max_tokens": 20} | changes
    return make_request(key, **values)


def computed(bench: Bench) -> int:
    return bench.scheduler.stats.prompt_tokens_computed


def test_one_computes_what_the_others_wait_for():
    bench = make_bench(FixedTime())
    bench.add(*map(make_common, "abc"))
    bench.step(0)
    assert bench.running == {"a"}
    bench.step(1)
    assert bench.running == {"a", "b", "c"}
    bench.ends()
    assert computed(bench) == 34 + 2 + 2
    assert bench.scheduler.stats.prefix_waits == 2


def test_without_it_each_computes_what_is_not_there():
    bench = make_bench(None, max_num_batched_tokens=64)
    bench.add(*map(make_common, "abc"))
    bench.ends()
    assert computed(bench) > 2 * 34
    assert bench.scheduler.stats.prefix_waits == 0


def test_others_pass_and_that_does_not_count():
    bench = make_bench(FixedTime(), max_num_batched_tokens=64)
    waiting = make_common("b")
    bench.add(make_common("a"), waiting, make_request("x"))
    bench.step(0)
    assert bench.running == {"a", "x"}
    assert waiting.num_passed == 0


def test_nobody_waits_for_longer_than_it_would_compute():
    bench = make_bench(FixedTime(per_token=1.5 / 32), max_num_batched_tokens=9)
    bench.add(make_request("x", max_tokens=40))  # takes one token of each step
    bench.step(0)
    bench.add(*map(make_common, "ab"))
    bench.step(1)
    bench.step(2)
    assert bench.running == {"x", "a"}
    bench.step(2.6)
    assert bench.running == {"x", "a"}, "there was no token left for it"
    bench.step(2.7)
    bench.step(2.8)
    assert bench.running == {"x", "a", "b"}
    bench.ends()
    assert computed(bench) == 8 + 34 + 2, "it finds what is there by then"


def test_where_prefixes_part_again_the_next_part_is_waited_for_as_well():
    bench = make_bench(FixedTime(per_token=1 / 32), max_num_batched_tokens=80, max_model_len=99)
    further = [(key, COMMON + [8] * 32 + [ord(key)] * 2) for key in "bcd"]
    bench.add(make_common("a"), *(make_request(key, token_ids=ids) for key, ids in further))
    bench.step(0)
    assert bench.running == {"a"}
    bench.step(1.5)
    assert bench.running == {"a", "b"}
    bench.step(1.9)
    assert computed(bench) == 34 + 34 + 2 + 2
    bench.ends()


def test_what_was_waited_for_once_is_not_waited_for_again():
    sharing, running = make_sharing(per_token=1.0)
    waiting = make_waiting()
    assert sharing.waits(waiting, 0, now=5.0)
    assert waiting.awaits_until == 5.0 + 12.0
    running[1].is_ended = True
    sharing.begin([running[0]])
    assert not sharing.still_waits(waiting, now=6.0)
    assert sharing.waits(waiting, 0, now=6.0), "for less, until then"
    assert waiting.awaits_until == 5.0 + 12.0
    assert not sharing.waits(waiting, 1, now=17.0)
    running[2].block_keys = waiting.block_keys[:4]
    sharing.begin([running[2]])
    assert not sharing.waits(waiting, 1, now=40.0), "the time for one block more is over, too"


def make_sharing(per_token: float) -> tuple[FixedTime, list]:
    """With three that run, of which each computes other blocks."""
    sharing = FixedTime(per_token)
    limits = Limits(
        num_blocks=80, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64
    )
    prompt_time = PromptTime()
    prompt_time.start_epoch(limits)
    sharing.start_epoch(limits, prompt_time, SchedulerStats())
    running = [make_request(key) for key in "abc"]
    for one, keys in zip(running, (b"12", b"1234", b"1xyz"), strict=True):
        one.block_keys, one.row = [bytes([key]) for key in keys], 0
    sharing.begin(running)
    return sharing, running


def make_waiting():
    waiting = make_request("d", token_ids=[0] * 40)
    waiting.block_keys = [bytes([key]) for key in b"123999"]
    return waiting


def test_the_longest_prefix_that_anybody_computes_counts():
    sharing, running = make_sharing(per_token=1.0)
    waiting = make_waiting()
    assert sharing.waits(waiting, 0, now=0.0)
    assert (waiting.awaits, waiting.num_awaited) == (running[1], 3)
    assert waiting.awaits_until == 12.0


@pytest.mark.parametrize("change", [{"row": None}, {"is_ended": True}, {"num_published": 3}])
def test_when_the_one_that_computes_is_done_or_gone_nobody_waits_for_it(change):
    sharing, running = make_sharing(per_token=1.0)
    waiting = make_waiting()
    assert sharing.waits(waiting, 0, now=0.0)
    assert sharing.still_waits(waiting, now=11.0)
    for name, value in change.items():
        setattr(running[1], name, value)
    assert not sharing.still_waits(waiting, now=11.0)
    sharing.begin([running[0], running[2]])
    assert sharing.waits(waiting, 0, now=11.0), "for somebody else"
    assert waiting.awaits is running[0]
    assert waiting.awaits_until == 12.0, "but for no longer"
    assert not sharing.still_waits(waiting, now=12.0)
    assert not sharing.waits(waiting, 0, now=12.0)


@pytest.mark.parametrize(
    "changes",
    [{"cache_scope": b"another tenant"}, {"takes_hits": False}, {"token_ids": [8] * 34}],
)
def test_nobody_waits_for_what_it_will_not_find(changes):
    bench = make_bench(FixedTime(), max_num_batched_tokens=128)
    bench.add(make_common("a"), make_common("b", **changes))
    bench.step(0)
    assert bench.running == {"a", "b"}


def test_a_prefix_that_is_hardly_a_step_is_computed_at_once():
    sharing = PrefixSharing()
    bench = make_bench(sharing, max_num_batched_tokens=256)
    for _ in range(8):
        sharing._time.note_step(1, 0, 0, 0, 0.010)
        sharing._time.note_step(32, 0, 0, 0, 0.019)
    bench.add(*map(make_common, "ab"))
    bench.step(0)
    assert bench.running == {"a", "b"}


def test_a_prefix_of_some_steps_is_waited_for():
    sharing = PrefixSharing()
    bench = make_bench(sharing, max_num_batched_tokens=256)
    for _ in range(8):
        sharing._time.note_step(1, 0, 0, 0, 0.010)
        sharing._time.note_step(32, 0, 0, 0, 0.040)
    bench.add(*map(make_common, "ab"))
    bench.step(0)
    assert bench.running == {"a"}
    bench.step(0.01)
    assert bench.running == {"a", "b"}


def test_what_prompts_take_is_known_to_deadlines_too_and_in_the_next_epoch():
    sharing, watch = PrefixSharing(), DeadlineWatch(demotes=False)
    bench = Bench(ranked(by_deadline, None, watch), sharing=sharing)
    for _ in range(8):
        sharing._time.note_step(32, 0, 0, 0, 0.040)
    bench.scheduler.reset()
    assert sharing.seconds(8, 0) == pytest.approx(0.040)
    assert watch._remaining._prompt_time is sharing._time


def test_a_prompt_takes_the_draft_models_time_too():
    """For a deadline, and for those that wait for a prefix: both wait for the whole step."""
    sharing, watch = PrefixSharing(), DeadlineWatch(demotes=False)
    bench = Bench(ranked(by_deadline, None, watch), sharing=sharing, max_num_batched_tokens=8)
    prompts = (make_request(f"{number}", token_ids=[number] * 32) for number in range(4))
    for request in prompts:
        bench.add(request)
        while bench.scheduler.num_live:
            plan = bench.scheduler.plan(0.0)
            result = bench.engine.submit(plan).result(None)
            result = msgspec.structs.replace(result, seconds=1.0, draft_seconds=0.4)
            bench.scheduler.apply(result, 0.0)
    assert sharing.seconds(8, 0) == pytest.approx(4.0)
    assert watch._remaining.of(make_request("a", max_tokens=1, token_ids=[5] * 32)) == 4.0


def test_one_that_was_preempted_does_not_wait():
    bench = make_bench(FixedTime(), max_num_batched_tokens=128)
    preempted = make_common("b")
    preempted.num_preemptions = 1
    bench.add(make_common("a"), preempted)
    bench.step(0)
    assert bench.running == {"a", "b"}


def test_so_many_may_be_left_out_of_a_step_and_no_more():
    bench = make_bench(FixedTime(), max_num_batched_tokens=128)
    bench.add(*(make_common(f"a{number:03}") for number in range(MAX_AWAITING)))
    bench.add(make_request("x"), make_common("last"), make_request("y"))
    bench.step(0)
    assert bench.running == {"a000", "x"}


def test_a_new_engine_computes_all_anew():
    bench = make_bench(FixedTime())
    bench.add(*map(make_common, "ab"))
    bench.step(0)
    bench.scheduler.reset()
    assert all(one.awaits is None for one in bench.scheduler.requests)


def test_who_may_displace_others_does_not_wait():
    rank = by_priority()
    bench = make_bench(
        FixedTime(),
        policy=ranked(rank, DisplacementByPriority(rank)),
        max_num_seqs=1,
        max_num_batched_tokens=64,
    )
    bench.add(make_common("a", priority=1))
    bench.step(0)
    bench.add(make_common("b", priority=0))
    bench.step(1)
    assert bench.running == {"b"}
