"""What is given up under pressure, level by level, and what becomes of requests meanwhile."""

import json

import pytest

from charonia.config import SchedulerArgs
from charonia.control import NO_SHEDDING, LoadShedding
from charonia.core.gate.degradation import CLIMB_EVERY_S, DESCEND_EVERY_S, PROMPT_SHARE, Degradation
from charonia.core.gate.gate import Gate
from charonia.core.gate.tenants import Tenants
from charonia.core.generation_request import GenerationRequest
from charonia.errors import ConfigError, OverloadedError
from charonia.metrics.metrics import Metrics
from charonia.protocol import SamplingParams

LONG, SHORT = 10.0, 0.1
"""Seconds of waiting, more than a level takes and fewer than half as many."""


class Bench:
    """A ladder, and the time."""

    def __init__(self, tmp_path, **args) -> None:
        path = tmp_path / "tenants.json"
        path.write_text(json.dumps({"tenants": {"batch": {"low_priority": True}}}))
        self.lines: list[str] = []
        self.metrics = Metrics()
        scheduler_args = SchedulerArgs(**{"degradation_wait_s": 1.0} | args)
        tenants = Tenants(path, log=print)
        self.degradation = Degradation(scheduler_args, tenants, self.metrics, log=self.lines.append)
        self.now = 100.0

    def observe(self, wait_s: float | None, *, after: float) -> int:
        self.now += after
        self.degradation.observe(wait_s, self.now)
        return self.degradation.level

    def climb(self, level: int) -> None:
        for _ in range(level):
            self.observe(LONG, after=CLIMB_EVERY_S)
        assert self.degradation.level == level


@pytest.fixture
def make(tmp_path):
    return lambda **args: Bench(tmp_path, **args)


def request_of(**params) -> GenerationRequest:
    params = {"max_tokens": 1000} | params
    return GenerationRequest(key="a", prompt_ids=[1], params=SamplingParams(**params))


def test_levels_are_enabled_one_after_the_other_and_disabled_more_slowly(make):
    bench = make()
    climbed = [bench.observe(LONG, after=CLIMB_EVERY_S / 2) for _ in range(12)]
    assert climbed == [1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4, 4]
    assert bench.observe(0.7, after=60) == 4, "it is no longer long, but not short"
    left = [bench.observe(SHORT, after=DESCEND_EVERY_S / 2) for _ in range(8)]
    assert left == [3, 3, 2, 2, 1, 1, 0, 0]
    assert bench.metrics.gauges["charonia_degradation_level", ""] == 0
    assert len(bench.lines) == 8
    assert "degradation" in bench.lines[1]
    assert "taken=2" in bench.lines[1]
    assert "speculation,chunks" in bench.lines[1]


def test_without_a_wait_to_keep_nothing_is_given_up(make):
    bench = make(degradation_wait_s=None)
    assert bench.observe(1e6, after=100) == 0
    assert bench.lines == []


def test_steps_do_without_what_has_been_given_up(make):
    bench = make()
    assert bench.degradation.shedding == NO_SHEDDING
    bench.climb(1)
    assert bench.degradation.shedding == LoadShedding(speculates=False)
    bench.observe(LONG, after=CLIMB_EVERY_S)
    assert bench.degradation.shedding == LoadShedding(speculates=False, prompt_share=PROMPT_SHARE)


@pytest.mark.parametrize(
    ("params", "max_tokens"),
    [
        ({"priority": 1}, 256),
        ({"tenant": "batch"}, 256),
        ({"priority": 1, "min_tokens": 300}, 300),
        ({"priority": 1, "max_tokens": 20}, 20),
        ({"priority": 0}, 1000),
        ({"tenant": "search", "priority": -1}, 1000),
    ],
)
def test_answers_of_low_priority_become_shorter(make, params, max_tokens):
    bench, request = make(), request_of(**params)
    assert bench.degradation.capped(request) is request
    bench.climb(3)
    capped = bench.degradation.capped(request)
    assert capped.params.max_tokens == max_tokens
    was_capped = max_tokens < request.params.max_tokens
    assert bench.metrics.counters["charonia_capped_requests_total", ""] == was_capped
    assert (capped is request) != was_capped


def test_in_the_end_requests_of_low_priority_are_refused(make):
    bench = make(degradation_ladder="rejection")
    bench.degradation.check(SamplingParams(priority=1))
    bench.climb(1)
    for params in (SamplingParams(priority=1), SamplingParams(tenant="batch")):
        with pytest.raises(OverloadedError, match=r"low priority; retry after 9\.000 s$"):
            bench.degradation.check(params)
    bench.degradation.check(SamplingParams())


def test_a_queue_that_empties_is_no_pressure_however_few_requests_have_started(make):
    """A stall at the start, e.g. while an engine loads, must not refuse requests for ever."""
    bench = make()
    gate = Gate(Tenants(log=print), SchedulerArgs(), clock=lambda: bench.now)
    entry, _ = gate.enter(request_of())
    climbed = [bench.observe(gate.wait_s(), after=CLIMB_EVERY_S) for _ in range(8)]
    assert climbed[-1] == 4
    gate.note_started(entry)
    gate.leave(entry)
    left = [bench.observe(gate.wait_s(), after=DESCEND_EVERY_S) for _ in range(4)]
    assert left == [3, 2, 1, 0]


def test_what_nobody_knows_moves_nobody(make):
    bench = make()
    assert bench.observe(None, after=100) == 0
    bench.climb(2)
    assert bench.observe(None, after=100) == 2


def test_one_may_give_up_other_things_in_another_order(make):
    bench = make(degradation_ladder="max_tokens, chunks", degradation_max_tokens=8)
    bench.climb(1)
    assert bench.degradation.shedding == NO_SHEDDING
    assert bench.degradation.capped(request_of(priority=1)).params.max_tokens == 8
    assert bench.observe(LONG, after=CLIMB_EVERY_S) == 2
    assert bench.observe(LONG, after=CLIMB_EVERY_S) == 2


@pytest.mark.parametrize("ladder", ["", "speculation,", "chunks,chunks", "chunk"])
def test_a_ladder_of_other_levels_is_refused(ladder):
    with pytest.raises(ConfigError, match="must name some of speculation, chunks, max_tokens"):
        SchedulerArgs.from_parameters({"degradation_ladder": ladder})
