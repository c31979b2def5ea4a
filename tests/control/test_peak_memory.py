"""Room until requests end: how long answers will be, and what they need at most together."""

from dataclasses import replace

import pytest

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.estimators.pair_cost import AttentionTime
from charonia.control.estimators.peak_memory import PeakMemory
from charonia.control.policies import DisplacementByPriority, by_priority, ranked
from charonia.control.scheduling.prompt_budget import NO_ATTENTION, PromptBudget
from support.counting import count_calls
from support.stepping import LIMITS, Bench, make_request


def expecting(*past: int) -> PeakMemory:
    """Takes answers to be as long as these were."""
    lengths = OutputLengths()
    for num_tokens in past:
        lengths.note(num_tokens)
    peak = PeakMemory(expects=True)
    peak.start(lengths)
    return peak


def running(num_known: int, num_left: int):
    request = make_request("a", token_ids=[1] * num_known, max_tokens=num_left)
    request.max_known = num_known + num_left
    return request


@pytest.mark.parametrize(
    ("batch", "num_blocks"),
    [
        ([(10, 5)], 0),  # alone it always has room
        ([(10, 5), (10, 5)], 30),
        ([(10, 50), (10, 5)], 60),  # of the longer one alone, when the other is gone
        ([(10, 50), (100, 5)], 120),  # at the end of the shorter one
        ([(10, 10), (20, 5), (1, 20)], 46),
    ],
)
def test_the_peak_is_at_one_of_the_ends(batch, num_blocks):
    """With blocks of one token, so that tokens are what counts."""
    peak = expecting()  # no answer has ended: all are as long as they may be
    requests = [running(*one) for one in batch]
    for room in (num_blocks - 1, num_blocks):
        limits = replace(LIMITS, block_size=1, num_blocks=room + 1, max_model_len=2000)
        for first in requests:
            others = [one for one in requests if one is not first]
            assert peak.fits(limits, room, others, first, 0) == (room == num_blocks or not others)


@pytest.mark.parametrize(("num_blocks", "has_room"), [(14, False), (15, True)])
def test_where_nothing_is_expected_there_is_room_for_all_ends_at_once(num_blocks, has_room):
    """Blocks of 4 tokens: 16, 25 and 13 are held at most, as the last ones are never computed."""
    limits = replace(LIMITS, block_size=4, num_blocks=num_blocks + 1)
    others = [running(12, 5), running(10, 16)]
    assert PeakMemory(expects=False).fits(limits, num_blocks, others, running(10, 4), 0) == has_room


@pytest.mark.parametrize("expects", [False, True])
def test_what_ended_requests_in_flight_hold_is_no_room(expects):
    limits = replace(LIMITS, block_size=4, num_blocks=5)
    peak = expecting() if expects else PeakMemory(expects=False)
    assert peak.fits(limits, 4, [], running(10, 6), 0)
    peak.num_held = 1
    assert not peak.fits(limits, 4, [], running(10, 6), 0)
    assert peak.fits(limits, 4, [], running(4, 4), 0)


def test_what_others_hold_is_not_needed_again_where_lengths_are_expected():
    limits = replace(LIMITS, num_blocks=10, block_size=4)
    others = [running(12, 4)]
    request = running(20, 4)
    assert not expecting().fits(limits, 9, others, request, 0)
    assert expecting().fits(limits, 9, others, request, 3)
    assert not PeakMemory(expects=False).fits(limits, 9, others, request, 3)


def preemptions_with(peak: PeakMemory | None, max_tokens: int) -> int:
    """Of 6 requests in 16 blocks of 4 tokens; each needs 2 for its prompt and one per 4 tokens."""
    bench = Bench(peak_memory=peak, max_num_seqs=6)
    bench.add(*[make_request(f"{n}", max_tokens=max_tokens) for n in range(6)])
    assert len(bench.ends()) == 6
    return bench.scheduler.stats.preemptions


def test_nobody_is_preempted_where_all_have_room_to_the_end():
    assert preemptions_with(None, 32) > 0
    assert preemptions_with(PeakMemory(expects=False), 32) == 0
    assert preemptions_with(PeakMemory(expects=True), 32) == 0, "all answers are as long"


class OneToken(PromptBudget):
    def tokens(
        self, num_decodes: int, num_before: int = 0, attention: AttentionTime = NO_ATTENTION
    ) -> int:
        return 1


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(16, 16), (24, 8), (32, 2)])
def test_nobody_is_preempted_while_a_prompt_is_computed_slowly_beside_one_that_decodes(
    num_prompt, max_tokens
):
    """Then the one that decodes is at its end long before the other has begun to."""
    bench = Bench(prompt_budget=OneToken(), peak_memory=PeakMemory(expects=False), max_num_seqs=2)
    bench.add(make_request("a", max_tokens=32))
    bench.step()
    bench.add(make_request("b", token_ids=[2] * num_prompt, max_tokens=max_tokens))
    assert bench.ends() == ["a", "b"]
    assert bench.scheduler.stats.preemptions == 0


