"""The draft model: guesses the next tokens of rows within the engine's step.

Owns a small model, its KV cache over the target's block ids, and the loop of its passes. Must not
know which guesses are accepted: its cursor of each row is kept with the rows, in `step_tensors`.

One step, for a row with known tokens up to t and three drafts::

    pass 1   tokens not computed yet, up to t ─► d1    (several after a prefix hit, a rejection,
    pass 2                                 d1 ─► d2     or steps without drafts)
    pass 3                                 d2 ─► d3    d3 is never computed here

It samples like the target, with the same parameters and the same noise (see `verify`).
"""

from collections.abc import Sequence

from charonia.data.kv_store import KVStore
from charonia.data.model.paged import Model
from charonia.data.ops.base import Guesser, GuessOfRow
from charonia.data.sampling.native_draw import NativeDraw
from charonia.data.sampling.sampler import SampledRow, Sampler
from charonia.data.step_tensors import Span, StepTensors
from charonia.protocol import BlockCopy, RowStep


class DraftModel:
    """Guesses tokens, one pass of the model per draft.

    Args:
        model: with the target's vocabulary, and as many blocks as the target.
        tensors: the rows, shared with the target.
        sampler: the target's.
    """

    def __init__(self, model: Model, tensors: StepTensors, sampler: Sampler) -> None:
        self._model = model
        self._tensors = tensors
        self._sampler = sampler

    def guess(self, steps: Sequence[RowStep]) -> None:
        """Compute the steps' tokens of the draft model, and write the drafts into the rows."""
        steps = [step for step in steps if step.num_draft_tokens]
        spans = self._tensors.advance_draft(steps)
        place = 0
        while spans:
            guessing = [step for step in steps if step.num_drafts > place]
            self._pass(spans, {step.row for step in guessing}, place)
            place += 1
            spans = [
                Span(step.row, self._tensors.state(step.row).num_tokens + place - 1, 1)
                for step in guessing
                if step.num_drafts > place
            ]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `Model`."""
        self._model.copy_blocks(copies)

    def _pass(self, spans: Sequence[Span], guessing: set[int], place: int) -> None:
        """Compute `spans`, and draft one token for each of their rows that is in `guessing`."""
        batch = self._tensors.batch(spans)
        rows, last_tokens = [], []
        for span, end in zip(spans, batch.query_starts[1:], strict=True):
            if span.row in guessing:
                rows.append(span.row)
                last_tokens.append(end - 1)
        logits = self._model.forward(batch, last_tokens)
        if rows:
            sampled = [self._sampled_row(row, place) for row in rows]
            self._tensors.put_drafts(rows, place, self._sampler.draw(logits(), sampled))

    def _sampled_row(self, row: int, place: int) -> SampledRow:
        state = self._tensors.state(row)
        return SampledRow(state.sampling, self._tensors.token_ids(row, place), state.num_prompt)


class NativeDraftModel:
    """Guesses tokens on a CPU, in one native call for all passes.

    Args:
        guesser: the whole model. kv: has as many blocks as the target's, of `block_size` tokens.
        tensors: the rows, shared with the target. draw: the target's.
    """

    def __init__(
        self,
        guesser: Guesser,
        kv: KVStore,
        block_size: int,
        tensors: StepTensors,
        draw: NativeDraw,
    ) -> None:
        self._guesser = guesser
        self._kv = kv
        self._block_size = block_size
        self._tensors = tensors
        self._draw = draw

    def guess(self, steps: Sequence[RowStep]) -> None:
        """See `DraftModel`."""
        steps = [step for step in steps if step.num_draft_tokens]
        guesses = []
        for span, step in zip(self._tensors.advance_draft(steps), steps, strict=True):
            state = self._tensors.state(span.row)
            sampling = self._draw.parameters(state.sampling)
            guesses.append(
                GuessOfRow(*span, state.num_tokens, step.num_drafts, state.num_prompt, sampling)
            )
        self._guesser(guesses, *self._tensors.tables(), self._block_size, self._kv.pages)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `Model`."""
        self._kv.copy(copies)
