"""Attention time of a query per key, which makes the end of a long prompt slow.

Owns the estimate, learned from steps with prompts. Knows nothing about requests, or the use of the
estimate.

Along a prompt, steps of equal size take ever longer, because their tokens attend to more keys::

    seconds of a token = fixed seconds + keys that it attends to * seconds of a pair

The seconds of a pair are the slope of a line through steps of about the same size. Lines of
different sizes have the same slope but different heights: in smaller steps each token takes longer.
"""

from math import log2

_FORGETTING = 1 / 64  # share of its weight that each step loses with a new step of its size
_LEAST_STEPS = 4
_MAX_SURPRISE = 1.0  # deviations are cut to this multiple of the expected time
_LEAST_SPREAD = 0.1  # of the mean of keys; a smaller spread is little evidence


class _Line:
    """Steps of about one size: seconds of a token by the keys that it attends to."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._weight = self._keys = self._seconds = 0.0
        self._spread = self.shared = 0.0  # variance of keys, and covariance with seconds; weighted

    def at(self, keys: float, slope: float) -> float:
        """Expected seconds of a token."""
        return self._seconds + slope * (keys - self._keys)

    @property
    def spread(self) -> float:
        """Spread of keys, and a little more, so that no line goes through a single point."""
        return self._spread + self._weight * (_LEAST_SPREAD * self._keys) ** 2

    def observe(self, keys: float, seconds: float) -> None:
        """Add a step; older ones count less."""
        self.num_steps += 1
        kept = 1.0 - _FORGETTING
        self._weight = kept * self._weight + 1.0
        off = keys - self._keys
        self._keys += off / self._weight
        self._seconds += (seconds - self._seconds) / self._weight
        self._spread = kept * self._spread + off * (keys - self._keys)
        self.shared = kept * self.shared + off * (seconds - self._seconds)


class PairCost:
    """Seconds that each pair of a query and a key adds to a step.

    It stays apart from `CostCurve`, which has one size: this is a slope across steps of equal size
    that attend to different numbers of keys. `PromptTime` subtracts it before a curve learns.

    Attributes:
        seconds: seconds of a pair; 0 while nothing is known.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lines: dict[int, _Line] = {}

    def observe(self, num_tokens: int, num_pairs: int, seconds: float) -> None:
        """Learn from a step that computed mostly prompts.

        Args:
            num_tokens: all tokens. num_pairs: pairs of a prompt token and a key it attends to.
        """
        line = self._lines.setdefault(round(2 * log2(num_tokens)), _Line())
        keys, token_s = num_pairs / num_tokens, seconds / num_tokens
        if line.num_steps >= _LEAST_STEPS:
            expected = max(line.at(keys, self.seconds), 0.0)
            most = _MAX_SURPRISE * expected
            token_s = min(max(token_s, expected - most), expected + most)
        line.observe(keys, token_s)
        spread = shared = 0.0
        for size, one in self._lines.items():
            if one.num_steps >= _LEAST_STEPS:
                weight = 2.0**size  # the square of its tokens, because the noise is per step
                spread += weight * one.spread
                shared += weight * one.shared
        self.seconds = max(0.0, shared / spread) if spread else 0.0
