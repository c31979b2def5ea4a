"""Depths in simulated worlds: whatever a step costs, speculation is worth it or is off.

A world has a true cost of steps, with noise; a request has a true acceptance. Goodput is what
rows committed per simulated second, compared with the best fixed depth's expectation.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

import support.requests
from charonia.control import Request
from charonia.control.drafts.depth import AdaptiveDepth, Candidate, DepthPolicy, FixedDepth, _Choice
from charonia.control.estimators.step_cost import StepShape

DEEPEST = 8
VERIFY: dict[str, Callable[[int], float]] = {
    "flat": lambda tokens: 1.0,
    "linear": lambda tokens: 0.02 + 0.1 * tokens,
    "affine": lambda tokens: 1.0 + 0.1 * tokens,
    "knee at 6": lambda tokens: max(1.0, tokens / 6),
    "knee at 96": lambda tokens: max(1.0, tokens / 96),
    "stairs": lambda tokens: 1.0 + 0.25 * (tokens // 8),
}


def make_request(key: str) -> Request:
    return support.requests.make_request([1], key)


def choose(policy: DepthPolicy, candidates: list[Candidate], num_tokens: int) -> list[int]:
    depths = policy.choose(len(candidates), num_tokens, lambda: candidates)
    return depths or [0] * len(candidates)


def rooms(requests: list[Request], most: list[int]) -> list[Candidate]:
    return [Candidate(request, room) for request, room in zip(requests, most, strict=True)]


@dataclass
class World:
    """A machine, the rows that run on it, and what they have achieved.

    Attributes:
        acceptances: of the rows' drafts. draft: seconds of a draft model's pass, 0 without one.
        slowness: of everything. num_prefilled: tokens of others in each step.
        life: tokens after which a request gives its row to a new one. prompt: tokens that a
            draft model has to catch up on then. catch_up: seconds of one, in units of `draft`.
    """

    verify: Callable[[int], float]
    acceptances: list[float]
    draft: float = 0.0
    noise: float = 0.05
    outliers: float = 0.0
    slowness: float = 1.0
    num_prefilled: int = 0
    life: int = 256
    prompt: int = 1
    catch_up: float = 0.002
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def __post_init__(self) -> None:
        self.requests = [make_request(str(row)) for row in range(len(self.acceptances))]
        self.ages = [self.rng.randrange(self.life) for _ in self.requests]
        self.lags = [self.prompt] * len(self.requests)
        self.num_steps_with_drafts = 0

    def shape(self, depths: list[int], lags: list[int] | None = None) -> StepShape:
        num_tokens = self.num_prefilled + len(depths) + sum(depths)
        if not self.draft:
            return StepShape(num_tokens)
        lags = lags or [1] * len(depths)
        num_draft_tokens = sum(d - 1 + lag for d, lag in zip(depths, lags, strict=True) if d)
        return StepShape(num_tokens, max(depths), num_draft_tokens)

    def seconds(self, shape: StepShape) -> tuple[float, float]:
        per_row = self.catch_up * self.draft
        draft = shape.num_passes * self.draft + shape.num_draft_tokens * per_row
        return (self.verify(shape.num_tokens) + draft) * self.slowness, draft * self.slowness

    def expected(self, depth: int) -> float:
        """Goodput of a fixed depth."""
        committed = sum(a**j for a in self.acceptances for j in range(depth + 1))
        return committed / self.seconds(self.shape([depth] * len(self.acceptances)))[0]

    def best_fixed(self) -> float:
        return max(self.expected(depth) for depth in range(DEEPEST + 1))

    def run(self, policy: DepthPolicy, num_steps: int) -> float:
        """Run and return the goodput; noise costs nothing, outliers and policy do."""
        committed, elapsed = 0, 0.0
        for _ in range(num_steps):
            candidates = [
                Candidate(request, DEEPEST, lag if self.draft else 0, self.life - age)
                for request, lag, age in zip(self.requests, self.lags, self.ages, strict=True)
            ]
            depths = choose(policy, candidates, len(candidates) + self.num_prefilled)
            shape = self.shape(depths, self.lags)
            self.num_steps_with_drafts += any(depths)
            for row, depth in enumerate(depths):
                committed += self.run_row(policy, row, depth)
            seconds, draft_seconds = self.seconds(shape)
            elapsed += seconds
            factor = 6.0 if self.rng.random() < self.outliers else self.rng.gauss(1.0, self.noise)
            policy.observe_step(shape, seconds * factor, draft_seconds * factor)
        return committed / elapsed

    def run_row(self, policy: DepthPolicy, row: int, depth: int) -> int:
        num_accepted = 0
        while num_accepted < depth and self.rng.random() < self.acceptances[row]:
            num_accepted += 1
        if depth:
            policy.observe_drafts(self.requests[row], depth, num_accepted)
        self.ages[row] += num_accepted + 1
        self.lags[row] = 1 + (num_accepted == depth) if depth else self.lags[row] + 1
        if self.ages[row] >= self.life:
            policy.forget(self.requests[row])
            self.requests[row] = make_request("next")
            self.ages[row], self.lags[row] = 0, self.prompt
        return num_accepted + 1


def settled(world: World, num_steps: int = 300) -> float:
    """Goodput over the best fixed depth's, after a while; the mean of three courses of events."""
    ratios = []
    for seed in range(3):
        trial = replace(world, rng=random.Random(seed))
        policy = AdaptiveDepth(has_draft_model=trial.draft > 0)
        trial.run(policy, 300)
        ratios.append(trial.run(policy, num_steps) / trial.best_fixed())
    assert min(ratios) > 0.85
    return sum(ratios) / len(ratios)


