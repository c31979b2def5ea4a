"""How many tokens of prompts a step computes beside requests that generate.

Owns the estimate of what these tokens cost, learned from the steps that ran. Must not know
requests.

Stall-free batching as in Sarathi-Serve (Agrawal et al. 2024, arXiv 2403.02310, section 4.3): a
prompt is computed in chunks so small that a step takes no longer than the time between two tokens
may be. There the budget comes from a profile made beforehand; here it follows the steps::

    tokens = (target - a step without prompts) / what a token of a prompt adds to it

What a token adds grows along a prompt, as it looks back on more of it. What it takes for that, for
each token that it looks at, is known to `PromptTime`; what it takes by itself is learned here.

While somebody waits there may be no step without prompts. As long as it is not known what one of so
many rows takes, a step with no more than `LEAST_TOKENS` of prompts counts as one. What rows take
changes, and a token would seem to cost what they take more; so when no such step has been seen for
`LOOK_EVERY` steps, or no more tokens fit, the next one is one.
"""

from math import sqrt

from charonia.control.estimators.step_cost import CostCurve

LEAST_TOKENS = 4
"""What prompts get in any case: they are to be computed in the end."""
IDLE_FACTOR = 2.0
LOOK_EVERY = 64
_MARGIN = 0.85  # of the target, because steps scatter
_RATE_SHARE = 0.3  # that the last step has in the mean
_MAX_GROWTH = 2  # times as many tokens as in the step before
_LEAST_RATE = 1e-9


class PromptBudget:
    """The tokens of prompts that fit beside decodes into a time between tokens.

    Args:
        target_s: seconds from one step to the next; None is `IDLE_FACTOR` times as long as steps
            without prompts take.
    """

    def __init__(self, target_s: float | None = None) -> None:
        self._target_s = target_s
        self._decodes = CostCurve()  # of steps without prompts, by their tokens
        self._rate: float | None = None  # seconds that a token of a prompt adds by itself
        self._last = LEAST_TOKENS  # that a step had, or might have had
        self._num_unseen = 0  # steps since one said what rows take

    def tokens(self, num_decoded: int, num_before: int = 0, pair_s: float = 0.0) -> int:
        """At most so many in a step in which other rows generate; at least `LEAST_TOKENS`.

        Args:
            num_decoded: tokens that these rows compute, drafts included.
            num_before: tokens of the prompt that are computed, and will be looked at.
            pair_s: seconds that a token adds for each that it looks at.
        """
        decode_s = self._decodes.at(num_decoded)
        target_s = IDLE_FACTOR * decode_s if self._target_s is None else self._target_s
        if self._rate is None or target_s <= 0.0 or self._num_unseen >= LOOK_EVERY:
            return LEAST_TOKENS
        left_s = max(0.0, _MARGIN * target_s - decode_s)
        # left_s = n * first_s + n^2 / 2 * pair_s
        first_s = self._rate + num_before * pair_s
        fitting = int(2 * left_s / (first_s + sqrt(first_s**2 + 2 * pair_s * left_s)))
        return max(LEAST_TOKENS, min(fitting, _MAX_GROWTH * self._last))

    def observe(self, num_decoded: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a step beside which there was no waiting.

        Args:
            num_decoded, num_prompt_tokens: that it computed.
            seconds: from the end of the step before it to its own, but for what prompts' tokens
                took to look back.
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
        # A step whose prompts were short says nothing against longer ones.
        self._last = max(num_prompt_tokens, min(self._last, self.tokens(num_decoded)))