def test_a_request_waits_for_the_blocks_of_one_that_has_ended_and_is_in_flight():
    bench = Bench(peak_memory=PeakMemory(expects=False), num_stages=2)
    scheduler = bench.scheduler
    bench.add(make_request("a"))
    plan = scheduler.plan(0.0)
    scheduler.finish("a")
    bench.add(make_request("b", max_tokens=50))
    assert scheduler.plan(0.0) is None
    scheduler.apply(bench.engine.submit(plan).result(None), 0.0)
    assert scheduler.plan(0.0) is not None


def test_answers_that_were_short_leave_room_for_more():
    def num_running(past: list[int]) -> int:
        peak = PeakMemory(expects=True)
        bench = Bench(peak_memory=peak, max_num_seqs=6)
        for length in past:
            peak._lengths.note(length)
        bench.add(*[make_request(f"{n}", max_tokens=50) for n in range(6)])
        bench.step()
        return len(bench.running)

    assert num_running([]) == 1
    assert num_running([4] * 20) == 4


@pytest.mark.parametrize(("num_preemptions", "running"), [(0, {"h", "v"}), (1, {"h", "l"})])
def test_nobody_passes_an_urgent_request_that_was_preempted(num_preemptions, running):
    """It has no room beside one that is still more urgent; another has, in the place of a third."""
    rank = by_priority()
    bench = Bench(ranked(rank, DisplacementByPriority(rank)))
    bench.add(make_request("h", -5, max_tokens=30), make_request("l", max_tokens=30))
    bench.step()
    large = make_request("u", -1, token_ids=[7] * 56, num_preemptions=num_preemptions)
    bench.add(large, make_request("v", -1))
    bench.step()
    assert bench.running == running


def test_an_urgent_request_displaces_as_many_as_its_end_needs():
    rank = by_priority()
    policy = ranked(rank, DisplacementByPriority(rank))
    bench = Bench(policy, peak_memory=PeakMemory(expects=False), max_num_seqs=4)
    bench.add(*[make_request(f"{n}", max_tokens=10) for n in range(3)])
    bench.step()
    assert len(bench.running) == 3
    bench.add(make_request("u", -1, token_ids=[7] * 24, max_tokens=20))
    bench.step()
    assert bench.running == {"0", "u"}, "now there would be room for all of them"
    assert len(bench.ends()) == 4


def test_how_many_must_give_way_is_found_with_few_looks_at_the_peak(monkeypatch):
    calls = count_calls(monkeypatch, PeakMemory, "fits")
    needs = count_calls(monkeypatch, PeakMemory, "_need")
    rank = by_priority()
    policy = ranked(rank, DisplacementByPriority(rank))
    peak = PeakMemory(expects=False)
    limits = {
        "max_num_seqs": 64,
        "num_blocks": 257,
        "max_num_batched_tokens": 1024,
        "max_model_len": 400,
    }
    bench = Bench(policy, peak_memory=peak, **limits)
    bench.add(*[make_request(f"{n}", max_tokens=8) for n in range(64)])
    bench.step()
    assert len(bench.running) == 64
    bench.add(make_request("u", -1, token_ids=[7] * 24, max_tokens=300))
    calls.clear()
    needs.clear()
    bench.step()
    assert "u" in bench.running
    assert len(bench.running) < 50, "many must give way"
    assert calls["fits"] < 12
    assert needs["_need"] <= 64 + calls["fits"], "each that runs is looked at once"


def test_who_is_admitted_is_one_of_those_that_run_to_the_next_in_the_same_plan(monkeypatch):
    needs = count_calls(monkeypatch, PeakMemory, "_need")
    bench = Bench(
        peak_memory=PeakMemory(expects=True),
        max_num_seqs=16,
        num_blocks=200,
        max_num_batched_tokens=256,
    )
    bench.add(*[make_request(f"{n}") for n in range(12)])
    bench.step()
    bench.add(*[make_request(f"{n}") for n in range(12, 16)])
    needs.clear()
    assert len(bench.step().joins) == 4
    assert needs["_need"] == 12 + 3 + 4, "those that ran, those that joined, and each that waited"


def test_what_requests_need_is_kept_until_the_next_plan():
    limits = replace(LIMITS, block_size=1, max_model_len=2000)
    peak = expecting()
    first, second, request = running(10, 5), running(10, 20), running(10, 15)
    assert not peak.fits(limits, 49, [first, second], request, 0)
    assert peak.fits(limits, 50, [second], request, 0), "without the first one"
    second.max_known += 1
    assert peak.fits(limits, 50, [second], request, 0)
    second.max_known += 100
    peak.begin_plan()
    assert not peak.fits(limits, 50, [second], request, 0)
