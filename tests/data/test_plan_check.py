"""Plans that must be refused, and the proof that what is accepted stays in range."""

import copy
import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.data.plan_check import Progress, _check_step, _is_plain, check_plan
from charonia.data.step_tensors import RowState
from charonia.errors import PlanRefusedError
from charonia.protocol import (
    BlockCopy,
    BlockLoad,
    BlockSave,
    EngineInfo,
    KeptBlocks,
    KVLayout,
    NewRow,
    RowSampling,
    RowStep,
    StepPlan,
    TierInfo,
    decode_request,
    encode,
)
from support.long import long

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, NUM_ROWS, BUDGET, VOCAB = 4, 10, 18, 3, 12, 50
TIERS = {"host": 5, "file": 20}
KEY = b"k" * 16
INFO = EngineInfo(
    epoch=2,
    pids=[1],
    num_blocks=NUM_BLOCKS,
    kv=KVLayout(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        block_size=BLOCK_SIZE,
        dtype="float32",
        bytes_per_block=64,
    ),
    max_model_len=MAX_LEN,
    max_num_seqs=NUM_ROWS,
    max_num_batched_tokens=BUDGET,
    vocab_size=VOCAB,
    eos_token_ids=[0],
    architecture="LlamaForCausalLM",
    dtype="float32",
    device="cpu",
    num_parameters=1,
    max_draft_len=12,
    kept=KeptBlocks(
        hash_secret=b"secret",
        slot_bytes=64,
        tiers=[TierInfo(name=name, num_slots=num, contents=[]) for name, num in TIERS.items()],
    ),
)
PROGRESS = Progress(epoch=2, step_id=5, needs_reset=False)
SAMPLING = RowSampling(seed=1)


def occupied() -> list[RowState | None]:
    """Row 0 decodes (8 tokens in 2 blocks), row 1 is full, row 2 is free."""
    return [
        RowState(SAMPLING, 6, 8, num_computed=7, block_ids={1, 2}, num_draft_computed=5),
        RowState(SAMPLING, 6, num_tokens=MAX_LEN, num_computed=17, block_ids={3, 4, 5, 6, 7}),
        None,
    ]


def plan(**values: Any) -> StepPlan:
    return StepPlan(**({"epoch": 2, "step_id": 6} | values))


def join(**values: Any) -> StepPlan:
    """A plan in which a good row joins, but for `values`."""
    good = NewRow(2, [1, 2, 3, 4, 5], 5, 4, [8, 9], SAMPLING)
    return plan(joins=[msgspec.structs.replace(good, **values)])


def sampling(**values: Any) -> StepPlan:
    return join(sampling=RowSampling(**({"seed": 1} | values)))


def drafting(**values: Any) -> StepPlan:
    """A plan in which the decoding row 0 verifies two drafts of the plan, but for `values`."""
    good = {"num_drafts": 2, "draft_ids": [3, 4], "new_block_ids": [8]}
    return plan(rows=[RowStep(**({"row": 0, "num_tokens": 1} | good | values))])


def guessing(**values: Any) -> StepPlan:
    """The same where the draft model is to guess; it has computed 5 of the row's 8 tokens."""
    return drafting(**({"draft_ids": [], "num_draft_tokens": 3} | values))


