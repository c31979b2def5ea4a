"""Requests share a step's time and work by the tokens that it computed for each."""

import pytest

from charonia.control import FixedDepth, Speculation
from support.echo import EchoDrafter
from support.stepping import Bench, make_request

FLOPS = 100.0
STEP_S = 0.001
"""What the echo engine says that a step took."""


def test_a_step_is_shared_by_tokens_and_nothing_of_it_is_lost() -> None:
    bench = Bench(flops_per_token=FLOPS)
    long, short = make_request("a", max_tokens=3), make_request("b", max_tokens=2)
    bench.add(long, short)
    bench.step()
    assert long.engine_seconds == short.engine_seconds == pytest.approx(STEP_S / 2)
    assert long.engine_flops == short.engine_flops == 8 * FLOPS
    bench.step()
    assert long.engine_flops == 9 * FLOPS
    bench.step()
    assert long.engine_seconds + short.engine_seconds == pytest.approx(3 * STEP_S)
    assert long.engine_seconds == pytest.approx(2 * STEP_S)


def test_what_is_computed_again_counts_again() -> None:
    bench = Bench(flops_per_token=FLOPS)
    request = make_request("a", max_tokens=5)
    bench.add(request)
    for _ in range(3):
        bench.step()
    assert request.engine_flops == (8 + 1 + 1) * FLOPS
    bench.engine.restart()
    bench.scheduler.reset()
    bench.step()
    assert request.engine_flops == (10 + 11) * FLOPS


def test_drafts_are_work_of_their_request() -> None:
    speculation = Speculation(max_drafts=3, policy=FixedDepth(), drafter=EchoDrafter(256))
    bench = Bench(flops_per_token=FLOPS, speculation=speculation)
    request = make_request("a", max_tokens=20)
    bench.add(request)
    num_steps = 0
    while not request.is_ended:
        bench.step()
        num_steps += 1
    assert request.drafts.num_drafted
    num_tokens = 8 + num_steps - 1 + request.drafts.num_drafted
    assert request.engine_flops == num_tokens * FLOPS
    assert request.engine_seconds == pytest.approx(num_steps * STEP_S)
