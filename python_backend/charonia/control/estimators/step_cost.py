"""Time of a step by its size, learned from past steps.

Owns the prediction of seconds from a step's size. Knows nothing about requests, or the use of the
prediction. There is no calibration. Sizes that were never measured, or not lately, are predicted as
fast as the measured ones allow, so a search for the fastest step tries them. Two facts bound them:

- more tokens never take less time: from a measured smaller size a,  seconds(n) >= seconds(a);
- more tokens never have less throughput: from a larger one b,       seconds(n) >= seconds(b) n/b.

    seconds                      ● b       ● measured
                             ·   /         · predicted between a and b: the larger of the two
                         ·     /             bounds. This is exact for a memory-bound floor with
       ● a · · · · ·                         a compute-bound slope behind it
       └────────────────────────── tokens
"""

from bisect import bisect_right
from itertools import pairwise
from math import inf
from typing import NamedTuple

# Two knots per octave above 8: with more, each would be learned from fewer steps.
_KNOTS: tuple[int, ...] = (*range(1, 8), *(round(8 * 2 ** (half / 2)) for half in range(27)))
_MIDDLES = tuple((low + high) / 2 for low, high in pairwise(_KNOTS))
_MEMORY = 1000
_SMALL_CHANGE = 8  # tokens; after a larger change of size, the first step takes a fifth longer
_WARM_UP = 4  # first steps, which are ignored: memory is touched for the first time
_FORGET_EVERY = 32  # observations; it is slow
_MIN_COUNT = 2  # a single observation may be a page fault or a preempted thread
_FEW = 4
_BOUND_EVERY = 8  # observations, once a knot has some
_SLOWEST_RATE = 0.01  # least rate at which a knot follows its observations
_SCALE_RATE = 0.1  # rate at which all knots together do
_MAX_SURPRISE = 0.25  # largest deviation of one observation that counts


class StepShape(NamedTuple):
    """The size of a step.

    Attributes:
        num_tokens: tokens that the target computed, drafts included.
        num_passes: passes of the draft model; 0 without one, or if nothing was drafted.
        num_draft_tokens: tokens that the draft model computed in all passes together.
    """

    num_tokens: int
    num_passes: int = 0
    num_draft_tokens: int = 0


