"""How long a request would still take if it ran now.

Owns the estimate, learned from the steps that ran and the requests that ended. Must not know what
it is for. It is a mean, and may be too little or too much: a prompt is taken to cost what steps of
its size do, each token after it a step like those of late, an answer to be as long as others are,
and nobody to be in the way.
"""

from charonia.control.prompt_time import PromptTime
from charonia.control.request import Request

_STEP_SHARE = 0.05  # that the last step has in the mean
_OUTPUT_SHARE = 0.05  # that the last request has in the mean


class RemainingTime:
    """Seconds until a request's last token.

    Args:
        budget: tokens of a step, at most.
    """

    def __init__(self, budget: int) -> None:
        self._prompt_time = PromptTime(budget)
        self._step_s: float | None = None
        self._num_output: float | None = None
        self._steps_per_token: float | None = None  # fewer than one where drafts are accepted

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens in so many seconds."""
        self._prompt_time.note_step(num_tokens, seconds)
        self._step_s = _moved(self._step_s, seconds, _STEP_SHARE)

    def note_end(self, request: Request) -> None:
        """A request has generated all its tokens."""
        num_output = request.num_generated
        self._num_output = _moved(self._num_output, num_output, _OUTPUT_SHARE)
        steps_per_token = 1 - request.drafts.num_accepted / num_output
        self._steps_per_token = _moved(self._steps_per_token, steps_per_token, _OUTPUT_SHARE)

    def of(self, request: Request, num_cached: int = 0) -> float:
        """Of a request that waits; 0 while nothing is known.

        Args:
            num_cached: its first tokens, which need not be computed.
        """
        if self._step_s is None:
            return 0.0
        prompt_s = self._prompt_time.of(len(request.token_ids) - num_cached)
        num_left = float(request.max_tokens - request.num_generated)
        if self._num_output is not None:
            num_left = min(num_left, max(1.0, self._num_output - request.num_generated))
        steps_per_token = 1.0 if self._steps_per_token is None else self._steps_per_token
        return prompt_s + (num_left - 1) * steps_per_token * self._step_s


def _moved(mean: float | None, value: float, share: float) -> float:
    return value if mean is None else mean + share * (value - mean)