GOOD = {
    "nothing": plan(),
    "decode": plan(rows=[RowStep(0, 1)]),
    "drafts": drafting(),
    "as many drafts as there is room for": drafting(
        num_drafts=9, draft_ids=[1] * 9, new_block_ids=[8, 7, 9]
    ),
    "guesses": guessing(),
    "guesses up to the end of what the draft model can take": guessing(num_drafts=4),
    "the draft model catches up": guessing(num_drafts=0, new_block_ids=[], num_draft_tokens=2),
    "a row joins with KV of the draft model": join(num_draft_computed=4),
    "a row joins with a copy of another's block": plan(
        joins=join().joins, copies=[BlockCopy(2, 9)]
    ),
    "copies one after the other": plan(
        joins=join().joins, copies=[BlockCopy(2, 9), BlockCopy(9, 8)]
    ),
    "saves and loads": plan(
        saves=[BlockSave(9, 0, 4, KEY, True), BlockSave(9, 1, 19, KEY, True)],
        loads=[BlockLoad(1, 19, 8, KEY), BlockLoad(0, 0, 9, KEY)],
    ),
    "a load into a block of a row that leaves": plan(leaves=[0], loads=[BlockLoad(0, 0, 1, KEY)]),
    "discards": plan(leaves=[0], discards=[1, 8], rows=[], saves=[BlockSave(8, 0, 0, KEY, False)]),
    "a save of a row's block": plan(saves=[BlockSave(1, 0, 0, KEY, False)]),
    "join and compute": plan(joins=join().joins, rows=[RowStep(2, 1), RowStep(0, 1)]),
    "the row of one that leaves": plan(
        leaves=[1],
        joins=[NewRow(1, [1] * 12, 1, 0, [], SAMPLING)],
        rows=[RowStep(1, 12, [3, 4, 5])],
    ),
    "reset": plan(epoch=3, step_id=0, reset=True, joins=[NewRow(0, [1], 1, 0, [1], SAMPLING)]),
    "reset far ahead": plan(epoch=2**64 - 1, step_id=0, reset=True),
    "all of sampling": sampling(
        seed=2**64 - 1,
        temperature=0.0,
        top_k=3,
        min_p=1.0,
        logit_bias={0: -100.0, 49: 100.0},
        bad_words_ids=[[0], [1, 49]],
        allowed_ids=(49, 0),
        min_tokens=3,
        stop_ids=[0, 49],
        num_logprobs=20,
        num_prompt_logprobs=0,
    ),
}

