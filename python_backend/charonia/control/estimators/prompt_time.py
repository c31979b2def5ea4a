"""How long prompts take to be computed.

Owns the estimate, learned from the steps that ran, through all epochs of an engine. Must not know
what it is for.
"""

from charonia.control.estimators.pair_cost import PairCost
from charonia.control.estimators.step_cost import CostCurve
from charonia.control.state.limits import Limits

_PROMPT_SHARE = 0.75  # of a step's tokens, from which on it says what prompts look back on
_LEAST_TOKENS = 16


class PromptTime:
    """Seconds by tokens, and by those before them that these look back on.

    A prompt is taken to be computed in steps that are as large as may be, and have nothing else.
    """

    def __init__(self) -> None:
        self._cost = CostCurve()  # of what tokens take by themselves
        self._pairs = PairCost()
        self._budget: int  # tokens of a step, at most

    @property
    def pair_s(self) -> float:
        """Seconds that a prompt's token takes for each that it looks at."""
        return self._pairs.seconds

    def start_epoch(self, limits: Limits) -> None:
        """Go on with the steps of this engine."""
        self._budget = limits.max_num_batched_tokens

    def note_step(
        self, num_tokens: int, num_prompt_tokens: int, num_pairs: int, seconds: float
    ) -> None:
        """A step computed so many tokens, drafts to be verified included.

        Args:
            num_prompt_tokens: of these, in rows that compute a prompt. num_pairs: of such a token
                and one that it looks at.
            seconds: in the engine, with what the draft model took: a deadline runs meanwhile, and
                so does the time for which a prefix that another one computes is waited for.
        """
        if num_prompt_tokens >= max(_LEAST_TOKENS, _PROMPT_SHARE * num_tokens):
            self._pairs.observe(num_tokens, num_pairs, seconds)
        self._cost.observe(num_tokens, seconds - num_pairs * self.pair_s)

    def of(self, num_tokens: int, num_before: int = 0) -> float:
        """What so many tokens take behind others that are computed; 0 while nothing is known."""
        num_full, rest = divmod(num_tokens, self._budget)
        full_s = num_full * self._cost.at(self._budget) if num_full else 0.0
        rest_s = self._cost.at(rest) if rest else 0.0
        return full_s + rest_s + self.pair_s * num_pairs(num_tokens, num_before)


def num_pairs(num_tokens: int, num_before: int) -> int:
    """Of consecutive tokens and those that they look at: themselves and all before."""
    return num_tokens * num_before + num_tokens * (num_tokens + 1) // 2
