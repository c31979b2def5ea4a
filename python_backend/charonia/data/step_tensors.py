"""The rows' state between steps, and the index tensors of one step.

Owns the engine's state of each row: its tokens, block table and lengths. The state is kept on the
host, in arrays that are allocated once. A step's indices are a few numpy operations of a
microsecond each, and are then copied to the device. Must not know the model, or whether a plan is
valid (`plan_check` has checked it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from charonia.data.ops.base import StepBatch
from charonia.protocol import NewRow, RowSampling, RowStep


@dataclass
class RowState:
    """The host's state of an occupied row.

    ::

        token_ids   0 ............ num_computed ....... num_tokens ........
                    └ KV in the pages ┘└ known, not yet ┘└ drafts, in a step ┘

    num_draft_computed is to the draft model's KV what num_computed is to the target's.
    """

    sampling: RowSampling
    num_prompt: int
    num_tokens: int
    num_computed: int
    block_ids: set[int]
    num_draft_computed: int = 0


class Span(NamedTuple):
    """A run of consecutive tokens of a row; `start` is the position of the first."""

    row: int
    start: int
    num_tokens: int


class StepTensors:
    """Rows and a step's indices, on one device.

    Args:
        num_rows: number of rows, i.e. max_num_seqs. max_model_len: the most tokens of a row.
        max_num_batched_tokens: the most tokens of a step.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        max_num_batched_tokens: int,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        self._device = device
        max_blocks = -(-max_model_len // block_size)
        self.rows: list[RowState | None] = [None] * num_rows
        self._row_tokens = np.zeros((num_rows, max_model_len), dtype=np.int64)
        self._row_blocks = np.zeros((num_rows, max_blocks), dtype=np.int64)
        self._count = np.arange(max_num_batched_tokens)  # for a pass of either model

    def clear(self) -> None:
        """Forget all rows."""
        self.rows = [None] * len(self.rows)

    def leave(self, row: int) -> None:
        """Free a row."""
        self.rows[row] = None

    def join(self, new: NewRow) -> None:
        """Occupy a free row."""
        self.rows[new.row] = RowState(
            sampling=new.sampling,
            num_prompt=new.num_prompt,
            num_tokens=len(new.token_ids),
            num_computed=new.num_computed,
            block_ids=set(new.block_ids),
            num_draft_computed=new.num_draft_computed,
        )
        self._row_tokens[new.row, : len(new.token_ids)] = new.token_ids
        self._row_blocks[new.row] = 0  # the null block, to remove those of the row's last request
        self._row_blocks[new.row, : len(new.block_ids)] = new.block_ids

    def state(self, row: int) -> RowState:
        """Return the state of an occupied row."""
        state = self.rows[row]
        assert state is not None, f"row {row} is free"
        return state

    def tables(self) -> tuple[Tensor, Tensor]:
        """All rows' tokens and block ids, int64 [rows, ...]; views, on the host."""
        return torch.from_numpy(self._row_tokens), torch.from_numpy(self._row_blocks)

    def token_ids(self, row: int, num_drafts: int = 0) -> Tensor:
        """All known tokens of an occupied row and the first drafts; a view, on the host.

        Returns:
            [num_tokens + num_drafts] int64.
        """
        return torch.from_numpy(self._row_tokens[row, : self.state(row).num_tokens + num_drafts])

    def drafts(self, row: int, num_drafts: int) -> list[int]:
        """The first drafts of a row in this step."""
        first = self.state(row).num_tokens
        drafts: list[int] = self._row_tokens[row, first : first + num_drafts].tolist()
        return drafts

    def put_drafts(self, rows: Sequence[int], place: int, token_ids: Sequence[int]) -> None:
        """Write a draft for each of `rows`, `place` tokens behind its last known one."""
        positions = [self.state(row).num_tokens + place for row in rows]
        self._row_tokens[rows, positions] = token_ids

    def begin(self, steps: Sequence[RowStep]) -> None:
        """Append the new blocks and drafts of the steps to their rows."""
        for step in steps:
            if step.new_block_ids:
                self._append_blocks(step)
            if step.draft_ids:
                first = self.state(step.row).num_tokens
                self._row_tokens[step.row, first : first + step.num_drafts] = step.draft_ids

    def advance(self, steps: Sequence[RowStep]) -> list[Span]:
        """Move the rows' cursors past the known tokens of this step.

        Returns:
            The tokens to compute, including drafts.
        """
        spans = []
        for step in steps:
            state = self.state(step.row)
            spans.append(Span(step.row, state.num_computed, step.num_tokens + step.num_drafts))
            state.num_computed += step.num_tokens
        return spans

    def batch(self, spans: Sequence[Span]) -> StepBatch:
        """Build the indices of a pass over some tokens, at most one span per row."""
        rows = np.array([span.row for span in spans])
        context_lens = [span.start + span.num_tokens for span in spans]
        query_starts = [0, *accumulate(span.num_tokens for span in spans)]
        if query_starts[-1] == len(spans):  # one token each, as in most passes
            row_of, positions = rows, np.array([span.start for span in spans])
        else:
            counts = [span.num_tokens for span in spans]
            # The position of the pass's token t is t + (start - first token of the row).
            shifts = [span.start - first for span, first in zip(spans, query_starts, strict=False)]
            row_of = np.repeat(rows, counts)
            positions = np.repeat(shifts, counts) + self._count[: query_starts[-1]]
        blocks = positions // self._block_size
        slots = (self._row_blocks[row_of, blocks] - blocks) * self._block_size + positions
        num_blocks = -(-max(context_lens) // self._block_size)
        return StepBatch(
            token_ids=self._on_device(self._row_tokens[row_of, positions]),
            positions=self._on_device(positions),
            slots=self._on_device(slots),
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=self._on_device(self._row_blocks[rows, :num_blocks]),
            block_size=self._block_size,
        )

    def advance_draft(self, steps: Sequence[RowStep]) -> list[Span]:
        """Do as `advance` for the draft model's cursors and the tokens computed before guessing."""
        spans = []
        for step in steps:
            state = self.state(step.row)
            spans.append(Span(step.row, state.num_draft_computed, step.num_draft_tokens))
            state.num_draft_computed += step.num_draft_tokens
        return spans

    def commit(self, row: int, run: Sequence[int], num_guessed: int) -> None:
        """Append a row's run (accepted drafts and one more token), and move its cursors to the end.

        Args:
            num_guessed: number of drafts of the draft model, which computed all but the last one.
        """
        state = self.state(row)
        num_accepted = len(run) - 1
        self._row_tokens[row, state.num_tokens : state.num_tokens + len(run)] = run
        state.num_tokens += len(run)
        # KV of rejected drafts stays after the cursors, and will be overwritten.
        state.num_computed += num_accepted
        state.num_draft_computed += max(0, min(num_accepted, num_guessed - 1))

    def _append_blocks(self, step: RowStep) -> None:
        known = self.state(step.row).block_ids
        first = len(known)
        known.update(step.new_block_ids)
        self._row_blocks[step.row, first : len(known)] = step.new_block_ids

    def _on_device(self, indices: "np.ndarray[Any, Any]") -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(indices))
        return tensor if self._device.type == "cpu" else tensor.to(self._device)
