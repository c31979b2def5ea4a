"""Time to compute prompts.

Owns the estimate, learned from past steps, through all epochs of an engine. Knows nothing about its
use. It never forgets, because an engine with other arguments has a scheduler of its own, and so an
estimate that begins anew.
"""

from math import inf

from charonia.control.estimators.pair_cost import AttentionTime, PairCost
from charonia.control.estimators.step_cost import CostCurve
from charonia.control.state.limits import Limits

_PROMPT_SHARE = 0.75  # least share of prompt tokens in steps that `PairCost` learns from
_LEAST_TOKENS = 16
_PLAIN_EVERY_S = 0.005  # of steps without prompts, after which the next is learned from


class PromptTime:
    """Seconds of a prompt by its tokens, and by the tokens before them that they attend to.

    It assumes that a prompt is computed in steps of the largest size with nothing else in them.
    """

    def __init__(self) -> None:
        self._cost = CostCurve(memory=inf)  # time of tokens without the attention to earlier ones
        self._pairs = PairCost()
        self._unlearned_s = 0.0  # of steps without prompts, since one was learned from
        self._budget: int  # most tokens of a step

    @property
    def attention(self) -> AttentionTime:
        """Time of a prompt's attention."""
        return self._pairs.time

    def start_epoch(self, limits: Limits) -> None:
        """Continue with the steps of this engine."""
        self._budget = limits.max_num_batched_tokens

    def note_step(
        self, num_tokens: int, num_prompt_tokens: int, num_pairs: int, num_keys: int, seconds: float
    ) -> None:
        """A step computed `num_tokens` tokens, drafts to verify included.

        Of steps without prompts, those of a size that is known tell little more than how fast the
        machine is now. So of quick ones a part is enough.

        Args:
            num_prompt_tokens: those in rows that compute a prompt.
            num_pairs: pairs of such a token and a token that it attends to.
            num_keys: tokens that they attend to, once for each of the rows.
            seconds: time in the engine, with the draft model's, because deadlines and waits for a
                shared prefix run meanwhile.
        """
        if not num_prompt_tokens and self._cost.is_measured(num_tokens):
            # The step that completes the time would more often be a long one.
            if self._unlearned_s < _PLAIN_EVERY_S:
                self._unlearned_s += seconds
                return
            self._unlearned_s = seconds
        if num_prompt_tokens >= max(_LEAST_TOKENS, _PROMPT_SHARE * num_tokens):
            self._pairs.observe(num_tokens, num_pairs, num_keys, seconds)
        attention_s = self.attention.of(num_pairs, num_keys) if num_pairs else 0.0
        self._cost.observe(num_tokens, seconds - attention_s)

    def of(self, num_tokens: int, num_before: int = 0) -> float:
        """Seconds of `num_tokens` tokens behind `num_before` others; 0 while nothing is known."""
        num_full, rest = divmod(num_tokens, self._budget)
        full_s = num_full * self._cost.at(self._budget) if num_full else 0.0
        rest_s = self._cost.at(rest) if rest else 0.0
        num_keys = num_full * num_before + self._budget * num_full * (num_full + 1) // 2
        if rest:
            num_keys += num_before + num_tokens
        return full_s + rest_s + self.attention.of(num_pairs(num_tokens, num_before), num_keys)


def num_pairs(num_tokens: int, num_before: int) -> int:
    """Pairs of consecutive tokens and the tokens that they attend to: themselves and all before."""
    return num_tokens * num_before + num_tokens * (num_tokens + 1) // 2
