"""How many tokens each request drafts in a step.

Owns the choice of depths and what is known of each request's acceptance. Must not know how drafts
are made, nor the token budget: what room a request has is an argument.

The theory. A draft is accepted with probability a, as long as all before it were, so a row of
depth k commits 1 + a + a^2 + ... + a^k tokens on average, and a row's j-th draft is worth a^j
tokens. A step is as good as its goodput, the tokens it commits per second (Liu et al. 2024,
"Optimizing Speculative Decoding for Serving Large Language Models Using Goodput",
arXiv 2406.14066, section 4). For a given number of drafts the best are those worth most:
sorted by worth, every prefix of the list is a candidate, from no drafts at all to all that there
is room for, and the prefix with the highest predicted goodput wins. Passes of a draft model cost
something however few rows take part, so there the same is done for several limits of depth.

A choice is kept for a few steps while rows and tokens stay about the same, as what a level of
acceptance deserves: choosing takes as long as a small model's layer.

What other rows prefill in the step is spent anyway, and must not make drafts look cheap: a step
is charged what its drafts add to it, on top of what these rows alone would take without drafts.

Nothing is configured; all of it is learned while serving:

- seconds by `StepCost`, which is optimistic about sizes that were not measured lately. Where a
  depth might be better, it is so tried;
- acceptance per request, from its last drafts; a request that has made few is taken to be like
  the others were. At the start, drafts are taken to be good;
- a request at depth 0 tells nothing more. One per cent of the time goes to looking again: when
  the saved time suffices, all requests at depth 0 draft one token each. A probe is charged what
  it added to the step, and gets back what its accepted tokens were worth. So drafts that are
  always wrong cost one per cent, and where they have become right, probe follows probe.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from charonia.control.goodput import (
    LEVELS,
    Choice,
    Drafts,
    best_prefix,
    by_worth,
    depths_within,
    give_out,
    least_worth,
    limits_of_depth,
    shorten,
)
from charonia.control.request import Request
from charonia.control.step_cost import StepCost, StepShape

_REQUEST_WINDOW = 60  # drafts that a request's acceptance is estimated from
_GLOBAL_WINDOW = 200  # drafts that all requests' is estimated from
_PRIOR_TRIALS = 8.0  # drafts of its own that weigh as much as what others' say
_START_RATE, _START_TRIALS = 0.8, 2.0  # before the first draft
_MARGIN = 1.02  # by which drafts must win: the best of many noisy predictions is flattered
_SHORT_LAG = 16  # tokens that a draft model catches up on in about the time of one
_KEEP = 8  # steps that a choice is kept for while rows and tokens stay about the same
_REST = 24  # the same of the choice of no drafts, about which only probes tell anything new
_OBSERVED_AT_REST = 4  # of so many steps one is looked at
_PROBE_SHARE = 0.01  # of the time
_MAX_PROBES = 2.0  # in a row that can be saved for


class Candidate(NamedTuple):
    """A row that could verify drafts in this step.

    Attributes:
        most: drafts that it has room for, >= 0.
        lag: tokens that the draft model computes before it guesses the first one; at least 1, and
            0 where there is no draft model.
        num_left: tokens that it can still commit, in all steps to come.
    """

    request: Request
    most: int
    lag: int = 0
    num_left: int = 1


Candidates = Callable[[], Sequence[Candidate]]


class DepthPolicy(Protocol):
    """Chooses depths, and is told what came of them."""

    def choose(self, num_rows: int, num_tokens: int, candidates: Candidates) -> list[int]:
        """Depth for each candidate, from 0 to its `most`; [] where nobody is to draft.

        Args:
            num_rows: candidates that there are; they themselves are given when asked for, because
                most of the work of a step without drafts would be to make them.
            num_tokens: that the target computes in this step anyway, these rows' and all others',
                prefill included; at least `num_rows`.
        """

    def observe_drafts(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Learn what verification made of a request's drafts, 1 <= num_drafted.

        They may be fewer than the depth chosen: an n-gram drafter may find less.
        """

    def observe_step(
        self, shape: StepShape, seconds: float, draft_seconds: float, requests: Iterable[Request]
    ) -> None:
        """Learn what a step took. Steps are observed in the order in which they were chosen for.

        Args:
            seconds: its whole cycle: engine, transit, planning; wall time. Where steps overlap,
                what it took in the engine.
            draft_seconds: of these, in the draft model's passes; 0 for other drafters.
            requests: all of the step.
        """

    def lose_steps(self) -> None:
        """The steps in flight failed; nothing will be observed of them."""

    def forget(self, request: Request) -> None:
        """A request is gone; nothing is observed of it any more."""


