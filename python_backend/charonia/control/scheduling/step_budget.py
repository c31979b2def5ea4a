"""Limits of the next step: rows, tokens, and prompt tokens.

Owns the choice between configured and learned sizes, and the estimate of which rows will decode.
Knows nothing about which request gets a row, or what a step contains.
"""

from collections import deque
from typing import NamedTuple

from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.scheduling.load_shedding import LoadShedding
from charonia.control.scheduling.prompt_budget import PromptBudget
from charonia.control.scheduling.step_size import StepSize
from charonia.control.state.limits import Limits
from charonia.control.state.stats import SchedulerStats
from charonia.control.state.step import Step
from charonia.protocol import StepResult


class _Decodes(NamedTuple):
    """Work of a step beside prompts: rows that sample, and drafts that they verify.

    Attributes:
        num_before: computed tokens of a prompt that it left unfinished.
    """

    num_rows: int
    num_drafts: int
    num_before: int


class StepBudget:
    """The budgets of one scheduler's steps.

    Args:
        prompts: limits the prompt tokens of a step in which rows decode; None sets no limit.
        prompt_time: knows the time of a prompt token's attention.
        sizes: chooses the most rows and tokens of a step; None takes the most that `limits` allow.
        stats: gets the chosen sizes.
    """

    def __init__(
        self,
        prompts: PromptBudget | None,
        prompt_time: PromptTime,
        sizes: StepSize | None,
        stats: SchedulerStats,
    ) -> None:
        self._prompts = prompts
        self._prompt_time = prompt_time
        self._sizes = sizes
        self._stats = stats
        self._limits: Limits
        self._last: deque[_Decodes]  # the last steps, one for each stage

    def start_epoch(self, limits: Limits) -> None:
        """Begin with the first step of an engine."""
        self._limits = limits
        self._last = deque(maxlen=limits.num_stages)
        self._show(num_running=0)

    def num_tokens(self, num_running: int) -> int:
        """Token budget of the next step. A learned size comes on top of one token per row."""
        most = self._limits.max_num_batched_tokens
        if self._sizes is None or not self._limits.enable_chunked_prefill:
            return most
        return min(most, num_running + self._sizes.max_tokens)

    def num_prompt_tokens(self, num_tokens: int, num_running: int, shedding: LoadShedding) -> int:
        """Prompt token budget of the next step, so that decoding rows do not wait too long.

        The decoding rows are taken to be those that sampled in the last step of the same stage.

        Args:
            num_tokens: token budget of the step.
        """
        in_turn = len(self._last) == self._limits.num_stages
        last = self._last[0] if in_turn else _Decodes(0, 0, 0)
        num_decodes = min(last.num_rows, num_running)
        if not num_decodes or not self._limits.enable_chunked_prefill:
            return num_tokens
        if self._prompts is not None:
            num_drafts = last.num_drafts * num_decodes // last.num_rows
            num_fitting = self._prompts.tokens(
                num_decodes + num_drafts, last.num_before, self._prompt_time.attention
            )
            num_tokens = min(num_tokens, num_fitting)
        return max(1, int(num_tokens * shedding.prompt_share))

    def share(self, num_requests: int) -> int:
        """Most rows of a step, so that all steps that may be in flight have the same number.

        A request is in the step that it joins with, so no more may join.

        All rows count alike. Prompt tokens are not divided between steps: a chunk fills the budget
        of its step, which keeps every stage busy for long, however few rows come with it.

        Args:
            num_requests: requests that have a row, or may get one.
        """
        return -(-num_requests // self._limits.num_stages)

    def num_rows(self, num_free: int, num_running: int) -> int:
        """Return the number of free rows that may be given to requests."""
        if self._sizes is None:
            return num_free
        num_more = self._sizes.max_rows * self._limits.num_stages - num_running
        return max(0, min(num_free, num_more))

    def note_plan(self, step: Step) -> None:
        """This step was planned."""
        self._last.append(_Decodes(step.num_sampling, step.num_decode_drafts, step.num_before_rest))

    def note_preemption(self, num_running: int) -> None:
        """A request was preempted, which leaves `num_running` in all stages."""
        if self._sizes is not None:
            self._sizes.note_preemption(-(-num_running // self._limits.num_stages))

    def observe(self, step: Step, result: StepResult, seconds: float, num_running: int) -> None:
        """Learn from the time of a step."""
        num_rows = len(step.rows)
        # A row that verifies drafts computes one more token for each, and may commit several.
        num_decoded, token_s = num_rows - step.num_prompts, seconds
        if step.drafts:
            num_decoded += step.num_decode_drafts
            num_given = sum(len(row.token_ids) for row in result.rows)
            token_s = seconds * num_rows / max(num_given, num_rows)
        if self._prompts is not None:
            attention_s = self._prompt_time.attention.of(step.num_pairs, step.num_keys)
            self._prompts.observe(num_decoded, step.num_prompt_tokens, seconds - attention_s)
        if self._sizes is not None:
            num_prompt_tokens = step.num_prompt_tokens
            self._sizes.observe(num_decoded, num_prompt_tokens, num_rows, seconds, token_s)
            self._show(num_running)

    def _show(self, num_running: int) -> None:
        sizes, limits = self._sizes, self._limits
        self._stats.max_rows = sizes.max_rows if sizes else limits.max_num_seqs
        self._stats.max_step_tokens = self.num_tokens(num_running)
