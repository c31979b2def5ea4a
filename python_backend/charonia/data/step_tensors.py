"""The rows' state between steps, and the index tensors of one step.

Owns what the engine remembers of each row: its tokens, its block table and its lengths. All of it
is kept on the host, in arrays that are allocated once: a step's indices are a few numpy operations
of a microsecond each, and go to the device as they are. Must not know the model, or whether a plan
makes sense (`plan_check` has seen it before it comes here).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from charonia.data.ops.base import StepBatch
from charonia.protocol import NewRow, RowSampling, RowStep


@dataclass
class RowState:
    """What the engine's host side knows of an occupied row.

    ::

        token_ids   0 ............ num_computed ....... num_tokens
                    └ KV in the pages ┘└ known, not yet ┘
    """

    sampling: RowSampling
    num_prompt: int
    num_tokens: int
    num_computed: int
    block_ids: set[int]


class StepTensors:
    """Rows and a step's indices, on one device.

    Args:
        num_rows: rows, i.e. max_num_seqs. max_model_len: tokens per row at most.
        max_num_batched_tokens: tokens per step at most.
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
        self._count = np.arange(max_num_batched_tokens)

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
        )
        self._row_tokens[new.row, : len(new.token_ids)] = new.token_ids
        self._row_blocks[new.row] = 0  # the null block, not those of the row's last request
        self._row_blocks[new.row, : len(new.block_ids)] = new.block_ids

    def state(self, row: int) -> RowState:
        """Return the state of an occupied row."""
        state = self.rows[row]
        assert state is not None, f"row {row} is free"
        return state

    def token_ids(self, row: int) -> Tensor:
        """All known tokens of an occupied row, [num_tokens] int64; a view, on the host."""
        return torch.from_numpy(self._row_tokens[row, : self.state(row).num_tokens])

    def begin(self, steps: Sequence[RowStep]) -> StepBatch:
        """Append the steps' new blocks to their rows and build the step's indices.

        The rows' cursors move past the tokens of this step.
        """
        self._append_blocks(steps)
        query_starts, context_lens, shifts = [0], [], []
        for step in steps:
            state = self.state(step.row)
            # The position of the step's token t is t + (num_computed - first token of the row).
            shifts.append(state.num_computed - query_starts[-1])
            state.num_computed += step.num_tokens
            query_starts.append(query_starts[-1] + step.num_tokens)
            context_lens.append(state.num_computed)
        total = query_starts[-1]
        rows = np.array([step.row for step in steps])
        counts = [step.num_tokens for step in steps]
        row_of = np.repeat(rows, counts)
        positions = np.repeat(shifts, counts) + self._count[:total]
        blocks, offsets = np.divmod(positions, self._block_size)
        num_blocks = -(-max(context_lens) // self._block_size)
        return StepBatch(
            token_ids=self._on_device(self._row_tokens[row_of, positions]),
            positions=self._on_device(positions),
            slots=self._on_device(self._row_blocks[row_of, blocks] * self._block_size + offsets),
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=self._on_device(self._row_blocks[rows, :num_blocks]),
            block_size=self._block_size,
        )

    def append(self, rows: list[int], token_ids: list[int]) -> None:
        """Add one sampled token to each of `rows`."""
        positions = []
        for row in rows:
            state = self.state(row)
            positions.append(state.num_tokens)
            state.num_tokens += 1
        self._row_tokens[rows, positions] = token_ids

    def _append_blocks(self, steps: Sequence[RowStep]) -> None:
        for step in steps:
            if not step.new_block_ids:
                continue
            known = self.state(step.row).block_ids
            first = len(known)
            known.update(step.new_block_ids)
            self._row_blocks[step.row, first : len(known)] = step.new_block_ids

    def _on_device(self, indices: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(indices)).to(self._device)
