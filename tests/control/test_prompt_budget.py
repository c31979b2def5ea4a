"""How many tokens of prompts go beside rows that decode, learned from what steps take."""

from collections import deque
from itertools import pairwise

import pytest

from charonia.control import NO_SHEDDING, FixedDepth, LoadShedding, Speculation
from charonia.control.estimators.pair_cost import AttentionTime
from charonia.control.estimators.prompt_time import num_pairs
from charonia.control.policies import DisplacementByPriority, by_priority, ranked
from charonia.control.scheduling.prompt_budget import (
    IDLE_FACTOR,
    LEAST_TOKENS,
    LOOK_EVERY,
    NO_ATTENTION,
    PromptBudget,
)
from support.echo import EchoDrafter
from support.stepping import Bench, make_request


class Machine:
    """Steps of 10 ms, and so much per token of a prompt; each as large as the budget says."""

    def __init__(
        self,
        budget: PromptBudget,
        per_token: float = 0.0001,
        num_decodes: int = 8,
        num_without: int = 20,
    ):
        self.budget = budget
        self.per_token = per_token
        self.num_decodes = num_decodes
        for _ in range(num_without):  # steps without prompts
            budget.observe(num_decodes, 0, 0.01)

    def run(self, num_steps: int) -> list[int]:
        sizes = []
        for _ in range(num_steps):
            size = self.budget.tokens(self.num_decodes)
            self.budget.observe(self.num_decodes, size, 0.01 + size * self.per_token)
            sizes.append(size)
        return sizes


def test_without_any_knowledge_prompts_get_the_least():
    assert PromptBudget(1.0).tokens(1) == LEAST_TOKENS
    assert PromptBudget().tokens(1) == LEAST_TOKENS


@pytest.mark.parametrize(("target_s", "least", "most"), [(0.03, 140, 200), (0.1, 700, 900)])
def test_steps_come_near_the_target_and_stay_below(target_s, least, most):
    sizes = Machine(PromptBudget(target_s)).run(40)
    assert least <= sizes[-1] <= most
    assert 0.01 + max(sizes) * 0.0001 <= target_s
    assert all(after <= 2 * before for before, after in pairwise(sizes))


def test_without_a_target_it_is_a_multiple_of_steps_without_prompts():
    size = Machine(PromptBudget()).run(40)[-1]
    assert 0.8 * IDLE_FACTOR * 0.01 < 0.01 + size * 0.0001 < IDLE_FACTOR * 0.01


@pytest.mark.parametrize("target_s", [None, 0.02])
def test_where_no_step_is_without_prompts_it_is_found_as_well(target_s):
    machine = Machine(PromptBudget(target_s), num_without=0)
    assert 60 <= machine.run(40)[-1] <= 80
    sizes = Machine(PromptBudget(), per_token=0.1, num_without=0).run(40)
    assert max(sizes[20:]) < 10, "what is dear is computed in few tokens"


def test_more_rows_than_ever_decoded_without_prompts_do_not_leave_the_least():
    """Their steps take longer than the target that fewer rows have taught."""
    machine = Machine(PromptBudget(), num_decodes=1)
    machine.run(10)
    budget, sizes = machine.budget, []
    for _ in range(60):
        sizes.append(budget.tokens(64))
        budget.observe(64, sizes[-1], 0.03 + sizes[-1] * 0.0001)
    assert LEAST_TOKENS in sizes
    assert 150 <= sizes[-1] <= 250


def test_a_short_prompt_does_not_shorten_those_after_it():
    machine = Machine(PromptBudget(0.05))
    before = machine.run(40)[-1]
    machine.budget.observe(8, 3, 0.01 + 3 * 0.0001)
    assert machine.run(1)[0] == pytest.approx(before, rel=0.01)


def test_short_prompts_do_not_make_long_ones_longer_than_twice_what_was_tried():
    machine = Machine(PromptBudget(0.05))
    for _ in range(LOOK_EVERY - 1):
        machine.budget.observe(8, 10, 0.01 + 10 * 0.0001)
    assert machine.run(1) == [20]


def test_it_follows_prompts_that_become_dearer():
    machine = Machine(PromptBudget(0.05))
    before = machine.run(40)[-1]
    for step in range(100):
        machine.per_token *= 1.02
        size = machine.run(1)[0]
        assert 0.01 + size * machine.per_token < 0.05 or step < 3
    assert max(machine.run(2)) < before / 4


