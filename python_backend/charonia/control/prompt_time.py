"""How long prompts take to be computed.

Owns the estimate, learned from the steps that ran, through all epochs of an engine. Must not know
what it is for.
"""

from charonia.control.limits import Limits
from charonia.control.step_cost import CostCurve


class PromptTime:
    """Seconds by tokens, in steps that are as large as they may be and have nothing else."""

    def __init__(self) -> None:
        self._cost = CostCurve()
        self._budget: int  # tokens of a step, at most

    def start_epoch(self, limits: Limits) -> None:
        """Go on with the steps of this engine."""
        self._budget = limits.max_num_batched_tokens

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens, drafts to be verified included.

        Args:
            seconds: in the engine, with what the draft model took: a deadline runs meanwhile, and
                so does the time for which a prefix that another one computes is waited for.
        """
        self._cost.observe(num_tokens, seconds)

    def of(self, num_tokens: int) -> float:
        """What so many tokens take; 0 while nothing is known."""
        num_full, rest = divmod(num_tokens, self._budget)
        full_s = num_full * self._cost.at(self._budget) if num_full else 0.0
        return full_s + (self._cost.at(rest) if rest else 0.0)
