"""Checks a plan before it is executed.

A row, block or token id out of range would read or write other memory. Owns all rules for plans;
reads only the rows' state on the host. Must not change anything: a refused plan leaves the engine
as it was.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from charonia.data.step_tensors import RowState
from charonia.errors import PlanRefusedError
from charonia.protocol import (
    KEY_BYTES,
    MAX_LOGPROBS,
    UINT64_MAX,
    BlockSave,
    EngineInfo,
    NewRow,
    RowSampling,
    RowStep,
    StepPlan,
)


@dataclass(frozen=True)
class Progress:
    """An engine's position: the last plan begun, and whether its step failed."""

    epoch: int
    step_id: int
    needs_reset: bool


@dataclass
class _Row:
    """A row's state after the plan's leaves and joins."""

    num_tokens: int
    num_computed: int
    block_ids: Collection[int]
    num_draft_computed: int


def check_plan(
    plan: StepPlan, progress: Progress, rows: Sequence[RowState | None], info: EngineInfo
) -> None:
    """Check that `plan` is the next one and that all its values are in range.

    Raises:
        PlanRefusedError: the plan is not valid; the text names the value and what is accepted.
    """
    _check_sequence(plan, progress)
    occupied = {row: state for row, state in enumerate(rows) if state and not plan.reset}
    _check_distinct("leaves", plan.leaves)
    for row in plan.leaves:
        _require(row in occupied, f"row {row} cannot leave: it is free")
    after: dict[int, RowState | _Row] = dict(occupied)
    for row in plan.leaves:
        del after[row]
    _check_distinct("joins", [new.row for new in plan.joins])
    for new in plan.joins:
        _check_in(f"row {new.row} that joins", new.row, 0, info.max_num_seqs - 1)
        _require(new.row not in after, f"row {new.row} cannot join: it is occupied")
        _check_join(new, info)
        after[new.row] = _Row(
            len(new.token_ids), new.num_computed, new.block_ids, new.num_draft_computed
        )
    _check_copies(plan, info)
    _check_saves(plan.saves, info)
    if plan.loads or plan.discards:
        _check_unused(plan, after.values(), info)
    _check_distinct("rows", [step.row for step in plan.rows])
    for step in plan.rows:
        row_after = after.get(step.row)
        if row_after is None:
            raise PlanRefusedError(f"row {step.row} cannot compute: it is free")
        if not _is_plain(step, row_after, info):
            _check_step(step, row_after, info)
    total = sum(step.num_tokens + step.num_drafts for step in plan.rows)
    total_draft = sum(step.num_draft_tokens for step in plan.rows)
    _require(
        max(total, total_draft) <= info.max_num_batched_tokens,
        f"{max(total, total_draft)} tokens are over max_num_batched_tokens"
        f" ({info.max_num_batched_tokens})",
    )


def _check_sequence(plan: StepPlan, progress: Progress) -> None:
    if plan.reset:
        _require(plan.step_id == 0, f"step_id {plan.step_id} with reset; accepted is 0")
        _check_in("epoch of a reset", plan.epoch, progress.epoch + 1, UINT64_MAX)
        return
    _require(
        not progress.needs_reset,
        f"plan ({plan.epoch}, {plan.step_id}) without reset; the engine needs one, of an epoch"
        f" above {progress.epoch}",
    )
    expected = (progress.epoch, progress.step_id + 1)
    _require(
        (plan.epoch, plan.step_id) == expected,
        f"plan ({plan.epoch}, {plan.step_id}) is out of sequence; accepted is {expected}",
    )


def _check_join(new: NewRow, info: EngineInfo) -> None:
    what = f"row {new.row}"
    # A row at max_model_len could never compute its last token: the next one would not fit.
    num_tokens = len(new.token_ids)
    _check_in(f"{what}: number of token_ids", num_tokens, 1, info.max_model_len - 1)
    _check_ids(f"{what}: token id", new.token_ids, info.vocab_size)
    _check_in(f"{what}: num_prompt", new.num_prompt, 1, num_tokens)
    _check_in(f"{what}: num_computed", new.num_computed, 0, num_tokens - 1)
    most = new.num_computed if info.max_draft_len else 0
    _check_in(f"{what}: num_draft_computed", new.num_draft_computed, 0, most)
    _check_blocks(what, new.block_ids, (), info)
    _require(
        len(new.block_ids) * info.kv.block_size >= new.num_computed,
        f"{what}: {len(new.block_ids)} blocks do not hold {new.num_computed} computed tokens",
    )
    _check_sampling(what, new.sampling, info.vocab_size)


