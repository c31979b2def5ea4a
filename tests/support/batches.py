"""Random steps for the operations: batches over shuffled block tables, and their pages."""

import torch
from torch import Tensor

from charonia.data.ops.base import Pages, StepBatch


def random_pages(
    generator: torch.Generator,
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> Pages:
    """Pages as `ComposedOps` lay them out, [num_blocks, block_size, kv_heads, dim]."""
    shape = (num_blocks, block_size, kv_heads, dim)
    keys, values = torch.randn(2, *shape, generator=generator).to(dtype)
    keys[0] = values[0] = 0  # the null block
    return Pages(keys, values)


def random_batch(
    generator: torch.Generator, block_size: int, rows: list[tuple[int, int]], num_blocks: int
) -> StepBatch:
    """A batch of rows of (tokens before this step, tokens of this step)."""
    context_lens = [before + new for before, new in rows]
    blocks = [-(-length // block_size) for length in context_lens]
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = torch.zeros(len(rows), max(blocks), dtype=torch.int64)
    positions, slots, query_starts = [], [], [0]
    for row, (before, new) in enumerate(rows):
        tables[row, : blocks[row]] = torch.tensor([free.pop() for _ in range(blocks[row])])
        query_starts.append(query_starts[-1] + new)
        for position in range(before, before + new):
            positions.append(position)
            block = int(tables[row, position // block_size])
            slots.append(block * block_size + position % block_size)
    return StepBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=tables,
        block_size=block_size,
    )


def moved(batch: StepBatch, device: str) -> StepBatch:
    """Return the batch on another device."""
    values = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in vars(batch).items()
    }
    return StepBatch(**values)