def test_a_fixed_depth_uses_all_room_and_learns_nothing():
    policy = FixedDepth()
    request = make_request("a")
    policy.observe_drafts(request, 4, 0)
    policy.observe_step(StepShape(5), 100.0, 0.0)
    policy.forget(request)
    assert choose(policy, rooms([request, make_request("b")], [4, 0]), 2) == [4, 0]


@pytest.mark.parametrize("curve", VERIFY)
@pytest.mark.parametrize(
    ("num_rows", "acceptance", "draft"),
    [(1, 0.0, 0.25), (1, 0.6, 0.05), (4, 0.8, 0.0), (16, 0.4, 0.25), (64, 0.9, 0.05)],
)
def test_no_fixed_depth_is_much_better(curve, num_rows, acceptance, draft):
    verify = VERIFY[curve]
    world = World(verify, [acceptance] * num_rows, draft * verify(1))
    assert settled(world) > 0.94


@pytest.mark.parametrize("draft", [0.0, 0.05])
def test_mixed_acceptance_beats_every_fixed_depth(draft):
    world = World(VERIFY["knee at 96"], [0.0, 0.3, 0.6, 0.9] * 12, draft, life=1000)
    assert settled(world) > 1.02


def test_better_drafters_get_deeper():
    world = World(VERIFY["affine"], [0.2, 0.9] * 8, life=10**9)
    policy = AdaptiveDepth(has_draft_model=False)
    world.run(policy, 300)
    depths = choose(policy, rooms(world.requests, [DEEPEST] * 16), 16)
    assert sum(depths[0::2]) + 8 < sum(depths[1::2])


def test_what_may_be_chance_does_not_tell_requests_apart_and_what_is_clear_does():
    policy = AdaptiveDepth(has_draft_model=False)
    lucky, unlucky, bad = requests = [make_request(key) for key in "abc"]
    for num_tokens in (3, 6, 9, 12, 27):
        for _ in range(6):
            policy.observe_step(StepShape(num_tokens), 1.0 + 0.04 * num_tokens, 0.0)
    for _ in range(6):
        policy.observe_drafts(lucky, 4, 4)
        policy.observe_drafts(unlucky, 2, 1)
    first, second, third = choose(policy, rooms(requests, [DEEPEST] * 3), 3)
    assert abs(first - second) <= 1  # a draft that is worth it for some only
    assert first > 2
    for _ in range(20):
        policy.observe_drafts(bad, 1, 0)
        policy.observe_drafts(lucky, 4, 3)
        policy.observe_drafts(unlucky, 4, 3)
    choose(policy, rooms(requests[:1], [DEEPEST]), 1)
    first, second, third = choose(policy, rooms(requests, [DEEPEST] * 3), 3)
    assert third <= 1 < min(first, second)


def test_equal_rows_share_what_is_free():
    policy = AdaptiveDepth(has_draft_model=False)
    requests = [make_request(key) for key in "abcd"]
    for _ in range(5):
        for request in requests:
            policy.observe_drafts(request, 10, 7)
        for num_tokens in (4, 5, 6, 7, 8):
            policy.observe_step(StepShape(num_tokens), max(1.0, num_tokens / 6), 0.0)
    assert choose(policy, rooms(requests, [1] * 4), 4) == [1, 1, 0, 0]