@pytest.mark.parametrize("factor", [1.3, 1.65, 2.5])
def test_it_follows_rows_that_become_dearer_while_prompts_wait_all_the_time(factor):
    budget = PromptBudget()
    Machine(budget).run(100)
    slower = Machine(budget, per_token=0.0001 * factor, num_without=0)

    def run(num_steps: int) -> list[int]:
        sizes = []
        for _ in range(num_steps):
            size = budget.tokens(8)
            budget.observe(8, size, factor * 0.01 + size * slower.per_token)
            sizes.append(size)
        return sizes

    run(2000)
    sizes = run(LOOK_EVERY + 1)
    assert LEAST_TOKENS in sizes, "now and then it looks what rows take"
    assert 60 <= max(sizes) <= 80, "as many as at first: all takes longer alike"


def test_what_cannot_be_kept_leaves_the_least():
    assert Machine(PromptBudget(0.001)).run(10)[-1] == LEAST_TOKENS
    assert Machine(PromptBudget(0.03), per_token=0.1).run(10)[-1] == LEAST_TOKENS


def test_tokens_that_seem_to_cost_nothing_are_no_error():
    machine = Machine(PromptBudget(0.03), per_token=-0.0001)
    assert machine.run(5)[-1] > LEAST_TOKENS


def test_steps_without_decodes_or_time_say_nothing():
    budget = PromptBudget(0.03)
    budget.observe(0, 500, 1.0)
    budget.observe(5, 500, 0.0)
    assert budget.tokens(5) == LEAST_TOKENS


# ---------------------------------------------------------------------- in the scheduler


class Fixed(PromptBudget):
    def tokens(
        self, num_decoded: int, num_before: int = 0, attention: AttentionTime = NO_ATTENTION
    ) -> int:
        self.asked = num_decoded
        return 3


def bench_with(budget: PromptBudget, **limits) -> Bench:
    bench = Bench(prompt_budget=budget, max_num_seqs=4, num_blocks=100, **limits)
    bench.add(make_request("a", max_tokens=30))
    return bench


def chunks(bench: Bench) -> list[int]:
    """Tokens of all rows of a step."""
    return [row.num_tokens for row in bench.step().rows]


def test_prompts_are_cut_only_beside_rows_that_decode():
    budget = Fixed()
    bench = bench_with(budget)
    assert chunks(bench) == [8]
    bench.add(make_request("b", max_tokens=2), make_request("c", max_tokens=2))
    assert [chunks(bench) for _ in range(7)] == [
        [1, 3],
        [1, 3],
        [1, 2, 1],
        [1, 1, 3],
        [1, 3],
        [1, 1],
        [1, 1],
    ]
    assert budget.asked == 2


def test_a_prompt_is_not_cut_for_rows_that_are_there_no_more():
    bench = bench_with(Fixed())
    bench.ends()
    bench.add(make_request("b", max_tokens=2))
    assert chunks(bench) == [8]


def test_load_shedding_cuts_prompts_beside_rows_that_decode_and_no_others():
    bench = Bench(max_num_seqs=4, num_blocks=100, max_num_batched_tokens=16)
    bench.scheduler.shedding = LoadShedding(prompt_share=0.25)
    bench.add(make_request("a", max_tokens=30))
    assert chunks(bench) == [8]
    bench.add(make_request("b", max_tokens=2))
    assert [chunks(bench) for _ in range(3)] == [[1, 4], [1, 4], [1, 1]]
    bench.scheduler.shedding = NO_SHEDDING
    bench.add(make_request("c", max_tokens=2))
    assert chunks(bench) == [1, 8]


def test_prompts_that_may_not_be_cut_are_not():
    bench = Bench(max_num_seqs=4, num_blocks=100, enable_chunked_prefill=False)
    bench.scheduler.shedding = LoadShedding(prompt_share=0.01)
    bench.add(make_request("a", max_tokens=30))
    bench.step()
    bench.add(make_request("b", max_tokens=2))
    assert chunks(bench) == [1, 8]


def test_an_urgent_request_is_computed_first_and_alone():
    rank = by_priority()
    bench = Bench(
        ranked(rank, DisplacementByPriority(rank)),
        prompt_budget=Fixed(),
        max_num_seqs=4,
        num_blocks=100,
    )
    bench.add(make_request("a", max_tokens=30))
    bench.step()
    bench.add(make_request("b"))
    assert chunks(bench) == [1, 3]
    bench.add(make_request("u", -1), make_request("v", -1))
    plan = bench.step()
    assert [join.token_ids[0] for join in plan.joins] == [ord("u")]
    assert [row.num_tokens for row in plan.rows] == [3, 1]


class Noting(PromptBudget):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, int, float]] = []

    def observe(self, num_decoded, num_prompt_tokens, seconds):
        self.noted.append((num_decoded, num_prompt_tokens, round(seconds, 6)))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_scheduler_tells_what_steps_took(num_stages):
    budget = Noting()
    bench = bench_with(budget, num_stages=num_stages)
    scheduler, engine = bench.scheduler, bench.engine
    for now in (10.0, 20.0, 30.0):
        plan = scheduler.plan(now)
        scheduler.apply(engine.submit(plan).result(None), now + 0.5)
    seconds = 0.5 if num_stages == 1 else 0.001
    assert budget.noted == [(0, 8, seconds), (1, 0, seconds), (1, 0, seconds)]


