"""How long a request would still take if it ran now.

Owns the estimate, learned from the steps that ran and the requests that ended. Must not know what
it is for. It leans towards too little: a step is taken to cost what such steps cost, an answer to
be as long as others are, and nobody to be in the way.
"""

from charonia.control.request import Request
from charonia.control.step_cost import CostCurve

_STEP_SHARE = 0.05  # that the last step has in the mean
_OUTPUT_SHARE = 0.05  # that the last request has in the mean


class RemainingTime:
    """Seconds until a request's last token.

    Args:
        budget: tokens of a step, at most.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._cost = CostCurve()
        self._step_s: float | None = None
        self._num_output: float | None = None

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens in so many seconds."""
        self._cost.observe(num_tokens, seconds)
        self._step_s = _moved(self._step_s, seconds, _STEP_SHARE)

    def note_end(self, request: Request) -> None:
        """A request has generated all its tokens."""
        self._num_output = _moved(self._num_output, request.num_generated, _OUTPUT_SHARE)

    def of(self, request: Request) -> float:
        """Of a request that waits; 0 while nothing is known."""
        if self._step_s is None:
            return 0.0
        num_full, rest = divmod(len(request.token_ids), self._budget)
        prompt_s = num_full * self._cost.at(self._budget) + (self._cost.at(rest) if rest else 0.0)
        num_left = float(request.max_tokens - request.num_generated)
        if self._num_output is not None:
            num_left = min(num_left, max(1.0, self._num_output - request.num_generated))
        return prompt_s + (num_left - 1) * self._step_s


def _moved(mean: float | None, value: float, share: float) -> float:
    return value if mean is None else mean + share * (value - mean)