def test_depth_stays_within_the_room():
    rng = random.Random(2)
    policy = AdaptiveDepth(has_draft_model=True)
    world = World(VERIFY["flat"], [0.8] * 8, 0.05)
    world.run(policy, 50)
    for _ in range(200):
        most = [rng.randint(0, 5) for _ in range(8)]
        depths = choose(policy, rooms(world.requests, most), 8 + rng.randint(0, 100))
        assert all(0 <= depth <= room for depth, room in zip(depths, most, strict=True))
    assert choose(policy, [], 5) == []


def test_at_the_start_one_token_is_drafted():
    policy = AdaptiveDepth(has_draft_model=True)
    assert choose(policy, rooms([make_request("a"), make_request("b")], [3, 0]), 40) == [1, 0]


@pytest.mark.parametrize("draft", [0.0, 0.25])
@pytest.mark.parametrize("num_rows", [1, 16])
def test_drafts_that_are_always_wrong_cost_little_from_the_start(draft, num_rows):
    world = World(lambda tokens: 0.9 + 0.1 * tokens, [0.0] * num_rows, draft)
    goodput = world.run(AdaptiveDepth(has_draft_model=draft > 0), 3000)
    assert goodput > 0.97 * world.best_fixed()
    assert world.num_steps_with_drafts > 10  # it keeps looking


@pytest.mark.parametrize(("draft", "num_rows"), [(0.0, 1), (0.25, 1), (0.25, 16)])
def test_drafts_that_become_right_are_noticed(draft, num_rows):
    world = World(lambda tokens: 0.9 + 0.1 * tokens, [0.0] * num_rows, draft)
    policy = AdaptiveDepth(has_draft_model=draft > 0)
    world.run(policy, 2000)
    world.acceptances = [0.8] * num_rows
    world.run(policy, 200)
    assert world.run(policy, 300) > 0.9 * world.best_fixed()


def test_drafts_that_become_wrong_are_noticed():
    world = World(VERIFY["affine"], [0.8], 0.25)
    policy = AdaptiveDepth(has_draft_model=True)
    world.run(policy, 1000)
    world.acceptances = [0.0]
    world.run(policy, 100)
    assert world.run(policy, 500) > 0.97 * world.best_fixed()


def test_one_request_that_recovers_among_others_is_noticed():
    world = World(VERIFY["affine"], [0.8] * 3 + [0.0], 0.05, life=10**9)
    policy = AdaptiveDepth(has_draft_model=True)
    world.run(policy, 500)
    world.acceptances = [0.8] * 4
    world.run(policy, 300)
    assert world.run(policy, 300) > 0.95 * world.best_fixed()


def test_a_machine_that_slows_down_changes_nothing():
    world = World(VERIFY["knee at 6"], [0.7] * 2, 0.05)
    policy = AdaptiveDepth(has_draft_model=True)
    world.run(policy, 500)
    for world.slowness in (2.0, 1.0, 2.0):
        assert world.run(policy, 250) > 0.93 * world.best_fixed()


def test_a_machine_that_becomes_another_one_is_noticed():
    world = World(VERIFY["linear"], [0.8] * 4)
    policy = AdaptiveDepth(has_draft_model=False)
    for world.verify in (VERIFY["flat"], VERIFY["linear"], VERIFY["flat"]):
        world.run(policy, 1200)
        assert world.run(policy, 500) > 0.95 * world.best_fixed()


def test_slow_steps_now_and_then_do_not_turn_speculation_off():
    world = World(VERIFY["affine"], [0.8], outliers=0.02)
    assert settled(world, 2000) > 0.96


def test_a_long_prefill_does_not_make_drafts_look_cheap():
    world = World(VERIFY["linear"], [0.5] * 16)
    policy = AdaptiveDepth(has_draft_model=False)
    world.run(policy, 300)
    world.num_prefilled = 512
    world.run(policy, 300)
    world.num_steps_with_drafts = 0
    goodput = world.run(policy, 200)
    assert goodput > 0.9 * world.expected(0)


