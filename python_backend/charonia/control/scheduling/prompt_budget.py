"""Budget of prompt tokens that a step computes beside requests that generate.

Owns the estimate of what these tokens cost, learned from past steps. Knows nothing about requests.

This is stall-free batching as in Sarathi-Serve (Agrawal et al. 2024, arXiv 2403.02310, section
4.3): a prompt is computed in chunks so small that a step takes no longer than the target time
between two tokens. There the budget comes from a profile made beforehand; here it follows the
steps::

    tokens = (target - time of a step without prompts) / time that a prompt token adds

The time that a token adds grows along a prompt, because it attends to more tokens, and each step
reads these anew. `PromptTime` learns what that takes; this module learns the rest.

It is used only with `inter_token_target_ms`. Without a target the tokens of the whole step are the
only limit.

While requests wait there may be no step without prompts. Until the time of a step with so many rows
is known, a step with at most `LEAST_TOKENS` prompt tokens counts as one without prompts. The time
of rows changes, and any increase would be charged to prompt tokens. So after `LOOK_EVERY` steps
without such a measurement, or if no more tokens fit, the next step is a step of that kind.
"""

from math import sqrt

from charonia.control.estimators.pair_cost import AttentionTime
from charonia.control.estimators.step_cost import CostCurve

LEAST_TOKENS = 4
"""Prompt tokens that a step computes in any case, so that prompts finish in the end."""
IDLE_FACTOR = 2.0
LOOK_EVERY = 64
_MARGIN = 0.85  # share of the target to use, because step times scatter
_RATE_SHARE = 0.3  # weight of the last step in the moving average
_MAX_GROWTH = 2  # most growth of the tokens from one step to the next
_LEAST_RATE = 1e-9
NO_ATTENTION = AttentionTime()


class PromptBudget:
    """The prompt tokens that fit beside decodes into a target time between tokens.

    Args:
        target_s: seconds from one step to the next; None is `IDLE_FACTOR` times the time of a step
            without prompts.
    """

    def __init__(self, target_s: float | None = None) -> None:
        self._target_s = target_s
        self._decodes = CostCurve()  # times of steps without prompts, by their tokens
        self._rate: float | None = None  # seconds that a prompt token adds, without attention
        self._last = LEAST_TOKENS  # prompt tokens that the last step had, or might have had
        self._num_unseen = 0  # steps since `_decodes` was last measured

    def tokens(
        self, num_decoded: int, num_before: int = 0, attention: AttentionTime = NO_ATTENTION
    ) -> int:
        """Most prompt tokens of a step in which other rows generate; at least `LEAST_TOKENS`.

        Args:
            num_decoded: tokens that these rows compute, drafts included.
            num_before: computed tokens of the prompt, which its next tokens attend to.
            attention: what these tokens take for it.
        """
        decode_s = self._decodes.at(num_decoded)
        target_s = IDLE_FACTOR * decode_s if self._target_s is None else self._target_s
        if self._rate is None or target_s <= 0.0 or self._num_unseen >= LOOK_EVERY:
            return LEAST_TOKENS
        pair_s, key_s = attention
        left_s = max(0.0, _MARGIN * target_s - decode_s - num_before * key_s)
        # left_s = n * first_s + n^2 / 2 * pair_s
        first_s = self._rate + num_before * pair_s + key_s
        fitting = int(2 * left_s / (first_s + sqrt(first_s**2 + 2 * pair_s * left_s)))
        return max(LEAST_TOKENS, min(fitting, _MAX_GROWTH * self._last))

    def observe(self, num_decoded: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            num_decoded, num_prompt_tokens: tokens that it computed.
            seconds: from the end of the step before it to its own, less the time for the attention
                of prompt tokens.
        """
        if not num_decoded or seconds <= 0.0:
            return
        teaches_decodes = not num_prompt_tokens
        if 0 < num_prompt_tokens <= LEAST_TOKENS:
            is_measured = self._decodes.is_measured(num_decoded)
            is_stuck = self._rate is not None and self.tokens(num_decoded) <= LEAST_TOKENS
            teaches_decodes = is_stuck or not is_measured
        if teaches_decodes:
            self._decodes.observe(num_decoded, seconds)
            self._num_unseen = 0
            return
        self._num_unseen += 1
        rate = (seconds - self._decodes.at(num_decoded)) / num_prompt_tokens
        rate = max(rate, _LEAST_RATE)
        self._rate = rate if self._rate is None else self._rate + _RATE_SHARE * (rate - self._rate)
        # A step with short prompts is no evidence against longer ones.
        self._last = max(num_prompt_tokens, min(self._last, self.tokens(num_decoded)))
