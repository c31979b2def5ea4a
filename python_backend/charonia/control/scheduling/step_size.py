"""How many rows, and tokens, a step has where nobody says it: as many as pay.

Owns the choice, learned from the steps that ran. Must not know requests.

A step takes some time however little it computes, above all to read the weights, and some for each
row or token more. So the more it computes, the more it does per second, but ever less more, while
each token of a row comes later, and chunks make others wait for longer. With `fixed` and `each`
seconds it has the fewest rows, and the fewest tokens of prompts, that come near the rate of the
largest step::

    size / (fixed + each * size)  >=  near * most / (fixed + each * most)

Rows are fewer where a time between two tokens is to be kept, and where the KV cache has no room for
so many: after a preemption there are as many as are left, and some time without one gives one back.
A time that not even a single row keeps would be missed all the same, at a fraction of the rate.
Then there are as few rows as are ever chosen without such a time.
"""

from collections import deque
from math import ceil, log2
from statistics import fmean, linear_regression, median

_NEAR = 0.95  # of the rate of the largest step
_LEAST_ROWS, _LEAST_TOKENS = 16, 64
_FIRST = 2  # times as much, at first
_TRIES = 60  # large steps after which they may be twice as large
_STEPS_PER_ROW = 50  # without a preemption
_CHOOSE_EVERY = 8  # steps
_PER_OCTAVE = 2  # groups of sizes whose times are kept together
_NUM_KEPT = 15  # times of a group, whose median counts
_MEMORY = 20_000  # steps after which a group that was not renewed is forgotten


class _Size:
    """The smallest size that comes near the best rate."""

    def __init__(self, least: int, most: int) -> None:
        self._least = min(least, most)
        self._most = most
        self._groups: dict[int, deque[tuple[int, float]]] = {}
        self._seen: dict[int, int] = {}
        self._num_steps = 0
        self._limit = min(_FIRST * self._least, most)
        self._num_large = 0  # steps that were near the limit, since it is there

    def observe(self, size: int, seconds: float) -> None:
        """Learn what a step took."""
        self._num_steps += 1
        group = round(_PER_OCTAVE * log2(size))
        self._groups.setdefault(group, deque(maxlen=_NUM_KEPT)).append((size, seconds))
        self._seen[group] = self._num_steps

    def note_tried(self, size: int) -> None:
        """There was a step of such a size; after some that are large, larger ones are tried."""
        self._num_large += 2 * size > self._limit
        if self._num_large >= _TRIES:
            self._limit, self._num_large = min(2 * self._limit, self._most), 0

    def best(self, longest_s: float | None = None) -> int:
        """The size to go for.

        Args:
            longest_s: seconds that a step may take; None for any number. Where the smallest step
                takes longer, `least` is the size: so a size that barely keeps it may come and go.
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
        """Seconds of a step, and of each row or token in it.

        By least squares of the seconds per row or token, so that small steps count like large ones.
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
        max_rows, max_tokens: of a step at most. Tokens that are chosen are those of prompts, which
            a step has beside the one of each other row.
        adapts_rows, adapts_tokens: which of them are chosen; the other is always the most.
        target_s: seconds between two tokens that rows are to keep; None is any.
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
            num_prompt_tokens: of the other rows. num_rows: all of these.
            seconds: from the end of the step before it to its own. token_s: of these, for a token
                of each row: where drafts are accepted there are several.
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
        """There was no room for all rows, and so many are left."""
        self._room = max(1.0, min(self._room, num_running))
        if self._rows is not None:
            self.max_rows = min(self.max_rows, int(self._room))

    def _choose(self) -> None:
        if self._tokens is not None:
            self.max_tokens = self._tokens.best()
        if self._rows is not None:
            self.max_rows = min(self._rows.best(self._target_s), int(self._room))
