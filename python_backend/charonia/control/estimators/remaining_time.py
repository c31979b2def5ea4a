"""How long a request would still take if it ran now.

Owns the estimate, learned from the steps that ran and the answers that ended. Must not know what it
is for. It is a mean, and may be too little or too much: a prompt is taken to cost what steps of
its size do and what it looks back on, each token after it a step like those of late, an answer to
be as long as others are, and nobody to be in the way.
"""

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.state.request import Request

_STEP_SHARE = 0.05  # that the last step has in the mean


class RemainingTime:
    """Seconds until a request's last token.

    Args:
        lengths: how long answers are. prompt_time: how long prompts take.
    """

    def __init__(self, lengths: OutputLengths, prompt_time: PromptTime) -> None:
        self._lengths = lengths
        self._prompt_time = prompt_time
        self._step_s: float | None = None

    def note_step(self, seconds: float) -> None:
        """A step took so long in the engine."""
        mean_s = seconds if self._step_s is None else self._step_s
        self._step_s = mean_s + _STEP_SHARE * (seconds - mean_s)

    def of(self, request: Request, num_cached: int = 0) -> float:
        """Of a request that waits; 0 while nothing is known.

        Args:
            num_cached: its first tokens, which need not be computed.
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
