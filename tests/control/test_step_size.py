"""How many rows and tokens a step has where nobody says it, learned from what steps take."""

from dataclasses import replace
from itertools import pairwise

import pytest

from charonia.control import FixedDepth, SchedulerStats, Speculation, StepSize
from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.scheduling.step_budget import StepBudget
from support.echo import EchoDrafter
from support.stepping import LIMITS, Bench, make_request

MOST_ROWS, MOST_TOKENS = 256, 4096


def size_of(**options) -> StepSize:
    options = {"adapts_rows": True, "adapts_tokens": True} | options
    return StepSize(MOST_ROWS, MOST_TOKENS, **options)


def run(size: StepSize, num_steps: int, seconds_of, load: int = 10**6) -> None:
    """Steps as large as they may be, alternately of rows that decode and with prompts."""
    for step in range(num_steps):
        rows = min(load, size.max_rows)
        num_prompt_tokens = size.max_tokens - rows if step % 2 and size.max_tokens > rows else 0
        seconds = seconds_of(rows + num_prompt_tokens)
        size.observe(rows, num_prompt_tokens, rows, seconds, seconds)


@pytest.mark.parametrize(
    ("floor", "per_token", "least", "most"),
    [
        (0.010, 0.0001, 190, 230),
        (0.010, 0.001, 90, 130),
        (0.0, 0.001, 16, 16),  # nothing is gained by more
        (0.010, 0.0, 240, 256),
    ],
)
def test_rows_are_as_many_as_come_near_the_best_rate(floor, per_token, least, most):
    size = size_of()
    run(size, 1500, lambda num_tokens: floor + per_token * num_tokens)
    assert least <= size.max_rows <= most


def test_chunks_are_as_long_as_pays():
    def rate(tokens: int) -> float:
        return tokens / (0.010 + 0.0001 * tokens)

    size = size_of()
    run(size, 1500, lambda num_tokens: 0.010 + 0.0001 * num_tokens)
    assert 0.9 * rate(MOST_TOKENS) <= rate(size.max_tokens)
    assert size.max_tokens < MOST_TOKENS / 2


def test_larger_steps_are_tried_one_after_the_other():
    size = size_of()
    seen = []
    for _ in range(800):
        run(size, 1, lambda num_tokens: 0.01)
        seen.append(size.max_rows)
    assert seen[0] <= 32
    assert seen[-1] >= 0.9 * MOST_ROWS
    assert all(after <= 2.1 * before for before, after in pairwise(seen))


def test_what_no_load_has_tried_is_not_taken_for_granted():
    size = size_of()
    run(size, 500, lambda num_tokens: 0.01, load=10)
    assert 10 <= size.max_rows <= 64


def test_rows_keep_a_time_between_tokens():
    size = size_of(target_s=0.02)
    run(size, 1500, lambda num_tokens: 0.010 + 0.0005 * num_tokens)
    assert 10 <= size.max_rows <= 22
    few = size_of(target_s=0.02)
    run(few, 1500, lambda num_tokens: 0.010 + 0.003 * num_tokens)
    assert few.max_rows == 3


@pytest.mark.parametrize("each", [0.0, 0.00001])
def test_a_time_that_not_even_one_row_keeps_does_not_leave_one_row(each):
    size = size_of(target_s=0.005)
    run(size, 500, lambda num_tokens: 0.006 + each * num_tokens)
    assert size.max_rows == 16


def test_what_is_not_to_adapt_stays():
    size = size_of(adapts_rows=False)
    run(size, 100, lambda num_tokens: 0.001 * num_tokens)
    assert size.max_rows == MOST_ROWS
    size.note_preemption(5)
    assert size.max_rows == MOST_ROWS
    size = size_of(adapts_tokens=False)
    run(size, 100, lambda num_tokens: 0.001 * num_tokens)
    assert size.max_tokens == MOST_TOKENS


def test_rows_become_fewer_where_blocks_run_out_and_more_again_later():
    size = size_of()
    run(size, 500, lambda num_tokens: 0.01)
    size.note_preemption(40)
    assert size.max_rows == 40
    run(size, 100, lambda num_tokens: 0.01)
    assert 41 <= size.max_rows <= 44
    size.note_preemption(0)
    assert size.max_rows == 1