def test_costs_known_before_the_first_draft_do_not_turn_speculation_off():
    policy = AdaptiveDepth(has_draft_model=False)
    request = make_request("a")
    for num_tokens in (1, 1, 1, 1, 1, 1, 5, 5):
        policy.observe_step(StepShape(num_tokens), 1.0, 0.0)
    assert choose(policy, rooms([request], [4]), 1) == [4]


def test_an_ngram_drafter_that_finds_nothing_is_asked_again():
    policy = AdaptiveDepth(has_draft_model=False)
    request = make_request("a")
    choose(policy, rooms([request], [4]), 1)
    for _ in range(100):
        policy.observe_drafts(request, 1, 0)
    for num_tokens in (1, 1, 2, 2, 5, 5):
        policy.observe_step(StepShape(num_tokens), 1.0 + num_tokens, 0.0)
    num_asked = 0
    for _ in range(300):
        num_asked += choose(policy, rooms([request], [4]), 1) != [0]
        # It found nothing, which costs nothing.
        policy.observe_step(StepShape(1), 2.0, 0.0)
    assert num_asked > 200


@pytest.mark.parametrize(
    ("num_rows", "life", "catch_up"), [(4, 20, 0.02), (16, 12, 0.02), (64, 100, 0.02)]
)
def test_long_prompts_of_short_answers_are_not_worth_catching_up_on(num_rows, life, catch_up):
    world = World(VERIFY["affine"], [0.8] * num_rows, 0.1, life=life, prompt=1500)
    world.catch_up = catch_up
    policy = AdaptiveDepth(has_draft_model=True)
    world.run(policy, 600)
    assert world.run(policy, 600) > 0.92 * world.expected(0)


def test_long_prompts_of_long_answers_are():
    world = World(VERIFY["affine"], [0.8] * 4, 0.1, life=1000, prompt=1500)
    policy = AdaptiveDepth(has_draft_model=True)
    world.run(policy, 300)
    assert world.run(policy, 600) > 0.9 * world.best_fixed()


@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_a_draft_model_that_lags_far_behind_is_asked_again(num_rows):
    world = World(VERIFY["affine"], [0.0] * num_rows, 0.1, life=2000, prompt=500)
    policy = AdaptiveDepth(has_draft_model=True)
    world.run(policy, 1000)
    assert world.run(policy, 1000) > 0.97 * world.expected(0)
    world.acceptances = [0.9] * num_rows
    world.run(policy, 400)
    assert world.run(policy, 300) > 0.9 * world.best_fixed()


def test_a_probe_whose_step_failed_is_made_again_and_one_that_was_wrong_waits():
    policy = AdaptiveDepth(has_draft_model=False)
    request = make_request("a")
    for _ in range(100):
        policy.observe_drafts(request, 1, 0)
    for num_tokens in (1, 1, 1, 1, 1, 1, 2, 2):
        policy.observe_step(StepShape(num_tokens), 1.0 + num_tokens, 0.0)

    def steps_until_a_probe() -> int:
        for count in range(1000):
            if choose(policy, rooms([request], [4]), 1) != [0]:
                return count
            policy.observe_step(StepShape(1), 2.0, 0.0)
        raise AssertionError

    steps_until_a_probe()
    assert steps_until_a_probe() == 0
    policy.observe_step(StepShape(2), 3.0, 0.0)
    policy.observe_drafts(request, 1, 0)
    assert 80 < steps_until_a_probe() < 120  # at half a step more, for half a per cent
    policy.observe_step(StepShape(2), 3.0, 0.0)
    policy.observe_drafts(request, 1, 1)
    assert steps_until_a_probe() == 0


def test_a_probe_is_charged_to_its_own_step_whatever_was_chosen_meanwhile():
    """Two steps in flight, of a row each: every choice is made before the step before is seen."""
    policy = AdaptiveDepth(has_draft_model=False)
    requests = [make_request(key) for key in "ab"]
    for _ in range(100):
        policy.observe_drafts(requests[0], 1, 0)
    for num_tokens in (1, 1, 2, 2, 600, 600):
        policy.observe_step(StepShape(num_tokens), 1.0 + num_tokens, 0.0)
    num_probes = 0
    depths = [0, 0]
    for step in range(1000):
        row = step % 2
        if step > 1:
            policy.observe_step(StepShape(1 + depths[row]), 2.0 + depths[row], 0.0)
            if depths[row]:
                policy.observe_drafts(requests[row], 1, 0)
        (depths[row],) = choose(policy, rooms([requests[row]], [4]), 1)
        num_probes += depths[row]
    assert 5 < num_probes < 40


