"""Attention time of a prompt's tokens, which makes the end of a long prompt slow.

Owns the estimate, learned from steps with prompts. Knows nothing about requests, or the use of the
estimate.

Along a prompt, steps of equal size take ever longer, because their tokens attend to more keys. A
step reads each key once for all tokens of a chunk, so it is dearer per pair in small chunks::

    seconds of a step = fixed seconds + pairs * pair_s + keys * key_s

Steps of about the same size have the fixed seconds in common: each size is a line of its own. All
lines have the same two slopes. With chunks of a single size, pairs and keys grow together; then all
of it is put down to pairs.
"""

from math import log2
from typing import NamedTuple

_FORGETTING = 1 / 256  # share of its weight that each step loses with a new step of its size
_LEAST_STEPS = 4
_MAX_SURPRISE = 1.0  # deviations are cut to this multiple of the expected time
_LEAST_SPREAD = 0.1  # of the mean; a smaller spread is little evidence
_DOUBT = 0.01  # as strong as so much of all evidence speaks that keys are read for nothing


class AttentionTime(NamedTuple):
    """Time that attention adds to a step.

    Attributes:
        pair_s: seconds of a pair of a query and a key. key_s: seconds to read a key, once for all
            queries of a chunk.
    """

    pair_s: float = 0.0
    key_s: float = 0.0

    def of(self, num_pairs: int, num_keys: int) -> float:
        """Seconds of so many pairs and keys."""
        return self.pair_s * num_pairs + self.key_s * num_keys


class _Line:
    """Steps of about one size: seconds of a token by its pairs, and by the keys that are read.

    Attributes:
        num_steps: so far. The other figures are sums over steps of which older ones count less:
            products of deviations from the means, of pairs, keys and seconds of a token.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._weight = self._pairs = self._keys = self._seconds = 0.0
        self._pairs_pairs = self._pairs_keys = self._keys_keys = 0.0
        self.pairs_seconds = self.keys_seconds = 0.0

    def at(self, pairs: float, keys: float, time: AttentionTime) -> float:
        """Expected seconds of a token."""
        more = time.pair_s * (pairs - self._pairs) + time.key_s * (keys - self._keys)
        return self._seconds + more

    @property
    def spreads(self) -> tuple[float, float, float]:
        """Sums of products of deviations: pairs by pairs, pairs by keys, keys by keys.

        A little is added, so that no line goes through a single point.
        """
        pairs, keys = _LEAST_SPREAD * self._pairs, _LEAST_SPREAD * self._keys
        return (
            self._pairs_pairs + _LEAST_STEPS * pairs * pairs,
            self._pairs_keys + _LEAST_STEPS * pairs * keys,
            self._keys_keys + _LEAST_STEPS * keys * keys,
        )

    def observe(self, pairs: float, keys: float, seconds: float) -> None:
        """Add a step."""
        self.num_steps += 1
        kept = 1.0 - _FORGETTING
        self._weight = kept * self._weight + 1.0
        off_pairs, off_keys = pairs - self._pairs, keys - self._keys
        self._pairs += off_pairs / self._weight
        self._keys += off_keys / self._weight
        self._seconds += (seconds - self._seconds) / self._weight
        off_seconds = seconds - self._seconds
        self._pairs_pairs = kept * self._pairs_pairs + off_pairs * (pairs - self._pairs)
        self._pairs_keys = kept * self._pairs_keys + off_pairs * (keys - self._keys)
        self._keys_keys = kept * self._keys_keys + off_keys * (keys - self._keys)
        self.pairs_seconds = kept * self.pairs_seconds + off_pairs * off_seconds
        self.keys_seconds = kept * self.keys_seconds + off_keys * off_seconds


class PairCost:
    """Seconds that pairs of a query and a key, and reading keys, add to a step.

    It stays apart from `CostCurve`, which has one size: these are slopes across steps of equal size
    that attend to different numbers of keys. `PromptTime` subtracts it before a curve learns.

    Attributes:
        time: all 0 while nothing is known.
    """

    def __init__(self) -> None:
        self.time = AttentionTime()
        self._lines: dict[int, _Line] = {}

    def observe(self, num_tokens: int, num_pairs: int, num_keys: int, seconds: float) -> None:
        """Learn from a step that computed mostly prompts.

        Args:
            num_tokens: all tokens. num_pairs: pairs of a prompt token and a key it attends to.
            num_keys: keys that are read, once for each chunk of a prompt.
        """
        line = self._lines.setdefault(round(2 * log2(num_tokens)), _Line())
        pairs, keys, token_s = (x / num_tokens for x in (num_pairs, num_keys, seconds))
        if line.num_steps >= _LEAST_STEPS:
            expected = max(line.at(pairs, keys, self.time), 0.0)
            most = _MAX_SURPRISE * expected
            token_s = min(max(token_s, expected - most), expected + most)
        line.observe(pairs, keys, token_s)
        self.time = self._fit()

    def _fit(self) -> AttentionTime:
        """The slopes of all lines by least squares, neither of them below 0."""
        pairs_pairs = pairs_keys = keys_keys = pairs_seconds = keys_seconds = 0.0
        for size, one in self._lines.items():
            if one.num_steps >= _LEAST_STEPS:
                weight = 2.0**size  # the square of its tokens, because the noise is per step
                by_pairs, by_both, by_keys = one.spreads
                pairs_pairs += weight * by_pairs
                pairs_keys += weight * by_both
                keys_keys += weight * by_keys
                pairs_seconds += weight * one.pairs_seconds
                keys_seconds += weight * one.keys_seconds
        if not pairs_pairs or not keys_keys:
            return AttentionTime()
        keys_keys *= 1.0 + _DOUBT
        left_s = keys_seconds - pairs_seconds * pairs_keys / pairs_pairs
        key_s = max(0.0, left_s / (keys_keys - pairs_keys**2 / pairs_pairs))
        pair_s = (pairs_seconds - key_s * pairs_keys) / pairs_pairs
        if pair_s < 0.0 < key_s:
            return AttentionTime(0.0, max(0.0, keys_seconds / keys_keys))
        return AttentionTime(max(pair_s, 0.0), key_s)