def drafting(budget: PromptBudget) -> Bench:
    speculation = Speculation(max_drafts=3, policy=FixedDepth(), drafter=EchoDrafter(256))
    bench = Bench(
        speculation=speculation,
        prompt_budget=budget,
        max_num_seqs=4,
        num_blocks=400,
        max_model_len=1024,
        max_num_batched_tokens=512,
    )
    bench.add(make_request("a", max_tokens=900))
    return bench


def test_steps_with_drafts_teach_what_rows_take_with_them():
    budget = Noting()
    bench = drafting(budget)
    num_drafts = [bench.step().rows[0].num_drafts for _ in range(20)]
    assert set(num_drafts) >= {0, 3}
    assert [noted[0] for noted in budget.noted] == [0, *(1 + each for each in num_drafts[1:])]


def test_a_guess_behind_a_prompt_is_not_taken_for_a_row_that_decodes():
    budget = Noting()
    bench = drafting(budget)
    bench.ends()
    budget.noted.clear()
    bench.add(make_request("b", max_tokens=2, expected_ids=deque([1, 2, 3])))
    plan = bench.step()
    assert plan.rows[0].num_drafts == 1
    assert budget.noted[0][:2] == (0, 8)


def test_drafts_of_rows_that_have_gone_are_not_counted():
    budget = Fixed()
    bench = drafting(budget)
    scheduler = bench.scheduler
    bench.add(*(make_request(key, max_tokens=900) for key in "bc"))
    while sum(row.num_drafts for row in bench.step().rows) < 9:
        pass
    for key in "bc":
        scheduler.finish(key)
    bench.add(make_request("d"))
    bench.step()
    assert budget.asked == 4


def test_beside_rows_that_draft_in_every_step_a_prompt_gets_more_than_the_least():
    bench = drafting(PromptBudget(0.03))
    scheduler, engine = bench.scheduler, bench.engine
    now, num_steps = 0.0, 0

    def step() -> None:
        nonlocal now
        plan = scheduler.plan(now)
        now += 0.01 + 0.0001 * sum(row.num_tokens + row.num_drafts for row in plan.rows)
        scheduler.apply(engine.submit(plan).result(None), now)

    for _ in range(20):
        step()
    bench.add(prompt := make_request("b", token_ids=[1] * 400))
    while not prompt.num_generated:
        step()
        num_steps += 1
    assert num_steps <= 12


PAIR_S = 2e-8
PAIRS = AttentionTime(PAIR_S)


def test_what_is_far_into_a_prompt_gets_fewer_tokens_at_once():
    """Each of its tokens looks at 20,000 others, and the budget has known beginnings alone."""
    machine = Machine(PromptBudget(0.03))
    beginning = machine.run(40)[-1]
    end = machine.budget.tokens(8, 20_000, PAIRS)
    seconds = 0.01 + end * (0.0001 + (20_000 + end / 2) * PAIR_S)
    assert 0.8 * 0.03 <= seconds <= 0.03
    assert end < beginning / 3
    assert machine.budget.tokens(8, 0, PAIRS) == pytest.approx(beginning, rel=0.05)


def test_keys_that_a_chunk_reads_leave_its_tokens_less_time():
    machine = Machine(PromptBudget(0.03))
    machine.run(40)
    reading = AttentionTime(PAIR_S, 30 * PAIR_S)
    size = machine.budget.tokens(8, 20_000, reading)
    seconds = 0.01 + size * 0.0001 + reading.of(num_pairs(size, 20_000), 20_000 + size)
    assert 0.75 * 0.03 <= seconds <= 0.03
    assert size < machine.budget.tokens(8, 20_000, PAIRS)
    assert machine.budget.tokens(8, 200_000, reading) == LEAST_TOKENS


def test_the_next_chunk_of_a_prompt_is_as_long_as_those_before_it_allow():
    asked: list[tuple[int, AttentionTime]] = []

    class Asked(PromptBudget):
        def tokens(
            self, num_decoded: int, num_before: int = 0, attention: AttentionTime = NO_ATTENTION
        ) -> int:
            asked.append((num_before, attention))
            return 8

    bench = Bench(prompt_budget=Asked(0.03))
    bench.add(make_request("a", max_tokens=16))
    bench.step()
    bench.scheduler._prompt_time._pairs.time = PAIRS
    bench.add(make_request("b", token_ids=[5] * 20, max_tokens=1))
    bench.ends()
    befores = [num_before for num_before, _ in asked]
    assert befores[:4] == [0, 8, 16, 0], "and none of a prompt that is through"
    assert {attention for _, attention in asked} == {PAIRS}