def test_a_scheduler_gives_no_more_rows_than_chosen():
    size = StepSize(4, 64, adapts_rows=True, adapts_tokens=True)
    size.max_rows = 2
    bench = Bench(step_size=size, max_num_seqs=4, num_blocks=100)
    bench.add(*[make_request(f"{n}", max_tokens=8) for n in range(4)])
    bench.step()
    assert len(bench.running) == 2
    size.max_rows = 1
    bench.step()
    assert len(bench.running) == 2, "nobody loses a row"
    size.max_rows = 4
    bench.step()
    assert len(bench.running) == 4
    assert bench.scheduler.stats.max_rows == 4
    assert len(bench.ends()) == 4


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_rows_that_are_left_after_a_preemption_are_those_of_all_stages(num_stages):
    size = StepSize(16, 64, adapts_rows=True, adapts_tokens=False)
    budget = StepBudget(None, PromptTime(), size, SchedulerStats())
    budget.start_epoch(replace(LIMITS, max_num_seqs=64, num_stages=num_stages))
    budget.note_preemption(8)
    assert budget.num_rows(num_free=56, num_running=8) == 0


def test_rows_without_blocks_are_given_up():
    size = StepSize(6, 64, adapts_rows=True, adapts_tokens=False)
    bench = Bench(step_size=size, max_num_seqs=6)
    bench.add(*[make_request(f"{n}", max_tokens=32) for n in range(6)])
    assert len(bench.ends()) == 6
    assert bench.scheduler.stats.preemptions > 0
    assert size.max_rows < 6


def test_chunks_are_as_long_as_chosen_beside_rows_that_decode():
    size = StepSize(4, 64, adapts_rows=False, adapts_tokens=True)
    size.max_tokens = 5
    bench = Bench(step_size=size, max_num_seqs=4, num_blocks=100)
    bench.add(make_request("a", max_tokens=20))
    assert [bench.step().rows[0].num_tokens for _ in range(3)] == [5, 3, 1]
    bench.add(make_request("b", max_tokens=2))
    assert [row.num_tokens for row in bench.step().rows] == [1, 5]
    assert bench.scheduler.stats.max_step_tokens == 7


def test_steps_with_drafts_teach_as_well():
    size = size_of()
    speculation = Speculation(max_drafts=3, policy=FixedDepth(), drafter=EchoDrafter(256))
    limits = {"num_blocks": 10_000, "max_num_seqs": 64, "max_model_len": 1000}
    bench = Bench(step_size=size, speculation=speculation, **limits)
    bench.add(*(make_request(f"{number}", max_tokens=900) for number in range(40)))
    for now in range(80):
        plan = bench.scheduler.plan(now)
        bench.scheduler.apply(bench.engine.submit(plan).result(None), now + 0.01)
    assert any(row.num_drafts for row in plan.rows)
    assert size.max_rows > 32


def test_rows_keep_a_time_between_tokens_of_which_accepted_drafts_give_several():
    def rows_at(num_per_step: int) -> int:
        size = size_of(adapts_tokens=False, target_s=0.030)
        for step in range(3000):
            rows = max(1, size.max_rows - step % 3 * 5)
            seconds = 0.010 + 0.0002 * rows * num_per_step
            size.observe(rows * num_per_step, 0, rows, seconds, seconds / num_per_step)
        return size.max_rows

    assert rows_at(4) > rows_at(1) > 16


def test_what_was_long_ago_is_forgotten():
    """The machine was slow once; of sizes that were not tried again since nothing is left."""
    size = size_of(adapts_tokens=False)
    run(size, 200, lambda num_tokens: 1.0 + 0.1 * num_tokens, load=20)
    run(size, 200, lambda num_tokens: 1.0 + 0.1 * num_tokens, load=3)
    run(size, 50_000, lambda num_tokens: 0.0001 * num_tokens, load=9)
    run(size, 200, lambda num_tokens: 0.0001 * num_tokens, load=16)
    assert size.max_rows == 16, "nothing is gained by more"