class CostCurve:
    """Seconds as a function of a number of tokens, from noisy observations that age.

    The curve is linear between knots. An observation changes the nearest knot by a share of the
    ratio of observed to predicted time. A larger share goes to a factor that all knots have in
    common: changes are mostly those of the machine, and unused knots must follow them.

    Args:
        memory: observations after which a knot without new ones is forgotten, and so tried again.
    """

    def __init__(self, memory: float = _MEMORY) -> None:
        self._memory = memory
        self._now = 0
        self._scale = 1.0
        self._seconds = [inf] * len(_KNOTS)  # as observed, in units of the scale
        self._counts = [0] * len(_KNOTS)
        self._seen = [0] * len(_KNOTS)
        self._curve = [0.0] * len(_KNOTS)  # the same with all bounds, defined everywhere

    @property
    def is_known(self) -> bool:
        """True if anything was observed often enough to predict from."""
        return self._curve[-1] > 0.0

    def at(self, size: int) -> float:
        """Predicted seconds for `size` tokens; 0 while nothing is known."""
        above = bisect_right(_KNOTS, size)
        if above == len(_KNOTS):
            return self._curve[-1] * self._scale
        low, high = _KNOTS[above - 1], _KNOTS[above]
        at_low, at_high = self._curve[above - 1], self._curve[above]
        slope = (at_high - at_low) / (high - low)
        return (at_low + slope * (size - low)) * self._scale

    def at_most(self, size: int) -> float:
        """Predict as `at` does, but pessimistically for sizes that were not observed.

        A step takes no longer than a larger one, and in proportion to its tokens no longer than a
        smaller one. Each size that was observed, even once, bounds all others in this way.
        """
        bounds = (
            seconds * max(1.0, size / knot)
            for knot, seconds in zip(_KNOTS, self._seconds, strict=True)
            if seconds < inf
        )
        return min(bounds, default=0.0) * self._scale

    def is_measured(self, size: int) -> bool:
        """Return whether sizes like this one were observed a few times."""
        return self._counts[bisect_right(_MIDDLES, size)] >= _FEW

    def observe(self, size: int, seconds: float) -> None:
        """Learn the time of `size` tokens. A time of 0 is ignored."""
        if seconds <= 0.0:
            return
        self._now += 1
        knot = bisect_right(_MIDDLES, size)
        self._counts[knot] += 1
        self._seen[knot] = self._now
        if self._counts[knot] <= _MIN_COUNT:
            self._seconds[knot] = min(self._seconds[knot], seconds / self._scale)
        else:
            surprise = seconds / self.at(size) - 1.0
            surprise = max(-_MAX_SURPRISE, min(_MAX_SURPRISE, surprise))
            self._scale *= 1.0 + _SCALE_RATE * surprise
            self._seconds[knot] *= 1.0 + max(_SLOWEST_RATE, 1 / self._counts[knot]) * surprise
        if self._now % _FORGET_EVERY == 0:
            self._forget()
        if self._counts[knot] <= 2 * _BOUND_EVERY or self._now % _BOUND_EVERY == 0:
            self._bound()

    def _forget(self) -> None:
        for knot, seen in enumerate(self._seen):
            if self._counts[knot] and self._now - seen > self._memory:
                self._counts[knot] = 0
                self._seconds[knot] = inf

    def _bound(self) -> None:
        """Define the curve everywhere: by observations, or by the bounds that follow from them."""
        curve = self._curve
        least, per_token = inf, 0.0
        for knot in reversed(range(len(_KNOTS))):
            if self._counts[knot] >= _MIN_COUNT:
                least = min(least, self._seconds[knot])
                curve[knot] = least
                per_token = least / _KNOTS[knot]
            else:
                curve[knot] = per_token * _KNOTS[knot]
        smaller = 0.0
        for knot, count in enumerate(self._counts):
            if count >= _MIN_COUNT:
                smaller = curve[knot]
            else:
                curve[knot] = max(curve[knot], smaller)


class StepCost:
    """Seconds of a step: one curve for the target and everything else, one for a draft pass.

    Args:
        has_draft_model: whether drafts come from a draft model's passes.
    """

    def __init__(self, has_draft_model: bool) -> None:
        self.has_draft_model = has_draft_model
        self._num_steps = 0
        self._last_sizes = (0, 0)
        self.target = CostCurve()
        self.draft_pass = CostCurve()

    def observe(self, shape: StepShape, seconds: float, draft_seconds: float) -> None:
        """Learn from a step.

        Args:
            seconds: time of its whole cycle. draft_seconds: the draft model's part.
        """
        if self._is_cold(shape.num_tokens):
            return  # not representative; if sizes alternate, neither is cold
        self.target.observe(shape.num_tokens, seconds - draft_seconds)
        if shape.num_passes:
            size = -(-shape.num_draft_tokens // shape.num_passes)
            self.draft_pass.observe(size, draft_seconds / shape.num_passes)

    def _is_cold(self, size: int) -> bool:
        """Return whether memory and caches were not warm for a step of this size."""
        self._num_steps += 1
        sizes, self._last_sizes = self._last_sizes, (size, self._last_sizes[0])
        return self._num_steps <= _WARM_UP or all(
            3 * abs(size - last) > max(3 * _SMALL_CHANGE, last) for last in sizes
        )

    def of_drafts(self, num_passes: int, num_tokens: int) -> float:
        """Seconds of a draft model's passes with `num_tokens` tokens in all; 0 without one."""
        if not self.has_draft_model:
            return 0.0
        return num_passes * self.draft_pass.at(-(-num_tokens // num_passes))