def _check_copies(plan: StepPlan, info: EngineInfo) -> None:
    """Check that every copy is into a block of a joining row."""
    joining = {block_id for new in plan.joins for block_id in new.block_ids}
    _check_distinct("targets of copies", [copy.target for copy in plan.copies])
    for copy in plan.copies:
        _check_in("source of a copy", copy.source, 1, info.num_blocks - 1)
        _require(
            copy.target in joining,
            f"target {copy.target} of a copy is in the table of no row that joins",
        )


def _check_saves(saves: Sequence[BlockSave], info: EngineInfo) -> None:
    for save in saves:
        _check_in("block that is saved", save.block_id, 1, info.num_blocks - 1)
        _check_slot(save.tier, save.slot, save.key, info)


def _check_unused(plan: StepPlan, rows: Iterable[RowState | _Row], info: EngineInfo) -> None:
    """Check that blocks that are loaded or discarded are in no row's table, and are not copied.

    Copies come after both.
    """
    copied = {copy.source for copy in plan.copies}
    held = {block_id for row in rows for block_id in row.block_ids}
    held.update(block_id for step in plan.rows for block_id in step.new_block_ids)
    _check_distinct("targets of loads", [load.block_id for load in plan.loads])
    for load in plan.loads:
        _check_in("target of a load", load.block_id, 1, info.num_blocks - 1)
        _require(
            load.block_id not in held, f"target {load.block_id} of a load is in the table of a row"
        )
        _require(
            load.block_id not in copied, f"target {load.block_id} of a load is the source of a copy"
        )
        _check_slot(load.tier, load.slot, load.key, info)
    held.update(copied, (load.block_id for load in plan.loads))
    _check_distinct("discards", plan.discards)
    for block_id in plan.discards:
        _check_in("block that is discarded", block_id, 1, info.num_blocks - 1)
        _require(block_id not in held, f"block {block_id} that is discarded is in use")


def _check_slot(tier: int, slot: int, key: bytes, info: EngineInfo) -> None:
    sizes = [tier.num_slots for tier in info.kept.tiers] if info.kept else []
    _require(bool(sizes), f"tier {tier}: there are no slower tiers")
    _check_in("tier", tier, 0, len(sizes) - 1)
    _check_in(f"slot of tier {tier}", slot, 0, sizes[tier] - 1)
    _require(len(key) == KEY_BYTES, f"a key has {len(key)} bytes; accepted are {KEY_BYTES}")


def _is_plain(step: RowStep, row: RowState | _Row, info: EngineInfo) -> bool:
    """Return whether a row computes its one pending token, and needs no new block or drafts for it.

    Most steps are like this, and need not go through the slower `_check_step`.
    """
    return (
        step.num_tokens == 1 == row.num_tokens - row.num_computed
        and row.num_tokens < info.max_model_len
        and row.num_tokens <= len(row.block_ids) * info.kv.block_size
        and not (step.num_drafts or step.num_draft_tokens)
        and not (step.draft_ids or step.new_block_ids)
    )


def _check_step(step: RowStep, row: RowState | _Row, info: EngineInfo) -> None:
    what = f"row {step.row}"
    pending = row.num_tokens - row.num_computed
    _check_in(f"{what}: num_tokens", step.num_tokens, 1, pending)
    samples = step.num_tokens == pending
    most = info.max_model_len - row.num_tokens - 1 if samples else 0
    _require(
        not samples or most >= 0,
        f"{what}: its {row.num_tokens} tokens leave no room for another within max_model_len"
        f" ({info.max_model_len})",
    )
    _check_in(f"{what}: num_drafts", step.num_drafts, 0, most)
    _check_drafting(what, step, row, info)
    _check_blocks(what, step.new_block_ids, row.block_ids, info)
    num_blocks = len(row.block_ids) + len(step.new_block_ids)
    end = row.num_computed + step.num_tokens + step.num_drafts
    _require(
        num_blocks * info.kv.block_size >= end,
        f"{what}: {num_blocks} blocks do not hold {end} tokens",
    )