class FixedDepth:
    """As deep as there is room for."""

    def choose(self, num_rows: int, num_tokens: int, candidates: Candidates) -> list[int]:
        """See `DepthPolicy`."""
        return [candidate.most for candidate in candidates()]

    def observe_drafts(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """See `DepthPolicy`; nothing depends on it."""

    def observe_step(
        self, shape: StepShape, seconds: float, draft_seconds: float, requests: Iterable[Request]
    ) -> None:
        """See `DepthPolicy`; nothing depends on it."""

    def lose_steps(self) -> None:
        """See `DepthPolicy`; nothing is kept."""

    def forget(self, request: Request) -> None:
        """See `DepthPolicy`; nothing is kept."""


@dataclass(slots=True)
class _Acceptance:
    """Drafts that were accepted, of those that were decided, older ones weighing less.

    Behind the first draft that is rejected nothing is decided, so `trials` counts the accepted
    ones and that one: the estimate of greatest likelihood for a geometric law cut off at the depth.
    """

    accepted: float = 0.0
    trials: float = 0.0
    level: int = 0

    def add(self, num_drafted: int, num_accepted: int, window: int) -> None:
        num_decided = num_accepted + (num_accepted < num_drafted)
        keep = window / (window + num_decided)
        self.accepted = self.accepted * keep + num_accepted
        self.trials = self.trials * keep + num_decided

    def set_level(self, prior: float) -> None:
        self.level = round(LEVELS * self.rate(prior, _PRIOR_TRIALS))

    def rate(self, prior: float, prior_trials: float) -> float:
        return (self.accepted + prior * prior_trials) / (self.trials + prior_trials)


@dataclass(slots=True)
class _Kept:
    """A choice that holds for some steps more.

    Attributes:
        depth_of: drafts of a row by the level of its acceptance.
        num_drafts: that there may be of all rows together.
        num_rows, num_tokens: of the step that it was made for.
        num_steps: that it was kept for already.
    """

    depth_of: list[int]
    num_drafts: int
    num_rows: int
    num_tokens: int
    num_steps: int = 0

    def holds(self, num_rows: int, num_tokens: int) -> bool:
        """Whether a step is like the one that the choice was made for.

        What else the step computes matters where there are drafts alone: it makes them dearer.
        """
        return (
            self.num_steps < (_KEEP if self.num_drafts else _REST)
            and 8 * abs(num_rows - self.num_rows) <= num_rows
            and (not self.num_drafts or 8 * abs(num_tokens - self.num_tokens) <= num_tokens)
        )


@dataclass(slots=True)
class _Probe:
    """Requests at depth 0 that draft a token in a step, until the step is applied.

    Attributes:
        unprobed_seconds: of the step, had it not probed. is_charged: whether it was observed.
    """

    requests: set[Request]
    unprobed_seconds: float
    is_charged: bool = False


class AdaptiveDepth:
    """The depths with the highest predicted goodput. The module's docstring has the theory.

    Args:
        has_draft_model: whether drafts come from a draft model's passes.
    """

    def __init__(self, has_draft_model: bool) -> None:
        self._has_draft_model = has_draft_model
        self._cost = StepCost()
        self._all = _Acceptance()
        self._prior = _START_RATE  # acceptance of a request that is not known
        self._by_request: dict[Request, _Acceptance] = {}
        self._savings = 0.0  # seconds that probes may take
        self._probes: list[_Probe] = []  # of steps in flight, and of the one that is applied
        self._goodput = 1.0
        self._kept: _Kept | None = None

    def choose(self, num_rows: int, num_tokens: int, candidates: Candidates) -> list[int]:
        """See `DepthPolicy`."""
        if self._probes:
            self._probes = [probe for probe in self._probes if not probe.is_charged]
        kept = self._kept
        if kept is None or not kept.holds(num_rows, num_tokens):
            return self._evaluate(candidates(), num_tokens)
        if not kept.num_drafts:
            kept.num_steps += 1
            return []
        asked = candidates()
        if any(candidate.lag > _SHORT_LAG for candidate in asked):
            return self._evaluate(asked, num_tokens)
        kept.num_steps += 1
        depths = [
            depth if (depth := kept.depth_of[level]) < candidate.most else candidate.most
            for level, candidate in zip(self._levels(asked), asked, strict=True)
        ]
        shorten(depths, sum(depths) - kept.num_drafts)
        return depths

    def observe_drafts(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """See `DepthPolicy`."""
        self._all.add(num_drafted, num_accepted, _GLOBAL_WINDOW)
        acceptance = self._by_request.setdefault(request, _Acceptance())
        acceptance.add(num_drafted, num_accepted, _REQUEST_WINDOW)
        acceptance.set_level(self._prior)
        if any(request in probe.requests for probe in self._probes):
            self._savings += num_accepted / self._goodput

    def observe_step(
        self, shape: StepShape, seconds: float, draft_seconds: float, requests: Iterable[Request]
    ) -> None:
        """See `DepthPolicy`."""
        if self._probes:
            self._charge_probe(shape, requests)
        kept = self._kept
        if kept is not None and not kept.num_drafts and kept.num_steps % _OBSERVED_AT_REST:
            return
        self._cost.observe(shape, seconds, draft_seconds)

    def lose_steps(self) -> None:
        """See `DepthPolicy`."""
        self._probes = []

    def forget(self, request: Request) -> None:
        """See `DepthPolicy`."""
        self._by_request.pop(request, None)

    def _evaluate(self, candidates: Sequence[Candidate], num_tokens: int) -> list[int]:
        """Depths by what is known now."""
        num_kept, self._kept = self._kept.num_steps if self._kept else 0, None
        most = [candidate.most for candidate in candidates]
        if not self._cost.target.is_known:
            return [min(room, 1) for room in most]
        self._prior = self._all.rate(_START_RATE, _START_TRIALS)
        levels = self._levels(candidates)
        num_rows = len(candidates)
        lag = self._short_lag(candidates)
        drafts = by_worth(levels, most)
        best = self._best(drafts, num_tokens, num_rows, lag)
        if worthwhile := self._without_laggards(candidates, best):
            drafts = by_worth(levels, worthwhile)
            best = self._best(drafts, num_tokens, num_rows, lag)
        self._goodput = best.goodput
        depths = give_out(drafts, best, levels, worthwhile or most)
        if self._probe(candidates, depths, num_tokens, 1 + num_kept):
            return depths
        shape = self._shape(candidates, depths, num_tokens)
        if any(most) and not worthwhile and self._cost.is_measured(shape):
            depth_of = depths_within(best.limit, least_worth(drafts, best))
            self._kept = _Kept(depth_of, best.num_drafts, num_rows, num_tokens)
        return depths

    def _levels(self, candidates: Sequence[Candidate]) -> list[int]:
        """Acceptance of each candidate's request."""
        default = round(LEVELS * self._prior)
        known = self._by_request
        return [
            known[request].level if (request := each.request) in known else default
            for each in candidates
        ]

    def _short_lag(self, candidates: Sequence[Candidate]) -> float:
        """Mean of the lags, but for those that are no part of a normal step."""
        lags = [each.lag for each in candidates if each.lag <= _SHORT_LAG]
        return sum(lags) / len(lags) if lags else 0.0

    def _shape(
        self, candidates: Sequence[Candidate], depths: Sequence[int], num_tokens: int
    ) -> StepShape:
        num_tokens += sum(depths)
        if not self._has_draft_model or not any(depths):
            return StepShape(num_tokens)
        pairs = zip(candidates, depths, strict=True)
        num_draft_tokens = sum(each.lag + depth - 1 for each, depth in pairs if depth)
        return StepShape(num_tokens, max(depths), num_draft_tokens)

    def _best(self, drafts: list[Drafts], num_tokens: int, num_rows: int, lag: float) -> Choice:
        """The prefix of the drafts, up to the best limit of depth, with the highest goodput.

        Args:
            lag: of a row on average.
        """
        alone = self._cost.target.at(max(1, num_rows))
        best = Choice(0, 0, _MARGIN * num_rows / alone)
        deepest = max((each.position for each in drafts), default=0)
        num_drafts = sum(each.num_rows for each in drafts)
        spent = self._cost.target.at(num_tokens) - alone
        limits: Iterable[int] = (deepest,)
        first_tokens = max(lag, 1.0)
        per_pass = [0.0] * (num_rows + 2)
        if self._has_draft_model:
            per_pass = self._cost.draft_pass.table(int(num_rows * first_tokens) + 1)
            limits = limits_of_depth(deepest)
        lines = [
            (end, intercept - spent, slope)
            for end, intercept, slope in self._cost.target.segments(
                num_tokens, num_tokens + num_drafts
            )
        ]
        for limit in limits:
            best = best_prefix(
                drafts, limit, num_tokens, num_rows, first_tokens, lines, per_pass, best
            )
        return best

    def _without_laggards(self, candidates: Sequence[Candidate], best: Choice) -> list[int]:
        """Room of the candidates, none for those whose catching up costs more than drafts save.

        Drafts save a share of what its tokens to come take without any; a row's part in that is
        its part in the batch.

        Returns:
            [] where all may stay.
        """
        if not best.num_drafts:
            return []
        num_rows = len(candidates)
        alone = self._cost.target.at(num_rows)
        saved_share = max(0.0, 1.0 - num_rows / alone / best.goodput)
        per_token = saved_share * alone / num_rows
        is_worthwhile = [
            each.lag <= _SHORT_LAG
            or self._cost.draft_pass.at_most(each.lag) <= per_token * each.num_left
            for each in candidates
        ]
        if all(is_worthwhile):
            return []
        return [each.most * stays for each, stays in zip(candidates, is_worthwhile, strict=True)]

    def _probe(
        self, candidates: Sequence[Candidate], depths: list[int], num_tokens: int, num_steps: int
    ) -> bool:
        """Let rows at depth 0 draft one token, if the savings allow for it; return whether any did.

        All of them at once, as passes cost by the pass; but of those whose draft model has to
        catch up no more than the savings pay for.

        Args:
            num_steps: since the last time; each may save.
        """
        resting = [row for row, depth in enumerate(depths) if not depth and candidates[row].most]
        if not resting:
            return False
        shape = self._shape(candidates, depths, num_tokens)
        without = self._cost.predict(shape)
        num_passes = max(shape.num_passes, 1) if self._has_draft_model else 0

        def added(num_probes: int, lag: int) -> float:
            short_lag = min(lag, num_probes * _SHORT_LAG)
            num_draft_tokens = shape.num_draft_tokens + short_lag
            probing = StepShape(shape.num_tokens + num_probes, num_passes, num_draft_tokens)
            catching_up = self._cost.draft_pass.at(lag) if lag > short_lag else 0.0
            return max(0.0, self._cost.predict(probing) - without) + catching_up

        resting.sort(key=lambda row: candidates[row].lag)
        lags = [*accumulate(candidates[row].lag for row in resting)]
        cheapest = added(1, lags[0])
        saved = _PROBE_SHARE * without * num_steps
        self._savings = min(self._savings + saved, _MAX_PROBES * cheapest)
        if self._savings < cheapest:
            return False
        num_probes = 1
        while num_probes < len(resting) and (
            lags[num_probes] <= _SHORT_LAG * (num_probes + 1)
            or added(num_probes + 1, lags[num_probes]) <= self._savings
        ):
            num_probes += 1
        for row in resting[:num_probes]:
            depths[row] = 1
        probed = {candidates[row].request for row in resting[:num_probes]}
        self._probes.append(_Probe(probed, without))
        return True

    def _charge_probe(self, shape: StepShape, requests: Iterable[Request]) -> None:
        """Pay for what probing added to a step, if it is the one that the oldest probe is in."""
        probe = next((probe for probe in self._probes if not probe.is_charged), None)
        if probe is not None and any(request in probe.requests for request in requests):
            self._savings -= max(0.0, self._cost.predict(shape) - probe.unprobed_seconds)
            probe.is_charged = True
