"""The index tensors of a step, against plain loops over positions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.data.step_tensors import Span, StepTensors
from charonia.protocol import NewRow, RowSampling, RowStep

SAMPLING = RowSampling(seed=0)


def make_tensors(num_rows: int = 2) -> StepTensors:
    return StepTensors(
        num_rows=num_rows,
        max_model_len=8,
        block_size=4,
        max_num_batched_tokens=8,
        device=torch.device("cpu"),
    )


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 1000),
)
def test_a_steps_indices_follow_the_block_tables(
    rows: list[tuple[int, int]], block_size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = StepTensors(
        num_rows=6,
        max_model_len=64,
        block_size=block_size,
        max_num_batched_tokens=100,
        device=torch.device("cpu"),
    )
    row_ids = torch.randperm(6, generator=generator).tolist()
    token_ids, positions, slots, tables = [], [], [], []
    steps = []
    for row, (computed, count) in zip(row_ids, rows, strict=False):
        end = computed + count
        known = torch.randint(0, 500, (end + 2,), generator=generator).tolist()
        num_blocks = -(-end // block_size)
        table = torch.randint(1, 1000, (num_blocks,), generator=generator).tolist()
        table = list(dict.fromkeys(table))
        while len(table) < num_blocks:
            table.append(1000 + len(table))
        cut = -(-computed // block_size)
        tensors.join(NewRow(row, known, len(known), computed, table[:cut], SAMPLING))
        steps.append(RowStep(row, count, table[cut:]))
        for position in range(computed, end):
            token_ids.append(known[position])
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
        tables.append(table)
    tensors.begin(steps)
    batch = tensors.batch(tensors.advance(steps))
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.context_lens == [computed + count for computed, count in rows]
    assert batch.query_starts[-1] == len(positions)
    for row, table in enumerate(tables):
        assert batch.block_tables[row, : len(table)].tolist() == table
    assert [tensors.state(step.row).num_computed for step in steps] == batch.context_lens


def test_sampled_tokens_are_appended_to_their_rows() -> None:
    tensors = make_tensors(num_rows=3)
    tensors.join(NewRow(2, [5, 6], 2, 0, [1], SAMPLING))
    tensors.join(NewRow(0, [7], 1, 0, [2], SAMPLING))
    tensors.commit(0, [8], 0)
    tensors.commit(2, [9], 0)
    assert tensors.token_ids(0).tolist() == [7, 8]
    assert tensors.token_ids(2).tolist() == [5, 6, 9]


def test_drafts_of_the_plan_are_computed_behind_the_known_tokens() -> None:
    tensors = make_tensors()
    tensors.join(NewRow(1, [4, 5, 6], 3, 2, [3], SAMPLING))
    steps = [RowStep(1, 1, [9], num_drafts=2, draft_ids=[7, 8])]
    tensors.begin(steps)
    batch = tensors.batch(tensors.advance(steps))
    assert batch.token_ids.tolist() == [6, 7, 8]
    assert batch.slots.tolist() == [14, 15, 36]
    assert batch.context_lens == [5]
    assert (tensors.state(1).num_computed, tensors.state(1).num_tokens) == (3, 3)
    assert tensors.drafts(1, 2) == [7, 8]
    assert tensors.token_ids(1, 1).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("run", "computed", "draft_computed"),
    [([10], 3, 3), ([7, 10], 4, 4), ([7, 8, 10], 5, 5), ([7, 8, 9, 10], 6, 5)],
)
def test_cursors_stand_behind_the_last_accepted_draft(
    run: list[int], computed: int, draft_computed: int
) -> None:
    tensors = make_tensors()
    tensors.join(NewRow(0, [4, 5, 6], 3, 2, [3, 2], SAMPLING, num_draft_computed=1))
    steps = [RowStep(0, 1, [], num_drafts=3, num_draft_tokens=2)]
    tensors.begin(steps)
    assert tensors.advance_draft(steps) == [Span(0, 1, 2)]
    tensors.put_drafts([0], 0, [7])
    tensors.put_drafts([0], 1, [8])
    tensors.put_drafts([0], 2, [9])
    assert tensors.advance(steps) == [Span(0, 2, 4)]
    tensors.commit(0, run, 3)
    state = tensors.state(0)
    assert tensors.token_ids(0).tolist() == [4, 5, 6, *run]
    assert (state.num_computed, state.num_draft_computed) == (computed, draft_computed)


def test_a_row_that_another_request_takes_over_shows_nothing_of_the_first() -> None:
    tensors = make_tensors()
    tensors.join(NewRow(0, [1, 2, 3, 4, 5, 6], 6, 0, [7, 8], SAMPLING))
    tensors.leave(0)
    tensors.join(NewRow(0, [9], 1, 0, [5], SAMPLING))
    tensors.join(NewRow(1, [4] * 6, 6, 5, [2, 3], SAMPLING))
    steps = [RowStep(0, 1), RowStep(1, 1)]
    tensors.begin(steps)
    batch = tensors.batch(tensors.advance(steps))
    assert batch.token_ids.tolist() == [9, 4]
    assert batch.slots.tolist() == [20, 13]
    assert batch.block_tables.tolist() == [[5, 0], [2, 3]]
    assert tensors.token_ids(0).tolist() == [9]