def _check_drafting(what: str, step: RowStep, row: RowState | _Row, info: EngineInfo) -> None:
    """Check a row's drafts: the plan's, or the draft model's, which must have caught up."""
    behind = row.num_tokens - row.num_draft_computed
    most = 0
    if info.max_draft_len and not step.draft_ids:
        # It must not run ahead of the target, because they share the blocks.
        end = min(row.num_computed + step.num_tokens, info.max_draft_len)
        most = max(0, end - row.num_draft_computed)
    _check_in(f"{what}: num_draft_tokens", step.num_draft_tokens, 0, most)
    if step.draft_ids:
        _check_in(f"{what}: number of draft_ids", len(step.draft_ids), *[step.num_drafts] * 2)
        _check_ids(f"{what}: token id of draft_ids", step.draft_ids, info.vocab_size)
    elif step.num_drafts:
        _check_in(f"{what}: num_draft_tokens with drafts", step.num_draft_tokens, *[behind] * 2)
        end = row.num_tokens + step.num_drafts
        _check_in(f"{what}: end of the draft model's tokens", end, 0, info.max_draft_len)


def _check_blocks(
    what: str, block_ids: Sequence[int], known: Collection[int], info: EngineInfo
) -> None:
    if not block_ids:
        return
    for block_id in block_ids:
        _check_in(f"{what}: block id", block_id, 1, info.num_blocks - 1)
        _require(block_id not in known, f"{what}: block {block_id} is in its table already")
    _check_distinct(f"{what}: block_ids", block_ids)
    max_blocks = -(-info.max_model_len // info.kv.block_size)
    num_blocks = len(block_ids) + len(known)
    _check_in(f"{what}: number of blocks", num_blocks, 1, max_blocks)


def _check_sampling(what: str, sampling: RowSampling, vocab_size: int) -> None:
    _check_in(f"{what}: seed", sampling.seed, 0, UINT64_MAX)
    _check_in(f"{what}: temperature", sampling.temperature, 0.0, math.inf)
    _require(0.0 < sampling.top_p <= 1.0, f"{what}: top_p {sampling.top_p}; accepted is (0, 1]")
    _check_in(f"{what}: min_p", sampling.min_p, 0.0, 1.0)
    _require(
        0.0 < sampling.repetition_penalty < math.inf,
        f"{what}: repetition_penalty {sampling.repetition_penalty}; accepted is above 0",
    )
    finite = {
        "temperature": sampling.temperature,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    } | {f"logit_bias of {token_id}": bias for token_id, bias in sampling.logit_bias.items()}
    for name, value in finite.items():
        _require(math.isfinite(value), f"{what}: {name} is {value}; accepted are finite numbers")
    _require(sampling.top_k >= 0, f"{what}: top_k {sampling.top_k}; accepted is at least 0")
    _require(
        sampling.min_tokens >= 0,
        f"{what}: min_tokens {sampling.min_tokens}; accepted is at least 0",
    )
    _check_in(f"{what}: num_logprobs", sampling.num_logprobs, -1, MAX_LOGPROBS)
    _check_in(f"{what}: num_prompt_logprobs", sampling.num_prompt_logprobs, -1, MAX_LOGPROBS)
    _check_ids(f"{what}: token id of logit_bias", sampling.logit_bias, vocab_size)
    _check_ids(f"{what}: token id of stop_ids", sampling.stop_ids, vocab_size)
    _check_ids(f"{what}: token id of allowed_ids", sampling.allowed_ids, vocab_size)
    for word in sampling.bad_words_ids:
        _require(bool(word), f"{what}: an empty sequence in bad_words_ids")
        _check_ids(f"{what}: token id of bad_words_ids", word, vocab_size)


def _check_ids(what: str, ids: Collection[int], vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        _check_in(what, wrong, 0, vocab_size - 1)


def _check_distinct(what: str, ids: Sequence[int]) -> None:
    _require(len(set(ids)) == len(ids), f"{what} name {_repeated(ids)} more than once")


def _repeated(ids: Iterable[int]) -> int | None:
    seen: set[int] = set()
    for value in ids:
        if value in seen:
            return value
        seen.add(value)
    return None


def _check_in(what: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise PlanRefusedError(f"{what} is {value}; accepted is {low} to {high}")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise PlanRefusedError(message)