def test_while_drafts_do_not_pay_the_rows_are_looked_at_now_and_then():
    policy = AdaptiveDepth(has_draft_model=False)
    requests = [make_request(str(row)) for row in range(16)]
    for _ in range(200):
        policy.observe_drafts(requests[0], 1, 0)
    for num_tokens in (1, 1, 16, 16, 17, 17, 32, 32):
        policy.observe_step(StepShape(num_tokens), 1.0 * num_tokens, 0.0)
    num_asked = 0

    def step(num_rows: int, room: int = 4) -> list[int]:
        def candidates() -> list[Candidate]:
            nonlocal num_asked
            num_asked += 1
            return rooms(requests[:num_rows], [room] * num_rows)

        depths = policy.choose(num_rows, num_rows, candidates)
        num_tokens = num_rows + sum(depths)
        policy.observe_step(StepShape(num_tokens), float(num_tokens), 0.0)
        for request, depth in zip(requests, depths, strict=False):
            if depth:
                policy.observe_drafts(request, depth, 0)
        return depths

    for _ in range(90):
        step(16)
    assert 3 <= num_asked < 25
    before = num_asked
    step(8)
    assert num_asked == before + 1  # fewer rows: at once
    step(1, room=0)
    step(1, room=0)
    assert num_asked == before + 3  # without room nothing was chosen


class Evaluations(AdaptiveDepth):
    """Counts how often depths were not just kept."""

    def __init__(self, has_draft_model):
        super().__init__(has_draft_model)
        self.count = 0

    def _choose_anew(self, candidates, num_tokens):
        self.count += 1
        super()._choose_anew(candidates, num_tokens)


def test_a_choice_is_kept_until_the_step_is_another_one():
    world = World(VERIFY["knee at 96"], [0.9] * 4, 0.02, life=10**9)
    policy = Evaluations(has_draft_model=True)
    world.run(policy, 300)
    before = policy.count
    world.run(policy, 96)
    assert policy.count - before == pytest.approx(6, abs=1)

    def evaluated(candidates, num_tokens):
        before = policy.count
        assert any(choose(policy, candidates, num_tokens))
        return policy.count > before

    rows = [Candidate(request, DEEPEST, 1, 1000) for request in world.requests]
    while not evaluated(rows, 4):
        pass
    assert not evaluated(rows, 4)
    assert evaluated(rows, 40)
    assert evaluated(rows, 4)
    assert not evaluated(rows, 4)
    assert evaluated(rows[:3], 3)


def test_a_row_that_lags_too_far_for_what_it_has_left_drafts_nothing_while_others_do():
    world = World(VERIFY["affine"], [0.8] * 4, 0.02, life=10**9)
    policy = AdaptiveDepth(has_draft_model=True)
    world.run(policy, 300)
    rows = [Candidate(request, DEEPEST, 1, 1000) for request in world.requests]
    assert all(choose(policy, rows, 4))
    depths = choose(policy, [*rows[:3], rows[3]._replace(lag=5000, num_left=3)], 4)
    assert all(depths[:3])
    assert depths[3] == 0
    assert all(choose(policy, [*rows[:3], rows[3]._replace(lag=50)], 4))


def test_steps_at_rest_count_as_chosen_once_they_are_planned():
    policy = AdaptiveDepth(has_draft_model=False)
    policy._choice = _Choice(0, num_rows=8, num_tokens=8, num_left=2)
    policy._steps_to_probe = 9.0
    for _ in range(3):
        assert policy.rests(8, 8)
    assert not policy.rests(16, 16), "nothing was chosen for a step like that"
    for _ in range(2):
        assert policy.rests(8, 8)
        policy.note_rest()
    assert not policy.rests(8, 8), "it is to be chosen anew"
    assert policy._steps_to_probe == 7.0


def test_nobody_rests_where_drafts_are_made_or_a_probe_is_due():
    policy = AdaptiveDepth(has_draft_model=False)
    policy._choice = _Choice(1, num_rows=8, num_tokens=8, num_left=5)
    assert not policy.rests(8, 8)
    policy._choice = _Choice(0, num_rows=8, num_tokens=8, num_left=5)
    policy._steps_to_probe = 1.0
    assert not policy.rests(8, 8)
