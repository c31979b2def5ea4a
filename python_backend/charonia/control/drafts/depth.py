"""Number of tokens that each request drafts in a step.

Owns the choice of depths, and each request's acceptance. Knows nothing about how drafts are made,
or the token budget: a request's room is an argument.

A draft is accepted with probability a if all drafts before it were accepted. So a row of depth k
commits 1 + a + a^2 + ... + a^k tokens on average. The goal is goodput, the tokens that a step
commits per second (Liu et al. 2024, "Optimizing Speculative Decoding for Serving Large Language
Models Using Goodput", arXiv 2406.14066, section 4). `goodput` finds the depths with the most.

Nothing is configured; everything is learned while serving:

- Time, by `StepCost`. It is optimistic about sizes that were not measured lately, so depths that
  might be better are tried.
- Acceptance, of all requests together. A request counts as average until its own drafts clearly
  differ: the rate of a few drafts is mostly chance, and depths that follow chance are worse than
  one depth for all. At the start drafts are assumed to be good.
- Whether drafts have become good while a row makes none. A row at depth 0 sometimes drafts one
  token, a probe; probes may take half a per cent of the time. The next probe waits for as many
  steps as pay for the last one, less the value of its accepted tokens. So drafts that are always
  wrong cost half a per cent, and once they are right, probes follow each other directly.

A choice is kept for some steps while the numbers of rows and tokens stay about the same, because
choosing takes as long as a layer of a small model.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from charonia.control.drafts.goodput import Best, most_goodput
from charonia.control.estimators.step_cost import StepCost, StepShape
from charonia.control.state.request import Request

_WINDOW = 60  # drafts that acceptance is estimated from
_START_RATE, _START_TRIALS = 0.8, 2.0  # prior of all requests' acceptance
_OWN_TRIALS = 4.0  # weight of others' acceptance in a request's own rate, in drafts
_CLEAR = 3.0  # standard deviations by which a request must differ to get a rate of its own
_LEVELS = 20  # own rates are rounded to multiples of 1 / _LEVELS, so that rows form groups
_SHORT_LAG = 16  # tokens that a draft model computes in about the time of one
_KEEP = 16  # steps for which a choice is kept
_OBSERVED_AT_REST = 4  # without drafts, one of so many steps is observed
_PROBE_SHARE = 0.005  # share of the time that probes may take


class Candidate(NamedTuple):
    """A row that could verify drafts in this step.

    Attributes:
        most: drafts that it has room for, >= 0.
        lag: tokens that the draft model must compute before its first draft, at least 1; 0 without
            a draft model.
        num_left: tokens that it can still commit, in all steps to come.
    """

    request: Request
    most: int
    lag: int = 0
    num_left: int = 1


Candidates = Callable[[], Sequence[Candidate]]


class DepthPolicy(Protocol):
    """Chooses depths, and learns from the results."""

    def choose(self, num_rows: int, num_tokens: int, candidates: Candidates) -> list[int]:
        """Depth for each candidate, from 0 to its `most`; [] if no row drafts.

        Args:
            num_rows: number of candidates.
            num_tokens: tokens that the target computes in this step anyway, for all rows, prefill
                included; at least `num_rows`.
            candidates: makes the candidates. Called only if needed, because making them would be
                most of the work of a step without drafts.
        """

    def rests(self, num_rows: int, num_tokens: int) -> bool:
        """Return whether no row drafts in a step of this size, whichever rows could."""

    def note_rest(self) -> None:
        """Note a step without drafts for which `choose` was not called."""

    def observe_drafts(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Learn from the verification of a request's drafts, 1 <= num_drafted.

        They may be fewer than the depth chosen: an n-gram drafter may find less.
        """

    def observe_step(self, shape: StepShape, seconds: float, draft_seconds: float) -> None:
        """Learn from the time of a step.

        Args:
            seconds: wall time of its whole cycle: engine, transit, planning. In a pipeline, the
                time in the engine.
            draft_seconds: the part of the draft model's passes; 0 for other drafters.
        """

    def forget(self, request: Request) -> None:
        """A request has ended; nothing more is observed for it."""


