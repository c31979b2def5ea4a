"""How long steps take: what tells an engine that hangs from a step that is large.

Owns the prediction of a step's time from those before it. Must not know plans, or what becomes of
a step that takes longer.
"""

DECAY = 0.99


class StepTimes:
    """The slowest recent step of each size; a size is a power of two of tokens.

    A step takes no longer than a larger one, and at most as many times longer than a smaller one
    as it has more tokens. So each size seen bounds all others, and the least bound predicts best:
    a decode step says little about a large prompt, but the first large prompt says enough.
    """

    def __init__(self) -> None:
        self._slowest: dict[int, float] = {}  # by the bit length of the number of tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record a step; its memory decays, so that one slow step is not the measure for ever."""
        size = num_tokens.bit_length()
        self._slowest[size] = max(self._slowest.get(size, 0.0) * DECAY, seconds)

    def predict(self, num_tokens: int) -> float:
        """Seconds that a step should take at most; 0 before the first one."""
        size = num_tokens.bit_length()
        bounds = (slowest * 2 ** max(0, size - seen) for seen, slowest in self._slowest.items())
        return min(bounds, default=0.0)
