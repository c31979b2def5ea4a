"""How long prompts take to be computed.

Owns the estimate, learned from the steps that ran. Must not know what it is for.
"""

from charonia.control.step_cost import CostCurve


class PromptTime:
    """Seconds by tokens, in steps that are as large as they may be and have nothing else.

    Args:
        budget: tokens of a step, at most.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._cost = CostCurve()

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens in so many seconds."""
        self._cost.observe(num_tokens, seconds)

    def of(self, num_tokens: int) -> float:
        """What so many tokens take; 0 while nothing is known."""
        num_full, rest = divmod(num_tokens, self._budget)
        full_s = num_full * self._cost.at(self._budget) if num_full else 0.0
        return full_s + (self._cost.at(rest) if rest else 0.0)
