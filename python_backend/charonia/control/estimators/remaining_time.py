"""Time that a request would still take if it ran now.

Owns the estimate, learned from past steps and answers. Knows nothing about its use. It is a mean,
so it may be too low or too high. It assumes that a prompt costs the time of steps of its size and
of its attention, that each later token takes a step like the last ones, that an answer is as long
as others, and that nothing else delays the request.
"""

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.state.request import Request

_STEP_SHARE = 0.05  # weight of the last step in the moving average


class RemainingTime:
    """Seconds until a request's last token.

    The mean time of a step stays apart from `CostCurve`, because the size of later steps is not
    known: they are taken to be like the last ones, whatever is in them.

    Args:
        lengths: estimates how long answers are. prompt_time: estimates how long prompts take.
    """

    def __init__(self, lengths: OutputLengths, prompt_time: PromptTime) -> None:
        self._lengths = lengths
        self._prompt_time = prompt_time
        self._step_s: float | None = None

    def note_step(self, seconds: float) -> None:
        """A step took `seconds` in the engine."""
        mean_s = seconds if self._step_s is None else self._step_s
        self._step_s = mean_s + _STEP_SHARE * (seconds - mean_s)

    def of(self, request: Request, num_cached: int = 0) -> float:
        """Seconds of a waiting request; 0 while nothing is known.

        Args:
            num_cached: number of its first tokens that need not be computed.
        """
        if self._step_s is None:
            return 0.0
        prompt_s = self._prompt_time.of(len(request.token_ids) - num_cached, num_cached)
        num_output = float(request.max_tokens)
        expected = self._lengths.mean(request.num_generated)
        if expected is not None:
            num_output = min(num_output, expected)
        num_steps = (num_output - request.num_generated - 1) * self._lengths.steps_per_token
        return prompt_s + num_steps * self._step_s