BAD = {
    "a copy of the null block": plan(joins=join().joins, copies=[BlockCopy(0, 9)]),
    "a copy of a block beyond the pool": plan(joins=join().joins, copies=[BlockCopy(10, 9)]),
    "a copy into the null block": plan(joins=join().joins, copies=[BlockCopy(2, 0)]),
    "a copy into a block beyond the pool": plan(joins=join().joins, copies=[BlockCopy(2, 10)]),
    "a copy into the block of a row that goes on": plan(copies=[BlockCopy(2, 1)]),
    "two copies into one block": plan(
        joins=join().joins, copies=[BlockCopy(2, 9), BlockCopy(1, 9)]
    ),
    "a save of the null block": plan(saves=[BlockSave(0, 0, 0, KEY, False)]),
    "a save of a block beyond the pool": plan(saves=[BlockSave(10, 0, 0, KEY, False)]),
    "a save to a tier that is not there": plan(saves=[BlockSave(9, 2, 0, KEY, False)]),
    "a save to a negative tier": plan(saves=[BlockSave(9, -1, 0, KEY, False)]),
    "a save to a slot beyond the tier": plan(saves=[BlockSave(9, 0, 5, KEY, False)]),
    "a save to a negative slot": plan(saves=[BlockSave(9, 0, -1, KEY, False)]),
    "a save of a short key": plan(saves=[BlockSave(9, 0, 0, KEY[1:], False)]),
    "a load into the null block": plan(loads=[BlockLoad(0, 0, 0, KEY)]),
    "a load into a block beyond the pool": plan(loads=[BlockLoad(0, 0, 10, KEY)]),
    "a load into a row's block": plan(loads=[BlockLoad(0, 0, 2, KEY)]),
    "a load into the block of a row that joins": plan(
        joins=join().joins, loads=[BlockLoad(0, 0, 9, KEY)]
    ),
    "a load into a row's new block": plan(
        rows=[RowStep(0, 1, [8])], loads=[BlockLoad(0, 0, 8, KEY)]
    ),
    "two loads into one block": plan(loads=[BlockLoad(0, 0, 9, KEY), BlockLoad(0, 1, 9, KEY)]),
    "a load into a block that is copied": plan(
        joins=join(block_ids=[9]).joins, copies=[BlockCopy(8, 9)], loads=[BlockLoad(0, 0, 8, KEY)]
    ),
    "a discard of the null block": plan(discards=[0]),
    "a discard of a block beyond the pool": plan(discards=[10]),
    "a discard twice": plan(discards=[9, 9]),
    "a discard of a row's block": plan(discards=[1]),
    "a discard of a row's new block": plan(rows=[RowStep(0, 1, [8])], discards=[8]),
    "a discard of the block of a row that joins": plan(joins=join().joins, discards=[9]),
    "a discard of a block that is loaded": plan(loads=[BlockLoad(0, 0, 9, KEY)], discards=[9]),
    "a discard of a block that is copied": plan(
        joins=join(block_ids=[9]).joins, copies=[BlockCopy(8, 9)], discards=[8]
    ),
    "a load from a tier that is not there": plan(loads=[BlockLoad(2, 0, 9, KEY)]),
    "a load from a slot beyond the tier": plan(loads=[BlockLoad(1, 20, 9, KEY)]),
    "a load of a long key": plan(loads=[BlockLoad(0, 0, 9, KEY + KEY)]),
    "a negative number of drafts": drafting(num_drafts=-1),
    "drafts without room for one more token": drafting(
        num_drafts=10, draft_ids=[1] * 10, new_block_ids=[8, 7, 9]
    ),
    "drafts without blocks": drafting(num_drafts=1, draft_ids=[1], new_block_ids=[]),
    "fewer draft ids than drafts": drafting(draft_ids=[3]),
    "more draft ids than drafts": drafting(draft_ids=[3, 4, 5]),
    "draft ids without drafts": drafting(num_drafts=0),
    "a draft id out of range": drafting(draft_ids=[3, VOCAB]),
    "a negative draft id": drafting(draft_ids=[3, -1]),
    "drafts behind a chunk": plan(
        joins=[NewRow(2, [1] * 9, 9, 0, [8, 9], SAMPLING)],
        rows=[RowStep(2, 8, [], num_drafts=1, draft_ids=[1])],
    ),
    "guesses before the draft model has caught up": guessing(num_draft_tokens=2),
    "guesses without anything to compute": guessing(num_draft_tokens=0),
    "the draft model ahead of the row": guessing(num_draft_tokens=4),
    "a negative number of tokens for the draft model": guessing(num_drafts=0, num_draft_tokens=-1),
    "the draft model computes where the plan drafts": drafting(num_draft_tokens=3),
    "guesses beyond what the draft model can take": guessing(num_drafts=5, new_block_ids=[8, 9]),
    "the draft model ahead of the target": plan(
        joins=[NewRow(2, [1] * 9, 9, 4, [8, 9], SAMPLING, num_draft_computed=4)],
        rows=[RowStep(2, 3, [], num_draft_tokens=4)],
    ),
    "a row joins with more KV of the draft model": join(num_draft_computed=5),
    "a row joins with negative KV of the draft model": join(num_draft_computed=-1),
    "drafts over the budget": plan(
        joins=[NewRow(2, [1] * 9, 9, 0, [3, 8, 9], SAMPLING)],
        rows=[RowStep(2, 9, []), RowStep(0, 1, [7], num_drafts=3, draft_ids=[1, 2, 3])],
    ),
    "the draft model over the budget": plan(
        joins=[NewRow(2, [1] * 12, 12, 0, [3, 8, 9], SAMPLING)],
        rows=[RowStep(2, 11, [], num_draft_tokens=11), RowStep(0, 1, [], num_draft_tokens=3)],
    ),
    "epoch behind": plan(epoch=1),
    "epoch ahead without reset": plan(epoch=3),
    "step repeated": plan(step_id=5),
    "step skipped": plan(step_id=7),
    "step negative": plan(step_id=-1),
    "reset of the same epoch": plan(epoch=2, step_id=0, reset=True),
    "reset of an older epoch": plan(epoch=1, step_id=0, reset=True),
    "reset at a later step": plan(epoch=3, step_id=1, reset=True),
    "reset beyond 64 bits": plan(epoch=2**64, step_id=0, reset=True),
    "a leave after a reset": plan(epoch=3, step_id=0, reset=True, leaves=[0]),
    "a step of a row that the reset dropped": plan(
        epoch=3, step_id=0, reset=True, rows=[RowStep(0, 1)]
    ),
    "a free row leaves": plan(leaves=[2]),
    "a row out of range leaves": plan(leaves=[3]),
    "a negative row leaves": plan(leaves=[-1]),
    "a row leaves twice": plan(leaves=[0, 0]),
    "an occupied row joins": join(row=0),
    "a row out of range joins": join(row=3),
    "a negative row joins": join(row=-1),
    "a row joins twice": plan(joins=join().joins * 2),
    "no tokens": join(token_ids=[]),
    "too many tokens": join(token_ids=[1] * MAX_LEN),
    "token id beyond the vocabulary": join(token_ids=[1, 2, 3, 4, 50]),
    "token id negative": join(token_ids=[1, 2, -3, 4, 5]),
    "token id beyond 64 bits": join(token_ids=[1, 2, 3, 4, 2**64 - 1]),
    "no prompt": join(num_prompt=0),
    "prompt longer than all tokens": join(num_prompt=6),
    "computed negative": join(num_computed=-1),
    "all computed": join(num_computed=5),
    "more computed than known": join(num_computed=100),
    "computed tokens without blocks": join(block_ids=[]),
    "the null block": join(block_ids=[8, 0]),
    "a negative block": join(block_ids=[8, -1]),
    "a block beyond the pool": join(block_ids=[8, 10]),
    "a block twice": join(block_ids=[8, 8]),
    "more blocks than a row can have": join(block_ids=[1, 2, 3, 4, 5, 6]),
    "seed negative": sampling(seed=-1),
    "seed beyond 64 bits": sampling(seed=2**64),
    "temperature negative": sampling(temperature=-0.1),
    "temperature infinite": sampling(temperature=math.inf),
    "temperature not a number": sampling(temperature=math.nan),
    "top_p zero": sampling(top_p=0.0),
    "top_p above one": sampling(top_p=1.1),
    "top_p not a number": sampling(top_p=math.nan),
    "top_k negative": sampling(top_k=-1),
    "min_p above one": sampling(min_p=1.5),
    "repetition penalty zero": sampling(repetition_penalty=0.0),
    "repetition penalty infinite": sampling(repetition_penalty=math.inf),
    "presence penalty not a number": sampling(presence_penalty=math.nan),
    "frequency penalty infinite": sampling(frequency_penalty=-math.inf),
    "bias of a token beyond the vocabulary": sampling(logit_bias={50: 1.0}),
    "bias not a number": sampling(logit_bias={1: math.nan}),
    "stop id beyond the vocabulary": sampling(stop_ids=[50]),
    "bad word beyond the vocabulary": sampling(bad_words_ids=[[1], [2, 50]]),
    "allowed token beyond the vocabulary": sampling(allowed_ids=(1, 50)),
    "allowed token below the vocabulary": sampling(allowed_ids=(1, -1)),
    "bad word of nothing": sampling(bad_words_ids=[[]]),
    "min_tokens negative": sampling(min_tokens=-1),
    "too many logprobs": sampling(num_logprobs=21),
    "logprobs below none": sampling(num_logprobs=-2),
    "too many prompt logprobs": sampling(num_prompt_logprobs=21),
    "a free row computes": plan(rows=[RowStep(2, 1)]),
    "a row that left computes": plan(leaves=[0], rows=[RowStep(0, 1)]),
    "a row out of range computes": plan(rows=[RowStep(3, 1)]),
    "a negative row computes": plan(rows=[RowStep(-1, 1)]),
    "a row computes twice": plan(rows=[RowStep(0, 1), RowStep(0, 1)]),
    "no tokens to compute": plan(rows=[RowStep(0, 0)]),
    "fewer than no tokens": plan(rows=[RowStep(0, -1)]),
    "more tokens than known": plan(rows=[RowStep(0, 2)]),
    "a full row samples": plan(rows=[RowStep(1, 1)]),
    "a new block that the row has": plan(rows=[RowStep(0, 1, [1])]),
    "a new block twice": plan(rows=[RowStep(0, 1, [8, 8])]),
    "the null block as new block": plan(rows=[RowStep(0, 1, [0])]),
    "a new block beyond the pool": plan(rows=[RowStep(0, 1, [10])]),
    "tokens without a block": plan(
        joins=[NewRow(2, [1] * 9, 9, 0, [8, 9], SAMPLING)], rows=[RowStep(2, 9)]
    ),
    "more tokens than the budget": plan(
        joins=[NewRow(2, [1] * 13, 13, 0, [8, 9, 1, 2], SAMPLING)], rows=[RowStep(2, 13)]
    ),
    "more tokens than the budget in all": plan(
        joins=[NewRow(2, [1] * 12, 12, 0, [8, 9, 1], SAMPLING)],
        rows=[RowStep(0, 1), RowStep(2, 12)],
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_plan_is_accepted(name: str) -> None:
    check_plan(GOOD[name], PROGRESS, occupied(), INFO)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plan_is_refused_and_nothing_changes(name: str) -> None:
    rows = occupied()
    with pytest.raises(PlanRefusedError) as caught:
        check_plan(BAD[name], PROGRESS, rows, INFO)
    assert str(caught.value)
    assert rows == occupied()


def test_after_a_failed_step_only_a_reset_is_accepted() -> None:
    failed = Progress(epoch=2, step_id=5, needs_reset=True)
    with pytest.raises(PlanRefusedError, match="needs one, of an epoch above 2"):
        check_plan(plan(), failed, occupied(), INFO)
    check_plan(plan(epoch=3, step_id=0, reset=True), failed, occupied(), INFO)


def test_the_message_names_the_value_and_what_is_accepted() -> None:
    with pytest.raises(PlanRefusedError, match=r"^row 2: block id is 10; accepted is 1 to 9$"):
        check_plan(BAD["a block beyond the pool"], PROGRESS, occupied(), INFO)


def test_without_slower_tiers_nothing_is_saved_or_loaded() -> None:
    without = msgspec.structs.replace(INFO, kept=None)
    for name in ("saves and loads", "a save of a row's block"):
        with pytest.raises(PlanRefusedError, match=r"tier 0: there are no slower tiers"):
            check_plan(GOOD[name], PROGRESS, occupied(), without)


number = st.one_of(
    st.integers(-2, 12), st.sampled_from([17, 18, 49, 50, 2**31, 2**63, 2**64 - 1, -(2**63)])
)
samplings = st.builds(
    RowSampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 60),
    logit_bias=st.dictionaries(st.integers(0, 49), st.floats(-100, 100), max_size=2),
    bad_words_ids=st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=2), max_size=2),
    stop_ids=st.lists(st.integers(0, 49), max_size=2),
    allowed_ids=st.lists(st.integers(0, 49), max_size=2).map(tuple),
)


