"""How much memory the kernels keep. They give none back, so each case is a process of its own."""

import pytest
import torch

from charonia.data.ops.base import StepBatch
from charonia.data.usage import used_bytes
from support.attention import rotation_of
from support.batches import random_pages
from support.kernels import ISAS, kernels_for, native_ops, packed
from support.ranks import Ranks

CPU = torch.device("cpu")
DIM, NUM_BLOCKS, NUM_TOKENS, NUM_HEADS = 64, 40, 60, 24
MIB = 2**20


def long_step(context_len: int) -> StepBatch:
    """The last tokens of a long context, all of whose blocks are some few."""
    positions = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    return StepBatch(
        token_ids=positions,
        positions=positions,
        slots=positions,
        query_starts=[0, NUM_TOKENS],
        context_lens=[context_len],
        block_tables=(torch.arange(-(-context_len // 16)) * 7 % NUM_BLOCKS)[None],
        block_size=16,
    )


def attend_by_many_threads(isa: str, context_len: int) -> tuple[int, bool]:
    """Attend where each of many threads takes a chunk of the context at a time.

    Returns:
        bytes that are kept, and whether one thread has the same result.
    """
    generator = torch.Generator().manual_seed(0)
    pages = packed(random_pages(generator, NUM_BLOCKS, 16, 1, DIM, torch.bfloat16))
    query = torch.randn(NUM_TOKENS, NUM_HEADS, DIM, generator=generator).to(torch.bfloat16)
    attend, rotation = kernels_for(isa).paged_attention, rotation_of(DIM, torch.bfloat16)
    ops = native_ops(isa, 1)
    step = ops.begin(long_step(context_len), rotation)
    expected = attend(query, step, pages)
    ops = native_ops(isa, 16)
    attend(query, ops.begin(long_step(600), rotation), pages)
    before = used_bytes(CPU)
    actual = attend(query, step, pages)
    return used_bytes(CPU) - before, torch.equal(actual, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_a_longer_context_takes_no_more_memory(isa: str) -> None:
    ranks = Ranks(1)
    try:
        ranks.start(0, attend_by_many_threads, isa, 30_000)
        kept, is_equal = ranks.result(0)
    finally:
        ranks.close()
    assert is_equal
    assert kept < 24 * MIB, f"{kept / MIB:.0f} MiB"
