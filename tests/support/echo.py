"""A data plane without torch, for tests: its KV cache stores the token ids written to each slot.

To produce a token it gathers the prefix *through the block table it was given* and hashes it.
Whatever goes wrong in paging, caching, preemption, chunking, speculation or recovery changes the
output. Its draft model has a cache of the same kind, guesses right three times out of four, and
refuses to guess from a cache that does not hold the row's tokens.

Steps are executed in the order of their submission, each of them as early or as late as an engine
could: when it is submitted, or when a result is asked for that needs it. Loading it takes as long
as a test says, by a clock that a test gives.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from charonia.control import Request
from charonia.errors import (
    CharoniaError,
    EngineDiedError,
    EngineUnloadedError,
    PlanRefusedError,
    ServerStoppingError,
    StepFailedError,
)
from charonia.protocol import (
    BlockLoad,
    BlockSave,
    EngineInfo,
    KeptBlocks,
    KVLayout,
    NewRow,
    RowResult,
    RowStep,
    SlotContent,
    StepPlan,
    StepResult,
    TierInfo,
    TokenLogprobs,
)

UNWRITTEN = -1
SLOT_BYTES = 2**19  # as if a block of an engine with slower tiers were so large


def echo_token(token_ids: list[int], seed: int, vocab_size: int) -> int:
    """The token that follows `token_ids`: a hash of all of them and the seed."""
    digest = blake2b(repr((seed, token_ids)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def echo_guess(token_ids: list[int], seed: int, vocab_size: int) -> int:
    """Guess the next token as the draft model does: three times out of four it is right."""
    is_wrong = echo_token(token_ids, seed + 1, 4) == 0
    return (echo_token(token_ids, seed, vocab_size) + is_wrong) % vocab_size


class EchoDrafter:
    """A drafter of the control plane that guesses as `echo_guess` does, or nothing at all."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.forgotten: list[str] = []

    def begin_step(self) -> None:
        pass

    def propose(self, request: Request, max_tokens: int) -> list[int]:
        assert max_tokens >= 1
        assert request.key not in self.forgotten
        if echo_token(request.token_ids, 7, 8) == 0:
            return []
        tokens = list(request.token_ids)
        for _ in range(max_tokens):
            tokens.append(echo_guess(tokens, request.sampling.seed, self.vocab_size))
        return tokens[len(request.token_ids) :]

    def forget(self, request: Request) -> None:
        assert request.key not in self.forgotten
        self.forgotten.append(request.key)

    def forget_ended(self) -> None:
        pass


def echo_run(
    prompt_ids: list[int],
    *,
    seed: int,
    max_tokens: int,
    vocab_size: int,
    stop_ids: frozenset[int] = frozenset(),
    min_tokens: int = 0,
    max_model_len: int = 10**9,
) -> list[int]:
    """Return the tokens that a request generates alone, without paging, cache or scheduler."""
    token_ids = list(prompt_ids)
    while len(token_ids) - len(prompt_ids) < max_tokens and len(token_ids) < max_model_len:
        token_ids.append(echo_token(token_ids, seed, vocab_size))
        if token_ids[-1] in stop_ids and len(token_ids) - len(prompt_ids) >= min_tokens:
            break
    return token_ids[len(prompt_ids) :]


class _Row:
    def __init__(self, join: NewRow) -> None:
        self.token_ids = list(join.token_ids)
        self.num_computed = join.num_computed
        self.num_draft_computed = join.num_draft_computed
        self.block_ids = list(join.block_ids)
        self.sampling = join.sampling


@dataclass(frozen=True)
class _Kept:
    """Content of a slot of a slower tier."""

    key: bytes
    has_draft: bool
    slots: list[int]
    draft_slots: list[int]
    is_damaged: bool = False


