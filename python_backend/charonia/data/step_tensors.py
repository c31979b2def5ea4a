"""The rows' state between steps, and the index tensors of one step.

Owns what the engine remembers of each row: its tokens and block table as tensors, its lengths as
plain numbers, so that building a step's indices needs nothing back from the device. All tensors
are allocated once. Must not know the model, or whether a plan makes sense (`plan_check` has seen
it before it comes here).
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
        self._row_tokens = torch.zeros(num_rows, max_model_len, dtype=torch.int64, device=device)
        self._row_blocks = torch.zeros(num_rows, max_blocks, dtype=torch.int64, device=device)
        self._token_ids, self._positions, self._slots, self._scratch = torch.zeros(
            4, max_num_batched_tokens, dtype=torch.int64, device=device
        )
        self._count = torch.arange(max_num_batched_tokens, device=device)

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
        self._row_tokens[new.row, : len(new.token_ids)] = torch.tensor(new.token_ids)
        self._row_blocks[new.row].zero_()  # the null block, not those of the row's last request
        self._row_blocks[new.row, : len(new.block_ids)] = torch.tensor(
            new.block_ids, dtype=torch.int64
        )

    def state(self, row: int) -> RowState:
        """Return the state of an occupied row."""
        state = self.rows[row]
        assert state is not None, f"row {row} is free"
        return state

    def token_ids(self, row: int) -> Tensor:
        """All known tokens of an occupied row, [num_tokens] int64; a view."""
        return self._row_tokens[row, : self.state(row).num_tokens]

    def begin(self, steps: Sequence[RowStep]) -> StepBatch:
        """Append the steps' new blocks to their rows and build the step's indices.

        The rows' cursors move past the tokens of this step. The batch's tensors are views of
        buffers that the next call overwrites.
        """
        self._append_blocks(steps)
        query_starts, context_lens, index = [0], [], []
        for step in steps:
            state = self.state(step.row)
            first = query_starts[-1]
            # The row of a token t is its step's; its position is t + (num_computed - first).
            index.append((step.row, state.num_computed - first, step.num_tokens))
            state.num_computed += step.num_tokens
            query_starts.append(first + step.num_tokens)
            context_lens.append(state.num_computed)
        total = query_starts[-1]
        rows, shifts, counts = torch.tensor(index).to(self._device).T.contiguous()

        step_of = torch.repeat_interleave(counts, output_size=total)
        positions = torch.index_select(shifts, 0, step_of, out=self._positions[:total])
        positions += self._count[:total]
        row_of = torch.index_select(rows, 0, step_of, out=self._scratch[:total])
        token_ids = torch.take(
            self._row_tokens,
            row_of * self._row_tokens.shape[1] + positions,
            out=self._token_ids[:total],
        )
        slots = torch.take(
            self._row_blocks,
            row_of * self._row_blocks.shape[1] + positions // self._block_size,
            out=self._slots[:total],
        )
        slots *= self._block_size
        slots += positions % self._block_size
        num_blocks = -(-max(context_lens) // self._block_size)
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=self._row_blocks[:, :num_blocks].index_select(0, rows),
            block_size=self._block_size,
        )

    def append(self, rows: list[int], token_ids: list[int]) -> None:
        """Add one sampled token to each of `rows`."""
        positions = []
        for row in rows:
            state = self.state(row)
            positions.append(state.num_tokens)
            state.num_tokens += 1
        row_ids, columns, values = torch.tensor([rows, positions, token_ids]).to(self._device)
        self._row_tokens[row_ids, columns] = values

    def _append_blocks(self, steps: Sequence[RowStep]) -> None:
        entries = []
        for step in steps:
            if not step.new_block_ids:
                continue
            known = self.state(step.row).block_ids
            entries += [
                (step.row, index, block_id)
                for index, block_id in enumerate(step.new_block_ids, len(known))
            ]
            known.update(step.new_block_ids)
        if entries:
            rows, columns, block_ids = torch.tensor(entries).to(self._device).T
            self._row_blocks[rows, columns] = block_ids
