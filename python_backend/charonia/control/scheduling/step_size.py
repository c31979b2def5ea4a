"""Rows and tokens of a step if "auto" is configured: as many as still raise throughput.

Owns the choice, learned from past steps. Knows nothing about requests.

A step takes a fixed time, above all to read the weights, and some time for each row or token. A
larger step has a higher throughput, but with diminishing returns. It also delays each row's next
token, and its chunks make other rows wait longer. With `fixed` and `each` seconds the chosen size
is the smallest one whose rate comes near the rate of the largest step::

    size / (fixed + each * size)  >=  near * most / (fixed + each * most)

A target time between two tokens, or a lack of room in the KV cache, lowers the number of rows.
After a preemption it drops to the rows that are left; some time without one adds a row again.
If not even a single row keeps the target, a smaller step would miss it too, at a fraction of the
rate. Then the number of rows is the least that is ever chosen without a target.
"""

from collections import deque
from math import ceil, log2
from statistics import fmean, linear_regression, median

_NEAR = 0.95  # share of the rate of the largest step to reach
_LEAST_ROWS, _LEAST_TOKENS = 16, 64
_FIRST = 2  # the first limit, as a multiple of the least size
_TRIES = 60  # large steps after which the limit is doubled
_STEPS_PER_ROW = 50  # steps without a preemption after which a row is added again
_CHOOSE_EVERY = 8  # steps
_PER_OCTAVE = 2  # groups of sizes whose times are kept together
_NUM_KEPT = 15  # times kept per group; their median counts
_MEMORY = 20_000  # steps after which a group without new times is forgotten


class _Size:
    """The smallest size that comes near the best rate.

    It stays apart from `CostCurve`, which bounds sizes that were not measured but has no formula.
    The best size needs the two coefficients of a line, and medians that one slow step cannot move.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least = min(least, most)
        self._most = most
        self._groups: dict[int, deque[tuple[int, float]]] = {}
        self._seen: dict[int, int] = {}
        self._num_steps = 0
        self._limit = min(_FIRST * self._least, most)
        self._num_large = 0  # steps near the limit since it was set

    def observe(self, size: int, seconds: float) -> None:
        """Learn the time of a step."""
        self._num_steps += 1
        group = round(_PER_OCTAVE * log2(size))
        self._groups.setdefault(group, deque(maxlen=_NUM_KEPT)).append((size, seconds))
        self._seen[group] = self._num_steps

    def note_tried(self, size: int) -> None:
        """Note a step of this size. After enough large ones, the limit is doubled."""
        self._num_large += 2 * size > self._limit
        if self._num_large >= _TRIES:
            self._limit, self._num_large = min(2 * self._limit, self._most), 0

    def best(self, longest_s: float | None = None) -> int:
        """The chosen size.

        Args:
            longest_s: most seconds of a step; None sets no limit. If even a step of size 1 takes
                longer, `least` is chosen, so near that point the size may jump back and forth.
        """
        found = self._fit()
        if found is None:
            return self._limit
        fixed, each = found
        near = _NEAR * self._most
        best = ceil(near * fixed / max(fixed + (self._most - near) * each, 1e-12))
        best = max(self._least, best)
        if longest_s is not None:
            fitting = int((longest_s - fixed) / max(each, 1e-12))
            best = min(best, fitting) if fitting >= 1 else self._least
        return min(self._limit, best)

    def _fit(self) -> tuple[float, float] | None:
        """Fixed seconds of a step, and seconds of each row or token.

        A least-squares fit of the seconds per row or token, so small steps weigh as much as large.
        """
        for group, seen in list(self._seen.items()):
            if self._num_steps - seen > _MEMORY:
                del self._groups[group], self._seen[group]
        points = []
        for steps in self._groups.values():
            if len(steps) == _NUM_KEPT:
                size = fmean(size for size, _ in steps)
                points.append((1 / size, median(seconds / size for size, seconds in steps)))
        if len(points) < 2:
            return None
        fixed, each = linear_regression(*zip(*points, strict=True))
        return max(fixed, 0.0), max(each, 0.0)


class StepSize:
    """The size of steps of one scheduler.

    Args:
        max_rows, max_tokens: the largest step. The chosen tokens are prompt tokens, in addition to
            one token for each other row.
        adapts_rows, adapts_tokens: which of them are chosen; the other is always the maximum.
        target_s: target for the seconds between two tokens of a row; None sets none.
    """

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        *,
        adapts_rows: bool,
        adapts_tokens: bool,
        target_s: float | None = None,
    ) -> None:
        self._rows = _Size(_LEAST_ROWS, max_rows) if adapts_rows else None
        self._tokens = _Size(_LEAST_TOKENS, max_tokens) if adapts_tokens else None
        self._max_rows = max_rows
        self._target_s = target_s
        self._room = float(max_rows)  # rows that the KV cache has room for
        self._num_steps = 0
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self._choose()

    def observe(
        self,
        num_decoded: int,
        num_prompt_tokens: int,
        num_rows: int,
        seconds: float,
        token_s: float,
    ) -> None:
        """Learn from a step; both sizes may change.

        Args:
            num_decoded: tokens of rows that decode, drafts included.
            num_prompt_tokens: tokens of the other rows. num_rows: all rows.
            seconds: from the end of the step before it to its own.
            token_s: the same per committed token of a row; shorter if drafts were accepted.
        """
        if self._tokens is not None:
            self._tokens.note_tried(num_decoded + num_prompt_tokens)
            self._tokens.observe(num_decoded + num_prompt_tokens, seconds)
        if self._rows is not None:
            self._rows.note_tried(num_rows)
            if not num_prompt_tokens:
                self._rows.observe(num_rows, token_s)
            self._room = min(self._max_rows, self._room + 1 / _STEPS_PER_ROW)
        self._num_steps += 1
        if self._num_steps % _CHOOSE_EVERY == 0:
            self._choose()

    def note_preemption(self, num_running: int) -> None:
        """Note that there was no room for all rows; `num_running` are left."""
        self._room = max(1.0, min(self._room, num_running))
        if self._rows is not None:
            self.max_rows = min(self.max_rows, int(self._room))

    def _choose(self) -> None:
        if self._tokens is not None:
            self.max_tokens = self._tokens.best()
        if self._rows is not None:
            self.max_rows = min(self._rows.best(self._target_s), int(self._room))
