"""The target model: computes the steps of rows, samples, and verifies drafts.

Owns which tokens of a pass need logits, and which drafts are accepted. Must not know plans, other
ranks, or the origin of drafts.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from charonia.data.loaded_models import PROMPT_LOGPROBS_SLICE
from charonia.data.model.paged import Model, PendingLogits
from charonia.data.sampling.sampler import Sampled, SampledRow, Sampler
from charonia.data.sampling.verify import num_accepted, num_accepted_synthetically
from charonia.data.step_tensors import StepTensors
from charonia.protocol import BlockCopy, RowResult, RowStep, TokenLogprobs


class _PromptPart(NamedTuple):
    """Tokens of a prompt, and the logits that predict them."""

    targets: Tensor  # [lines]
    logits: PendingLogits


class PendingStep(NamedTuple):
    """A step whose tokens are computed, or are still passing through the pipeline."""

    rows: list[RowStep]
    prompts: list[list[_PromptPart] | None]  # of each row
    sampling: list[RowStep]  # the rows that sample
    lines: list[SampledRow]  # one for each line of logits
    logits: PendingLogits


class TargetModel:
    """Computes steps, each in two parts: the pass of the model, and sampling from its logits.

    Args:
        tensors: the rows; this moves their cursors.
        synthetic_rate: probability of accepting a draft, whatever it is; None verifies drafts.
    """

    def __init__(
        self,
        model: Model,
        tensors: StepTensors,
        sampler: Sampler,
        synthetic_rate: float | None,
    ) -> None:
        self._model = model
        self._tensors = tensors
        self._sampler = sampler
        self._synthetic_rate = synthetic_rate

    def begin(self, steps: list[RowStep]) -> PendingStep:
        """Start the model's pass over the steps, up to the logits to sample from.

        A row samples if its cursor has reached its last known token. Each of its drafts has a line
        of logits of its own, whose history is all tokens before it.
        """
        batch = self._tensors.batch(self._tensors.advance(steps))
        sampling: list[RowStep] = []
        rows: list[SampledRow] = []
        lines: list[int] = []
        for step, end in zip(steps, batch.query_starts[1:], strict=True):
            state = self._tensors.state(step.row)
            if state.num_computed < state.num_tokens:
                continue
            sampling.append(step)
            lines += range(end - step.num_drafts - 1, end)
            for num_drafts in range(step.num_drafts + 1):
                token_ids = self._tensors.token_ids(step.row, num_drafts)
                rows.append(SampledRow(state.sampling, token_ids, state.num_prompt))
        logits = self._model.forward(batch, lines)
        prompts = [
            self._prompt_logits(step, start)
            for step, start in zip(steps, batch.query_starts, strict=False)
        ]
        return PendingStep(steps, prompts, sampling, rows, logits)

    def end(self, step: PendingStep) -> list[RowResult]:
        """Sample, and append the sampled tokens to the rows."""
        runs: dict[int, tuple[list[int], list[TokenLogprobs] | None]] = {}
        if step.sampling:
            sampled, first = self._sampler.sample(step.logits(), step.lines), 0
            for row_step in step.sampling:
                last = first + row_step.num_drafts + 1
                runs[row_step.row] = self._verify(row_step, sampled[first:last])
                first = last
        results = []
        for row_step, prompt in zip(step.rows, step.prompts, strict=True):
            token_ids, logprobs = runs.get(row_step.row, ([], None))
            prompt_logprobs = self._prompt_logprobs(row_step, prompt)
            results.append(RowResult(row_step.row, token_ids, logprobs, prompt_logprobs))
        return results

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `Model`."""
        self._model.copy_blocks(copies)

    def _verify(
        self, step: RowStep, sampled: list[Sampled]
    ) -> tuple[list[int], list[TokenLogprobs] | None]:
        """Append a row's run: the sampled tokens, up to the first that differs from the draft."""
        token_ids = [one.token_id for one in sampled]
        if step.num_drafts:
            drafts = self._tensors.drafts(step.row, step.num_drafts)
            if self._synthetic_rate is None:
                num = num_accepted(drafts, token_ids)
            else:
                state = self._tensors.state(step.row)
                num = num_accepted_synthetically(
                    len(drafts), self._synthetic_rate, state.sampling.seed, state.num_tokens
                )
                token_ids[:num] = drafts[:num]
            del sampled[num + 1 :], token_ids[num + 1 :]
        num_guessed = 0 if step.draft_ids else step.num_drafts
        self._tensors.commit(step.row, token_ids, num_guessed)
        has_logprobs = sampled[0].logprobs is not None
        return token_ids, [
            one.logprobs for one in sampled if one.logprobs
        ] if has_logprobs else None

    def _prompt_logits(self, step: RowStep, start: int) -> list[_PromptPart] | None:
        """Request the logits for scoring the prompt tokens that this step's tokens predict.

        Args:
            start: index in the pass of the row's first token.
        """
        state = self._tensors.state(step.row)
        if state.sampling.num_prompt_logprobs < 0:
            return None
        first = state.num_computed - step.num_tokens + 1
        targets = self._tensors.token_ids(step.row)[first : state.num_computed + 1]
        targets = targets[: max(state.num_prompt - first, 0)]
        parts = []
        for part in range(0, len(targets), PROMPT_LOGPROBS_SLICE):
            some = targets[part : part + PROMPT_LOGPROBS_SLICE]
            lines = slice(start + part, start + part + len(some))
            parts.append(_PromptPart(some, self._model.logits(lines)))
        return parts

    def _prompt_logprobs(
        self, step: RowStep, parts: list[_PromptPart] | None
    ) -> list[TokenLogprobs] | None:
        """Log-probabilities of prompt tokens, one slice at a time."""
        if parts is None:
            return None
        k = self._tensors.state(step.row).sampling.num_prompt_logprobs
        return [
            entry
            for part in parts
            for entry in self._sampler.prompt_logprobs(part.logits(), part.targets, k)
        ]
