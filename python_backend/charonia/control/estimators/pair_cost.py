"""What a query takes for each key that it looks at, which makes the end of a long prompt slow.

Owns the estimate, learned from steps of prompts. Must not know requests, nor what it is for.

Along a prompt, steps of equal size take ever longer, as their tokens look at more of it::

    seconds of a token = what it takes by itself + keys that it looks at * seconds of a pair

The last is the slope of a line through the steps of about one size. Lines of different sizes have
their slope in common, and not their height: of few tokens each takes longer.
"""

from math import log2

_FORGETTING = 1 / 64  # of each step's share when another one of its size was seen
_LEAST_STEPS = 4
_MAX_SURPRISE = 1.0  # times what was expected; the rest of it is ignored
_LEAST_SPREAD = 0.1  # of the mean of keys: what spreads less says little


class _Line:
    """Steps of about one size: seconds of a token by the keys that it looks at."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._weight = self._keys = self._seconds = 0.0
        self._spread = self.shared = 0.0  # of keys, and of keys with seconds

    def at(self, keys: float, slope: float) -> float:
        """Expected seconds."""
        return self._seconds + slope * (keys - self._keys)

    @property
    def spread(self) -> float:
        """Of keys, and a little more, so that no line is drawn through one place."""
        return self._spread + self._weight * (_LEAST_SPREAD * self._keys) ** 2

    def observe(self, keys: float, seconds: float) -> None:
        """One step more; older ones count less."""
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

    Attributes:
        seconds: of a pair; 0 while nothing is known.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lines: dict[int, _Line] = {}

    def observe(self, num_tokens: int, num_pairs: int, seconds: float) -> None:
        """Learn from a step that computed little beside prompts.

        Args:
            num_tokens: in all. num_pairs: of prompts' tokens and keys that these look at.
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
                weight = 2.0**size  # the square of its tokens, as the noise is a step's
                spread += weight * one.spread
                shared += weight * one.shared
        self.seconds = max(0.0, shared / spread) if spread else 0.0