slots = st.one_of(
    *(st.tuples(st.just(tier), st.integers(0, num - 1)) for tier, num in enumerate(TIERS.values()))
)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """A plan that is good but for its total of tokens, or one with a single number changed."""
    is_reset = draw(st.booleans())
    rows = {row: state for row, state in enumerate(occupied()) if state and not is_reset}
    leaves = draw(st.lists(st.sampled_from(sorted(rows)), unique=True)) if rows else []
    pending, tables = {}, {}
    for row in set(rows) - set(leaves):
        pending[row] = (rows[row].num_computed, rows[row].num_tokens, rows[row].num_draft_computed)
        tables[row] = rows[row].block_ids
    joins = []
    for row in draw(st.lists(st.sampled_from(range(NUM_ROWS)), unique=True)):
        if row in pending:
            continue
        token_ids = draw(st.lists(st.integers(0, 49), min_size=1, max_size=MAX_LEN - 1))
        num_computed = draw(st.integers(0, len(token_ids) - 1))
        num_blocks = -(-num_computed // BLOCK_SIZE)
        block_ids = draw(st.permutations(range(1, NUM_BLOCKS)))[:num_blocks]
        num_prompt = draw(st.integers(1, len(token_ids)))
        num_draft = draw(st.integers(0, min(num_computed, INFO.max_draft_len)))
        sampling = draw(samplings)
        joins.append(
            NewRow(row, token_ids, num_prompt, num_computed, block_ids, sampling, num_draft)
        )
        pending[row] = (num_computed, len(token_ids), num_draft)
        tables[row] = set(block_ids)
    steps = []
    for row in draw(st.lists(st.sampled_from(sorted(pending)), unique=True)) if pending else []:
        num_computed, num_tokens, num_draft = pending[row]
        count = draw(st.integers(1, num_tokens - num_computed))
        room = MAX_LEN - num_tokens - 1 if count == num_tokens - num_computed else 0
        behind = num_tokens - num_draft
        num_drafts, ids, catch_up = draw(st.integers(0, max(room, 0))), [], 0
        if num_drafts and num_tokens + num_drafts <= INFO.max_draft_len and draw(st.booleans()):
            catch_up = behind
        else:
            ids = draw(st.lists(st.integers(0, 49), min_size=num_drafts, max_size=num_drafts))
        missing = -(-(num_computed + count + num_drafts) // BLOCK_SIZE) - len(tables[row])
        unused = [block_id for block_id in range(1, NUM_BLOCKS) if block_id not in tables[row]]
        new = unused[: max(missing, 0)]
        steps.append(RowStep(row, count, new, num_drafts, ids, catch_up))
    targets = sorted({block_id for join in joins for block_id in join.block_ids})
    copies = [
        BlockCopy(draw(st.integers(1, NUM_BLOCKS - 1)), target)
        for target in (draw(st.lists(st.sampled_from(targets), unique=True)) if targets else [])
    ]
    held = {block_id for table in tables.values() for block_id in table}
    held.update(block_id for step in steps for block_id in step.new_block_ids)
    free = sorted(set(range(1, NUM_BLOCKS)) - held)
    saves = [
        BlockSave(draw(st.integers(1, NUM_BLOCKS - 1)), *slot, KEY, draw(st.booleans()))
        for slot in draw(st.lists(slots, max_size=2))
    ]
    loads = [
        BlockLoad(*draw(slots), block_id, KEY)
        for block_id in (draw(st.lists(st.sampled_from(free), unique=True)) if free else [])
    ]
    free = [block_id for block_id in free if block_id not in {load.block_id for load in loads}]
    discards = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
    epoch, step_id = (3, 0) if is_reset else (2, 6)
    good = StepPlan(
        epoch=epoch,
        step_id=step_id,
        reset=is_reset,
        leaves=leaves,
        joins=joins,
        saves=saves,
        loads=loads,
        discards=discards,
        copies=copies,
        rows=steps,
    )
    return with_one_number_changed(draw, good) if draw(st.booleans()) else good


def with_one_number_changed(draw: st.DrawFn, good: StepPlan) -> StepPlan:
    values = msgspec.to_builtins(good)
    places: list[tuple[Any, Any]] = []

    def find(part: Any) -> None:
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if isinstance(value, dict | list):
                find(value)
            elif isinstance(value, int) and not isinstance(value, bool):
                places.append((part, key))

    find(values)
    part, key = draw(st.sampled_from(places))
    part[key] = draw(number)
    return msgspec.convert(values, StepPlan)


@settings(max_examples=100)
@given(plan=plans())
def test_an_accepted_plan_touches_nothing_out_of_range(plan: StepPlan) -> None:
    carry_out_if_accepted(plan)


@long
@settings(max_examples=600)
@given(plan=plans())
def test_nor_does_any_of_many_more(plan: StepPlan) -> None:
    carry_out_if_accepted(plan)


def carry_out_if_accepted(plan: StepPlan) -> None:
    """What is accepted is carried out on plain lists, and every index is looked at."""
    plan = decode_request(encode(plan))
    rows = occupied()
    before = copy.deepcopy(rows)
    try:
        check_plan(plan, PROGRESS, rows, INFO)
    except PlanRefusedError:
        assert rows == before
        return
    assert rows == before
    tables = {row: state for row, state in enumerate(rows) if state and not plan.reset}
    for row in plan.leaves:
        del tables[row]
    for new in plan.joins:
        assert new.row in range(NUM_ROWS)
        assert new.row not in tables
        assert all(token_id in range(VOCAB) for token_id in new.token_ids)
        tables[new.row] = RowState(
            new.sampling,
            new.num_prompt,
            len(new.token_ids),
            new.num_computed,
            set(new.block_ids),
            new.num_draft_computed,
        )
    joining = {block_id for new in plan.joins for block_id in new.block_ids}
    for one in plan.copies:
        assert one.source in range(1, NUM_BLOCKS)
        assert one.target in joining
    for one in (*plan.saves, *plan.loads):
        assert one.block_id in range(1, NUM_BLOCKS)
        assert one.tier in range(len(TIERS))
        assert one.slot in range([*TIERS.values()][one.tier])
    held = {block_id for state in tables.values() for block_id in state.block_ids}
    held.update(block_id for step in plan.rows for block_id in step.new_block_ids)
    loaded = {load.block_id for load in plan.loads}
    assert not held & loaded
    assert not (held | loaded) & set(plan.discards)
    assert not {one.source for one in plan.copies} & {*loaded, *plan.discards}
    assert set(plan.discards) <= set(range(1, NUM_BLOCKS))
    computed = by_draft_model = 0
    for step in plan.rows:
        state = tables[step.row]
        table = [*state.block_ids, *step.new_block_ids]
        assert len(set(table)) == len(table)
        assert all(block_id in range(1, NUM_BLOCKS) for block_id in table)
        end = state.num_computed + step.num_tokens
        assert state.num_computed < end <= state.num_tokens
        assert end <= len(table) * BLOCK_SIZE
        assert end + (end == state.num_tokens) <= MAX_LEN
        computed += step.num_tokens + step.num_drafts
        by_draft_model += step.num_draft_tokens
        draft_end = state.num_draft_computed + step.num_draft_tokens
        assert step.num_draft_tokens >= 0
        assert draft_end <= min(end, INFO.max_draft_len) or not step.num_draft_tokens
        if step.num_drafts:
            assert end == state.num_tokens
            assert end + step.num_drafts <= len(table) * BLOCK_SIZE
            assert end + step.num_drafts + 1 <= MAX_LEN
            assert all(token_id in range(VOCAB) for token_id in step.draft_ids)
            if step.draft_ids:
                assert len(step.draft_ids) == step.num_drafts
            else:
                assert draft_end == state.num_tokens <= INFO.max_draft_len - step.num_drafts
        assert step.num_drafts >= len(step.draft_ids)
    assert max(computed, by_draft_model) <= BUDGET


def test_without_a_draft_model_nothing_can_be_guessed() -> None:
    info = msgspec.structs.replace(INFO, max_draft_len=0)
    rows: list[RowState | None] = [RowState(SAMPLING, 6, 8, num_computed=7, block_ids={1, 2})]
    check_plan(drafting(), PROGRESS, rows, info)
    with pytest.raises(PlanRefusedError, match="num_draft_tokens is 3; accepted is 0 to 0"):
        check_plan(guessing(), PROGRESS, rows, info)


def small_steps() -> Iterator[tuple[RowStep, RowState]]:
    """All steps of small numbers, of rows of up to 9 tokens in up to 3 blocks."""
    rows = [
        RowState(SAMPLING, 1, num_tokens, num_computed, set(range(1, 1 + num_blocks)), num_draft)
        for num_tokens in range(1, 10)
        for num_computed in range(max(0, num_tokens - 2), num_tokens)
        for num_blocks in range(4)
        for num_draft in {0, num_computed}
    ]
    steps = [
        RowStep(0, num_tokens, new_block_ids, num_drafts, draft_ids, num_draft_tokens)
        for num_tokens, new_block_ids, num_drafts, draft_ids, num_draft_tokens in product(
            (-1, 0, 1, 2), ([], [0], [1], [4]), (-1, 0, 1), ([], [1], [VOCAB]), (-1, 0, 1)
        )
    ]
    return product(steps, rows)


def is_refused(check: Callable[..., None], *args: Any) -> bool:
    try:
        check(*args)
    except PlanRefusedError:
        return True
    return False


@pytest.mark.parametrize("max_draft_len", [0, 9])
def test_a_step_is_refused_by_the_whole_check_as_by_its_own_and_where_it_is_plain_by_neither(
    max_draft_len: int,
) -> None:
    info = msgspec.structs.replace(INFO, max_model_len=9, max_draft_len=max_draft_len)
    num_plain = num_refused = 0
    for step, row in small_steps():
        refused = is_refused(_check_step, step, row, info)
        if _is_plain(step, row, info):
            assert not refused, (step, row)
            num_plain += 1
        whole = is_refused(check_plan, plan(rows=[step]), PROGRESS, [row], info)
        assert whole == refused, (step, row)
        num_refused += refused
    assert num_plain > 10
    assert num_refused > 1000