class EchoExecutor:
    """An engine of the given size; `fail_next`, `die_next` and `hang_next` make steps fail.

    Attributes:
        tiers: what slower tiers hold, by slot: key, whether it has draft KV, and the slots of both
            caches. `lose` has something of that damaged.
        load_s: what loading it takes, by `clock`; finding it takes no time.
        room: blocks for which it says that there is memory; None where it does not look.
        is_server_stopping: whether its server is shutting down.

    Args:
        num_blocks: with the null block. poison: a token whose row kills the engine when computed.
        is_early: whether a step is executed when it is submitted, of one step after the other, and
            then from the start again.
        tier_sizes: slots of the slower tiers; the second one outlives the engine.
        full_tiers: those that keep nothing more.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_model_len: int = 10**6,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        vocab_size: int = 256,
        eos_token_ids: tuple[int, ...] = (),
        poison: int | None = None,
        max_draft_len: int = 0,
        num_stages: int = 1,
        is_early: Sequence[bool] = (False,),
        tier_sizes: Sequence[int] = (),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = vocab_size
        self.eos_token_ids = list(eos_token_ids)
        self.poison = poison
        self.max_draft_len = max_draft_len
        self.num_stages = num_stages
        self.is_early = is_early
        self.tier_sizes = tier_sizes
        self.full_tiers: set[int] = set()
        self.tiers: list[dict[int, _Kept]] = [{} for _ in tier_sizes]
        self.fail_next = 0
        self.die_next = 0
        self.hang_next = 0
        self.refuse_restarts = 0
        self.num_submitted = 0
        self.num_steps = 0
        self.num_restarts = 0
        self.pids = [os.getpid()]
        self.load_s = 0.0
        self.clock = lambda: 0.0
        self.room: int | None = None
        self.is_server_stopping = False
        self._boot()

    def _boot(self) -> None:
        self.is_alive = True
        self.is_loaded = True
        self.epoch = 0
        self.step_id = -1
        self.needs_reset = True
        self._submitted: deque[_Step] = deque()  # and not executed yet
        if self.tiers:
            self.tiers[0].clear()
        self._clear()

    def _clear(self) -> None:
        self.rows: dict[int, _Row] = {}
        self.slots = [UNWRITTEN] * (self.num_blocks * self.block_size)
        self.draft_slots = list(self.slots)

    # ------------------------------------------------------------------ Executor

    def info(self) -> EngineInfo:
        self.check()
        return EngineInfo(
            epoch=self.epoch,
            pids=self.pids,
            num_blocks=self.num_blocks,
            kv=KVLayout(
                num_layers=1,
                num_kv_heads=1,
                head_dim=1,
                block_size=self.block_size,
                dtype="int64",
                bytes_per_block=8 * self.block_size,
            ),
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            architecture="Echo",
            dtype="int64",
            device="cpu",
            num_parameters=0,
            max_draft_len=self.max_draft_len,
            num_stages=self.num_stages,
            kept=self._kept() if self.tier_sizes else None,
            watches_memory=self.room is not None,
        )

    def _kept(self) -> KeptBlocks:
        tiers = [
            TierInfo(
                name=name,
                num_slots=size,
                contents=[SlotContent(slot, one.key, one.has_draft) for slot, one in kept.items()],
            )
            for name, size, kept in zip(("host", "file"), self.tier_sizes, self.tiers, strict=False)
        ]
        return KeptBlocks(hash_secret=b"kept" * 4, slot_bytes=SLOT_BYTES, tiers=tiers)

    def lose(self, number: int) -> None:
        """Damage something that a tier holds, unless none holds anything."""
        kept = [(tier, slot) for tier in self.tiers for slot in tier]
        if kept:
            tier, slot = kept[number % len(kept)]
            tier[slot] = replace(tier[slot], is_damaged=True)

    def open(self, *, replace: bool, on_done: Callable[[], None]) -> "_Opening":
        return _Opening(self, replace)

    def submit(self, plan: StepPlan) -> "_Step":
        step = _Step(self, plan)
        self._submitted.append(step)
        is_early = self.is_early[self.num_submitted % len(self.is_early)]
        self.num_submitted += 1
        if is_early:
            self.execute_until(step)
        return step

    def check(self) -> None:
        if self.is_server_stopping:
            raise ServerStoppingError("the echo server is shutting down")
        if not self.is_loaded:
            raise EngineUnloadedError("the echo engine was unloaded")
        if not self.is_alive:
            raise EngineDiedError("the echo engine is dead")

    def restart(self) -> None:
        self.num_restarts += 1
        if self.is_server_stopping:
            raise ServerStoppingError("the echo server is shutting down")
        if self.refuse_restarts:
            self.refuse_restarts -= 1
            raise EngineDiedError("the echo engine cannot be loaded")
        self._boot()

    def close(self) -> None:
        self.is_alive = False

    # ------------------------------------------------------------------ by an operator

    def load(self) -> None:
        for step in self._submitted:
            step.outcome = EngineUnloadedError("the echo engine was unloaded")
        self._boot()

    def unload(self) -> None:
        self.is_alive = self.is_loaded = False

    # ------------------------------------------------------------------ steps

    def execute_until(self, step: "_Step") -> None:
        """Execute what was submitted before a step, and the step itself."""
        while step.outcome is None:
            following = self._submitted.popleft()
            try:
                following.outcome = self.execute(following.plan)
            except PlanRefusedError as error:
                following.outcome = StepFailedError(str(error))
            except CharoniaError as error:
                following.outcome = error

    def execute(self, plan: StepPlan) -> StepResult:
        if self.die_next:
            self.die_next -= 1
            self.is_alive = False
        self.check()
        if self.hang_next:
            self.hang_next -= 1
            raise _Hung
        self._check_order(plan)
        if self.fail_next:
            self.fail_next -= 1
            self.needs_reset = True
            raise StepFailedError("the echo step failed")
        if plan.reset:
            self._clear()
        for row in plan.leaves:
            del self.rows[row]
        for join in plan.joins:
            assert join.row not in self.rows, f"row {join.row} is taken"
            self.rows[join.row] = _Row(join)
        for save in plan.saves:
            self._save(save)
        not_saved = [n for n, save in enumerate(plan.saves) if save.tier in self.full_tiers]
        not_loaded = [load.block_id for load in plan.loads if not self._load(load)]
        for copy in plan.copies:
            self._copy(copy.source, copy.target)
        held = {block_id for row in self.rows.values() for block_id in row.block_ids}
        assert held.isdisjoint(plan.discards), "a row's block is discarded"
        for block_id in plan.discards:
            for cache in self._caches:
                cache[self._slots_of(block_id)] = self._nothing
        total = sum(s.num_tokens + s.num_drafts + s.num_draft_tokens for s in plan.rows)
        assert total <= self.max_num_batched_tokens
        results = [self._compute(step) for step in plan.rows]
        self.epoch, self.step_id, self.needs_reset = plan.epoch, plan.step_id, False
        self.num_steps += 1
        has_guesses = any(step.num_draft_tokens for step in plan.rows)
        seconds = {"seconds": 0.001, "draft_seconds": 0.0004 if has_guesses else 0.0}
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            rows=results,
            not_loaded=not_loaded,
            not_saved=not_saved,
            num_blocks=self.room,
            **seconds,
        )

    def _save(self, save: BlockSave) -> None:
        assert 0 < save.block_id < self.num_blocks
        assert 0 <= save.slot < self.tier_sizes[save.tier]
        self.tiers[save.tier].pop(save.slot, None)
        if save.tier in self.full_tiers:
            return
        slots, draft_slots = (list(one[self._slots_of(save.block_id)]) for one in self._caches)
        self.tiers[save.tier][save.slot] = _Kept(save.key, save.has_draft, slots, draft_slots)

    def _load(self, load: BlockLoad) -> bool:
        held = {block_id for row in self.rows.values() for block_id in row.block_ids}
        assert load.block_id not in held, "a row's block is written over"
        kept = self.tiers[load.tier].get(load.slot)
        is_there = kept is not None and kept.key == load.key and not kept.is_damaged
        content = (kept.slots, kept.draft_slots) if is_there else (self._nothing, self._nothing)
        for cache, slots in zip(self._caches, content, strict=True):
            cache[self._slots_of(load.block_id)] = slots
        return is_there

    @property
    def _caches(self) -> tuple[list[int], list[int]]:
        return self.slots, self.draft_slots

    @property
    def _nothing(self) -> list[int]:
        return [UNWRITTEN] * self.block_size

    def _slots_of(self, block_id: int) -> slice:
        return slice(block_id * self.block_size, (block_id + 1) * self.block_size)

    def _copy(self, source: int, target: int) -> None:
        assert 0 < source < self.num_blocks
        assert 0 < target < self.num_blocks
        for cache in self._caches:
            cache[self._slots_of(target)] = cache[self._slots_of(source)]

    def _check_order(self, plan: StepPlan) -> None:
        is_next = plan.epoch == self.epoch and plan.step_id == self.step_id + 1
        if plan.reset:
            is_next = plan.epoch > self.epoch and plan.step_id == 0
        if not is_next or (self.needs_reset and not plan.reset):
            raise PlanRefusedError(f"plan {plan.epoch}.{plan.step_id} is not the next one")

    def _compute(self, step: RowStep) -> RowResult:
        row = self.rows[step.row]
        row.block_ids += step.new_block_ids
        num_known = len(row.token_ids)
        end = row.num_computed + step.num_tokens
        assert step.num_tokens >= 1
        assert end <= num_known, "computes tokens that are not known"
        assert end == num_known or not step.num_drafts, "drafts behind tokens that are not computed"
        drafts = step.draft_ids or self._guess(row, step)
        assert len(drafts) == step.num_drafts
        assert all(0 <= draft < self.vocab_size for draft in drafts), "a draft is no token"
        for position in range(row.num_computed, end):
            self.slots[self._slot(row, position)] = row.token_ids[position]
        for place, draft in enumerate(drafts):
            self.slots[self._slot(row, num_known + place)] = draft
        row.num_computed = end
        prefix = [self.slots[self._slot(row, position)] for position in range(end + len(drafts))]
        if self.poison is not None and self.poison in prefix[:end]:
            self.is_alive = False
            raise EngineDiedError("the echo engine was poisoned")
        if end < num_known:
            return RowResult(step.row, [])
        run = []
        for place in range(len(drafts) + 1):
            run.append(echo_token(prefix[: end + place], row.sampling.seed, self.vocab_size))
            if place == len(drafts) or drafts[place] != run[-1]:
                break
        row.token_ids += run
        row.num_computed += len(run) - 1
        if not step.draft_ids:
            row.num_draft_computed += max(0, min(len(run), len(drafts)) - 1)
        logprobs = [TokenLogprobs([token_id], [-0.5], 1) for token_id in run]
        return RowResult(step.row, run, logprobs if row.sampling.num_logprobs >= 0 else None)

    def _guess(self, row: _Row, step: RowStep) -> list[int]:
        """Do the draft model's work of a step."""
        start = row.num_draft_computed
        known = list(row.token_ids)
        row.num_draft_computed += step.num_draft_tokens
        for position in range(start, row.num_draft_computed):
            self.draft_slots[self._slot(row, position)] = known[position]
        drafts: list[int] = []
        while len(drafts) < step.num_drafts:
            tokens = known + drafts
            assert row.num_draft_computed == len(known), "it guesses before it has caught up"
            assert len(tokens) <= self.max_draft_len
            if drafts:
                self.draft_slots[self._slot(row, len(tokens) - 1)] = drafts[-1]
            prefix = [self.draft_slots[self._slot(row, i)] for i in range(len(tokens))]
            assert prefix == tokens, "the draft model's cache holds something else"
            drafts.append(echo_guess(prefix, row.sampling.seed, self.vocab_size))
        return drafts

    def _slot(self, row: _Row, position: int) -> int:
        block_id = row.block_ids[position // self.block_size]
        assert 0 < block_id < self.num_blocks, f"block {block_id} does not exist"
        return block_id * self.block_size + position % self.block_size


class _Opening:
    """The engine that is there, or another one that takes its time."""

    def __init__(self, executor: EchoExecutor, replace: bool) -> None:
        self._executor = executor
        self._replace = replace
        self._done_at = executor.clock() + executor.load_s * replace

    @property
    def is_done(self) -> bool:
        return self._executor.clock() >= self._done_at

    def result(self) -> EngineInfo:
        assert self.is_done
        if self._replace:
            self._executor.restart()
        return self._executor.info()


class _Hung(CharoniaError):
    """A step never ends."""


class _Step:
    """A step that was submitted; given up, it is executed all the same, or refused."""

    def __init__(self, executor: EchoExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self.plan = plan
        self.outcome: StepResult | CharoniaError | None = None

    def result(self, timeout: float | None) -> StepResult:
        self._executor.execute_until(self)
        if isinstance(self.outcome, _Hung):
            raise TimeoutError
        if isinstance(self.outcome, CharoniaError):
            raise self.outcome
        return self.outcome