class FixedDepth:
    """Always drafts as many tokens as there is room for."""

    def choose(self, num_rows: int, num_tokens: int, candidates: Candidates) -> list[int]:
        """See `DepthPolicy`."""
        return [candidate.most for candidate in candidates()]

    def rests(self, num_rows: int, num_tokens: int) -> bool:
        """See `DepthPolicy`; it is not known in advance."""
        return False

    def note_rest(self) -> None:
        """See `DepthPolicy`; nothing depends on it."""

    def observe_drafts(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """See `DepthPolicy`; nothing depends on it."""

    def observe_step(self, shape: StepShape, seconds: float, draft_seconds: float) -> None:
        """See `DepthPolicy`; nothing depends on it."""

    def forget(self, request: Request) -> None:
        """See `DepthPolicy`; nothing is kept."""


@dataclass(slots=True)
class _Acceptance:
    """Accepted drafts and decided drafts; older ones weigh less.

    Drafts behind the first rejected one are undecided, so `trials` counts the accepted ones and the
    rejected one. This is the maximum likelihood estimate for a geometric law cut off at the depth.
    """

    accepted: float = 0.0
    trials: float = 0.0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        num_decided = num_accepted + (num_accepted < num_drafted)
        keep = _WINDOW / (_WINDOW + num_decided)
        self.accepted = self.accepted * keep + num_accepted
        self.trials = self.trials * keep + num_decided

    def rate(self, prior: float, prior_trials: float) -> float:
        return (self.accepted + prior * prior_trials) / (self.trials + prior_trials)

    def differs(self, rate: float) -> bool:
        """Return whether these counts differ clearly from what `rate` would give."""
        surplus = self.accepted - rate * self.trials
        return surplus * surplus > _CLEAR * _CLEAR * self.trials * rate * (1.0 - rate)


@dataclass(slots=True)
class _Choice:
    """Depths that hold for some steps.

    Attributes:
        depth: depth of all requests except those in `depth_of`.
        num_rows, num_tokens: size of the step that it was made for.
        num_left: steps for which it may still be kept.
    """

    depth: int
    depth_of: dict[Request, int] = field(default_factory=dict)
    num_rows: int = 0
    num_tokens: int = 0
    num_left: int = 0

    @property
    def is_rest(self) -> bool:
        """True if no row drafts."""
        return not self.depth and not self.depth_of

    def holds(self, num_rows: int, num_tokens: int) -> bool:
        """Return whether a step is like the one that the choice was made for.

        Other tokens of the step matter only if there are drafts, whose cost depends on them.
        """
        return (
            self.num_left > 0
            and 8 * abs(num_rows - self.num_rows) <= num_rows
            and (self.is_rest or 8 * abs(num_tokens - self.num_tokens) <= num_tokens)
        )

    def depths(self, candidates: Sequence[Candidate]) -> list[int]:
        """Depth of each candidate, limited by its room."""
        depth, depth_of = self.depth, self.depth_of
        if not depth_of:
            return [depth if depth < each.most else each.most for each in candidates]
        return [min(depth_of.get(each.request, depth), each.most) for each in candidates]


class AdaptiveDepth:
    """The depths with the highest predicted goodput. The module's docstring has the theory.

    Args:
        has_draft_model: whether drafts come from a draft model's passes.
    """

    def __init__(self, has_draft_model: bool) -> None:
        self._cost = StepCost(has_draft_model)
        self._all = _Acceptance()
        self._by_request: dict[Request, _Acceptance] = {}
        self._choice = _Choice(depth=1)
        self._best = Best()
        self._steps_to_probe = float(_KEEP)
        self._probed: set[Request] = set()  # requests whose probes were not observed yet
        self._probe_price = 0.0  # steps that pay for one probe
        self._token_price = 0.0  # steps that pay for the time of one token

    def choose(self, num_rows: int, num_tokens: int, candidates: Candidates) -> list[int]:
        """See `DepthPolicy`."""
        self._steps_to_probe -= 1.0
        asked: Sequence[Candidate] | None = None
        if not self._choice.holds(num_rows, num_tokens):
            asked = candidates()
            self._choose_anew(asked, num_tokens)
        choice = self._choice
        choice.num_left -= 1
        if choice.is_rest and self._steps_to_probe > 0.0:
            return []
        if asked is None:
            asked = candidates()
        depths = choice.depths(asked)
        if self._cost.has_draft_model:
            self._drop_laggards(asked, depths)
        if self._steps_to_probe <= 0.0 and self._cost.target.is_known:
            self._probe(asked, depths, num_tokens)
        return depths

    def rests(self, num_rows: int, num_tokens: int) -> bool:
        """See `DepthPolicy`."""
        choice = self._choice
        is_due = self._steps_to_probe <= 1.0
        return not is_due and choice.is_rest and choice.holds(num_rows, num_tokens)

    def note_rest(self) -> None:
        """See `DepthPolicy`."""
        self._steps_to_probe -= 1.0
        self._choice.num_left -= 1

    def observe_drafts(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """See `DepthPolicy`."""
        self._all.add(num_drafted, num_accepted)
        own = self._by_request.get(request)
        if own is None:
            own = self._by_request[request] = _Acceptance()
        own.add(num_drafted, num_accepted)
        if request in self._probed:
            self._probed.remove(request)
            wait = self._probe_price - num_accepted * self._token_price
            self._steps_to_probe = max(0.0, self._steps_to_probe) + wait

    def observe_step(self, shape: StepShape, seconds: float, draft_seconds: float) -> None:
        """See `DepthPolicy`."""
        choice = self._choice
        is_at_rest = choice.is_rest and choice.num_left >= 0 and not self._probed
        if is_at_rest and choice.num_left % _OBSERVED_AT_REST:
            return
        self._cost.observe(shape, seconds, draft_seconds)

    def forget(self, request: Request) -> None:
        """See `DepthPolicy`."""
        self._by_request.pop(request, None)
        self._probed.discard(request)

    def _choose_anew(self, candidates: Sequence[Candidate], num_tokens: int) -> None:
        """Choose by current estimates. Until the first steps are measured, each row drafts one."""
        if not self._cost.target.is_known:
            return
        usual = self._all.rate(_START_RATE, _START_TRIALS)
        rates = [self._rate(each.request, usual) for each in candidates]
        room = [each.most for each in candidates]
        able = Counter(rate for rate, most in zip(rates, room, strict=True) if most)
        if not able:
            self._choice = _Choice(0)
            return
        num_rows = len(candidates)
        now = self._best.deepest
        best = most_goodput(self._cost, able, max(room), num_rows, num_tokens, now)
        depths = best.depths(rates, room)
        ((usually, _),) = Counter(depths).most_common(1)
        pairs = zip(candidates, depths, strict=True)
        others = {each.request: depth for each, depth in pairs if depth != usually}
        num_drafts = sum(map(min, depths, room))
        is_measured = self._cost.target.is_measured(num_tokens + num_drafts)
        self._best = best
        self._choice = _Choice(usually, others, num_rows, num_tokens, _KEEP * is_measured)

    def _rate(self, request: Request, usual: float) -> float:
        """Expected acceptance of a request's drafts."""
        own = self._by_request.get(request)
        if own is None or not own.differs(usual):
            return usual
        return round(_LEVELS * own.rate(usual, _OWN_TRIALS)) / _LEVELS

    def _drop_laggards(self, candidates: Sequence[Candidate], depths: list[int]) -> None:
        """Drop drafts of rows whose catching up costs more than drafts can save until their end.

        Drafts save a share of the time of a row's tokens; the time of a step is divided equally
        among its rows.
        """
        for row, each in enumerate(candidates):
            if each.lag > _SHORT_LAG and depths[row]:
                seconds = self._cost.draft_pass.at_most(each.lag)
                if seconds > self._best.saved * each.num_left:
                    depths[row] = 0

    def _probe(self, candidates: Sequence[Candidate], depths: list[int], num_tokens: int) -> None:
        """Let rows at depth 0 draft one token each.

        All of them probe at once, because a pass costs about the same for any number of rows. Rows
        whose draft model lags far behind are left out, except those that lag least. A probe stays
        due until a draft is observed: a drafter may find nothing, and a step may fail.
        """
        resting = [row for row, depth in enumerate(depths) if not depth and candidates[row].most]
        if not resting:
            self._steps_to_probe = float(_KEEP)
            return
        most_lag = max(_SHORT_LAG, min(candidates[row].lag for row in resting))
        resting = [row for row in resting if candidates[row].lag <= most_lag]
        num_tokens += sum(depths)
        without = self._cost.target.at(num_tokens)
        added = self._cost.target.at(num_tokens + len(resting)) - without
        added += self._cost.of_drafts(1, sum(candidates[row].lag for row in resting))
        paid = _PROBE_SHARE * without  # what each step pays for probes
        self._probe_price = added / paid / len(resting)
        self._token_price = 1.0 / self._best.goodput / paid
        self._probed.update(candidates[row].request for row in resting)
        for row in resting:
            depths[row] = 1
