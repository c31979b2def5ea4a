"""Traffic: when requests come, and what they are."""

import statistics
from itertools import pairwise

import pytest

from charonia.errors import ConfigError
from charonia.simulate.workload import ADVERSARY, Shape, rate_of, shape
from charonia.traces import TraceRequest

TRACE = [
    TraceRequest(
        timestamp=1000.0 + 100.0 * number,
        input_length=10 + number,
        output_length=number % 7,
        tenant="own",
    )
    for number in range(100)
]


def made(wanted: Shape, seed: int = 0):
    return list(shape(TRACE, wanted, seed))


def test_a_trace_stays_as_it_is():
    arrivals = made(Shape())
    assert [one.at for one in arrivals] == pytest.approx([0.1 * n for n in range(100)])
    assert [one.request.input_length for one in arrivals] == list(range(10, 110))
    assert {one.round for one in arrivals} == {0}


def test_who_was_refused_has_an_output_as_others_have():
    assert all(1 <= one.request.output_length <= 6 for one in made(Shape()))


def test_a_trace_can_go_faster_and_on():
    arrivals = made(Shape(num_requests=250, rate=50.0))
    assert len(arrivals) == 250
    assert arrivals[-1].at == pytest.approx(250 / 50, rel=0.02)
    assert [arrivals[n].round for n in (0, 99, 100, 249)] == [0, 0, 1, 2]
    assert [one.at for one in arrivals] == sorted(one.at for one in arrivals)


@pytest.mark.parametrize(("arrivals", "variation"), [("poisson", 1.0), ("bursty", 4.0)])
def test_arrivals_vary_as_is_wanted(arrivals, variation):
    came = [one.at for one in made(Shape(num_requests=20_000, rate=20.0, arrivals=arrivals))]
    gaps = [after - before for before, after in pairwise(came)]
    assert statistics.fmean(gaps) == pytest.approx(0.05, rel=0.1)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.15)


def test_the_same_seed_makes_the_same_traffic():
    wanted = Shape(arrivals="poisson", num_tenants=3, num_priorities=2, deadline_ms=(10, 20))
    assert made(wanted, 1) == made(wanted, 1)
    assert made(wanted, 1) != made(wanted, 2)


def test_tenants_priorities_deadlines_and_wishes_are_spread():
    wanted = Shape(
        num_requests=1000, num_tenants=3, num_priorities=2, deadline_ms=(10, 20), max_tokens=50
    )
    requests = [one.request for one in made(wanted)]
    counts = [sum(one.tenant == f"tenant-{n}" for one in requests) for n in range(3)]
    assert sum(counts) == 1000
    assert counts[0] == pytest.approx(500, rel=0.15)
    assert {one.priority for one in requests} == {0, 1}
    assert {one.deadline_ms for one in requests} == set(range(10, 21))
    assert {one.max_tokens for one in requests} == {50}


def test_an_adversary_sends_all_at_once():
    arrivals = made(Shape(num_requests=200, adversary=0.25))
    assert len(arrivals) == 200
    assert [one.at for one in arrivals] == sorted(one.at for one in arrivals)
    adverse = [one for one in arrivals if one.request.tenant == ADVERSARY]
    assert len(adverse) == 50
    assert len({one.at for one in adverse}) == 1
    assert min(one.request.input_length for one in adverse) >= 100
    regular = [one for one in arrivals if one.request.tenant != ADVERSARY]
    assert regular[0].at < adverse[0].at < regular[-1].at


def test_requests_at_one_time_are_spread_by_a_rate():
    trace = [TraceRequest(timestamp=7.0, input_length=9, output_length=2)] * 10
    arrivals = list(shape(trace, Shape(num_requests=15, rate=5.0), 0))
    assert [one.at for one in arrivals] == pytest.approx([0.2 * n for n in range(15)])
    assert {one.at for one in shape(trace, Shape(), 0)} == {0.0}
    with pytest.raises(ConfigError, match="at the same time; give a rate"):
        list(shape(trace, Shape(num_requests=15), 0))


def test_a_rate_needs_time():
    with pytest.raises(ConfigError, match="at the same time; give a rate"):
        rate_of(TRACE[:1])
