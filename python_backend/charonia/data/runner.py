"""The engine's own process: executes plans, in their order.

Owns the order of a step (check, apply the diffs, compute, sample, append) and the engine's place
in the sequence of plans. Must not know who sends plans, or why a row computes what it computes.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from charonia.config import EngineArgs, SpeculativeConfig
from charonia.data.basis import Basis, LocalRank
from charonia.data.comm import Seat
from charonia.data.draft_model import DraftModel, NativeDraftModel
from charonia.data.kv_store import KVStore
from charonia.data.kv_tiers import make_tiers
from charonia.data.largest_step import run_largest_step
from charonia.data.loaded_models import PROMPT_LOGPROBS_SLICE, LoadedModel, Models
from charonia.data.model.fingerprint import fingerprint
from charonia.data.model.paged import Model, PagedModel, PendingLogits
from charonia.data.ops.native.ops import NativeOps
from charonia.data.plan_check import Progress, check_plan
from charonia.data.pressure import Pressure
from charonia.data.sampling.native_draw import NativeDraw
from charonia.data.sampling.sampler import Sampled, SampledRow, Sampler
from charonia.data.sampling.verify import num_accepted, num_accepted_synthetically
from charonia.data.sizing import Room, Sizing, line_of, size
from charonia.data.step_tensors import StepTensors
from charonia.errors import RankLostError
from charonia.protocol import (
    Collectives,
    EngineInfo,
    MemoryReport,
    RowResult,
    RowStep,
    StepPlan,
    StepResult,
    TokenLogprobs,
)


class Team(Protocol):
    """The ranks of an engine, as the one that runs the steps sees them."""

    @property
    def local_rank(self) -> LocalRank:
        """This process among those on its machine."""
        ...

    def join(self, basis: Basis) -> tuple[Seat, Seat | None]:
        """Meet the others; return this rank's seats in the target and in the draft model."""
        ...

    def measure(self) -> None:
        """Wait until all have loaded, and have them run the largest step with this one."""
        ...

    def agree(self, room: Room) -> Room:
        """Return what the ranks all have room for, and have all take that."""
        ...

    def move(self, plan: StepPlan, *, uses_all: bool) -> Callable[[], tuple[set[int], set[int]]]:
        """Have the other ranks move a plan's blocks between tiers, and discard others.

        Args:
            uses_all: whether all blocks are in use again, see `KVStore.use_all`.

        Returns:
            Tells what one of them has not loaded and not saved, as `StepResult` does.
        """
        ...

    def lead(self, name: str, model: PagedModel) -> Model:
        """Have the other ranks that are in model `name` follow what is computed with it."""
        ...

    def describe(self, info: EngineInfo) -> EngineInfo:
        """Add what there is to know of the ranks."""
        ...

    def collectives(self) -> Collectives:
        """What was exchanged since the last call."""
        ...

    def lose(self, reason: str) -> None:
        """The ranks no longer do the same: there is no going on."""
        ...

    def check(self) -> None:
        """Raises RankLostError, with the first reason, when there is no going on."""
        ...

    def close(self) -> None:
        """End the other ranks."""
        ...


class Runner:
    """Loads a model and executes plans.

    Args:
        args: which model, on which device, how large.
        log: takes one line of progress at a time.
        team: the other ranks; None where there are none.

    Attributes:
        ops: what computes.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ConfigError: the device is not there, its memory does not suffice, or the model cannot be
            split among the ranks.
        RankLostError: a rank was lost while they were loading.
    """

    def __init__(
        self, args: EngineArgs, *, log: Callable[[str], None], team: Team | None = None
    ) -> None:
        basis = Basis.of(args, log=log, local_rank=team.local_rank if team else None)
        self.ops = ops = basis.ops
        self._team = team
        seat, draft_seat = team.join(basis) if team else (Seat(), Seat())
        models = Models.load(basis, seat, draft_seat, log=log)
        native = NativeDraw(ops.kernels) if isinstance(ops, NativeOps) else None
        self._sampler = Sampler(basis.spec.vocab_size, basis.device, native)
        sizing = self._size(basis, models, seat, draft_seat)
        room = team.agree(sizing.room) if team else sizing.room
        num_blocks = room.num_blocks
        memory = sizing.report(room, basis.device, basis.local_rank.count)
        log(line_of(memory, num_blocks))
        if line := sizing.shortage(num_blocks):
            log(line)
        kv = models.allocate(num_blocks, basis.device)
        self._kv_stores = [store for store in kv if store is not None]
        self._has_discarded = False
        self._pressure = _watch(basis, room, self._kv_stores)
        self._tiers = make_tiers(basis, models, kv, seat.place, room.slot_bytes, log=log)
        self._model = self._lead("target", PagedModel(models.target.decoder, kv.target))
        self._tensors = StepTensors(
            num_rows=args.most_rows,
            max_model_len=basis.max_model_len,
            block_size=args.block_size,
            max_num_batched_tokens=args.most_step_tokens,
            device=basis.device,
        )
        self._draft_model: DraftModel | NativeDraftModel | None = None
        if models.draft is not None:
            assert kv.draft is not None
            self._draft_model = self._make_draft_model(
                models.draft, kv.draft, basis, native, is_whole=args.draft_ranks == 1
            )
        self._synthetic_rate = _synthetic_rate(args.speculative_config, log)
        self._progress = Progress(epoch=0, step_id=-1, needs_reset=True)
        self._info = msgspec.structs.replace(
            _describe(basis, models.target, num_blocks, memory),
            watches_memory=self._pressure is not None,
        )
        if team:
            self._info = team.describe(self._info)
        self._info = self.info()

    def _size(self, basis: Basis, models: Models, seat: Seat, draft_seat: Seat | None) -> Sizing:
        """See what there is memory for, together with the other ranks."""

        def run_step(pool_tokens: int) -> None:
            run_largest_step(
                *(basis, models, seat, draft_seat), pool_tokens=pool_tokens, sampler=self._sampler
            )

        if self._team:
            self._team.measure()
        try:
            return size(basis, models, run_step)
        except BaseException as error:
            if self._team:  # the others are in the middle of it, and wait for this one
                self._team.lose(f"rank 0: {type(error).__name__}: {error}")
                if isinstance(error, RankLostError):
                    self._team.check()  # who it was says more than that one was missing
            raise

    def _lead(self, name: str, model: PagedModel) -> Model:
        return self._team.lead(name, model) if self._team else model

    def _make_draft_model(
        self,
        model: LoadedModel,
        kv: KVStore,
        basis: Basis,
        native: NativeDraw | None,
        *,
        is_whole: bool,
    ) -> DraftModel | NativeDraftModel:
        if native is None or not isinstance(basis.ops, NativeOps) or not is_whole:
            led = self._lead("draft", PagedModel(model.decoder, kv))
            return DraftModel(led, self._tensors, self._sampler)
        return NativeDraftModel(
            model.decoder.guesser(basis.ops),
            kv,
            basis.args.block_size,
            self._tensors,
            native,
        )

    def info(self) -> EngineInfo:
        """Describe the engine; `epoch` is that of the last plan begun."""
        kept = self._tiers.kept() if self._tiers else None
        return msgspec.structs.replace(self._info, epoch=self._progress.epoch, kept=kept)

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute the next plan; see `begin`."""
        return self.begin(plan)()

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin the next plan, and return what ends it.

        Where the model is a pipeline, the plans that follow may begin before: they have other rows.
        Plans end in the order in which they began.

        Raises:
            PlanRefusedError: the plan is not the next one, or something in it is out of range.
                Nothing has changed.
            RankLostError: there are other ranks, and they are lost, also by whatever the step
                raised here or at its end.
            Exception: whatever it raised, where there are none. The next plan must have `reset`.
        """
        started = time.perf_counter()
        check_plan(plan, self._progress, self._tensors.rows, self._info)
        self._progress = Progress(plan.epoch, plan.step_id, needs_reset=False)
        with self._whole_or_not_at_all():
            self._apply_diffs(plan)
            not_loaded, not_saved = self._move_blocks(plan)
            self._tensors.begin(plan.rows)
            draft_seconds = self._guess(plan.rows)
            step = self._compute(plan.rows) if plan.rows else None

        def end() -> StepResult:
            rows: list[RowResult] = []
            if step is not None:
                with self._whole_or_not_at_all():
                    rows = self._end(step)
            return StepResult(
                epoch=plan.epoch,
                step_id=plan.step_id,
                rows=rows,
                seconds=time.perf_counter() - started,
                draft_seconds=draft_seconds,
                collectives=self._team.collectives() if self._team else None,
                not_loaded=not_loaded,
                not_saved=not_saved,
                num_blocks=self._pressure.num_blocks() if self._pressure else None,
            )

        return end

    def close(self) -> None:
        """End the other ranks, and let go of what is kept beside the KV cache."""
        if self._team:
            self._team.close()
        if self._tiers is not None:
            self._tiers.close()

    @contextmanager
    def _whole_or_not_at_all(self) -> Iterator[None]:
        """A part of a step: where it is left early, the next plan must have `reset`.

        Where there are other ranks, they are in the middle of it then, and wait for this one.
        """
        try:
            with torch.inference_mode():
                yield
        except BaseException as error:
            self._progress = replace(self._progress, needs_reset=True)
            if self._team:
                self._team.lose(f"rank 0: {type(error).__name__}: {error}")
                if isinstance(error, Exception):
                    self._team.check()
            raise

    def _apply_diffs(self, plan: StepPlan) -> None:
        if plan.reset:
            self._tensors.clear()
        for row in plan.leaves:
            self._tensors.leave(row)
        for new in plan.joins:
            self._tensors.join(new)

    def _move_blocks(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Save, load, discard and copy blocks; see `StepResult` on what is returned."""
        not_loaded: list[int] = []
        not_saved: list[int] = []
        if self._pressure is not None:
            self._pressure.note_plan(plan.num_blocks, is_first=plan.reset)
        # A new epoch begins with all blocks, and has yet to be told for how many there is memory.
        uses_all = self._has_discarded and plan.num_blocks is None and not plan.reset
        self._has_discarded = bool(plan.discards) or (self._has_discarded and not uses_all)
        has_moved = bool(plan.saves or plan.loads or plan.discards or uses_all)
        others = self._team.move(plan, uses_all=uses_all) if self._team and has_moved else None
        if self._tiers is not None and (plan.saves or plan.loads):
            not_saved = self._tiers.save(plan.saves)
            not_loaded = self._tiers.load(plan.loads)
            missed_loads, missed_saves = others() if others else (set(), set())
            self._tiers.forget([load for load in plan.loads if load.block_id in missed_loads])
            self._tiers.forget([plan.saves[place] for place in missed_saves])
            not_loaded = sorted(missed_loads.union(not_loaded))
            not_saved = sorted(missed_saves.union(not_saved))
        for store in self._kv_stores:
            if uses_all:
                store.use_all()
            if plan.discards:
                store.discard(plan.discards)
        if plan.copies:
            self._model.copy_blocks(plan.copies)
            if self._draft_model is not None:
                self._draft_model.copy_blocks(plan.copies)
        return not_loaded, not_saved

    def _guess(self, steps: list[RowStep]) -> float:
        """Have the draft model do its part; return the seconds that it took."""
        if self._draft_model is None or not any(step.num_draft_tokens for step in steps):
            return 0.0
        started = time.perf_counter()
        self._draft_model.guess(steps)
        return time.perf_counter() - started

    def _compute(self, steps: list[RowStep]) -> "_Step":
        """Have the model compute the steps, up to the logits to sample from.

        Rows whose cursor reached their last known token sample. Every draft's place is a line of
        its own, with the tokens before it as its history.
        """
        batch = self._tensors.batch(self._tensors.advance(steps))
        sampling: list[RowStep] = []
        rows: list[SampledRow] = []
        lines: list[int] = []
        for step, end in zip(steps, batch.query_starts[1:], strict=True):
            state = self._tensors.state(step.row)
            if state.num_computed < state.num_tokens:
                continue
            sampling.append(step)
            lines += range(end - step.num_drafts - 1, end)
            for num_drafts in range(step.num_drafts + 1):
                token_ids = self._tensors.token_ids(step.row, num_drafts)
                rows.append(SampledRow(state.sampling, token_ids, state.num_prompt))
        logits = self._model.forward(batch, lines)
        prompts = [
            self._prompt_logits(step, start)
            for step, start in zip(steps, batch.query_starts, strict=False)
        ]
        return _Step(steps, prompts, sampling, rows, logits)

    def _end(self, step: "_Step") -> list[RowResult]:
        """Sample, and append what was sampled to the rows."""
        runs: dict[int, tuple[list[int], list[TokenLogprobs] | None]] = {}
        if step.sampling:
            sampled, first = self._sampler.sample(step.logits(), step.lines), 0
            for row_step in step.sampling:
                last = first + row_step.num_drafts + 1
                runs[row_step.row] = self._verify(row_step, sampled[first:last])
                first = last
        results = []
        for row_step, prompt in zip(step.rows, step.prompts, strict=True):
            token_ids, logprobs = runs.get(row_step.row, ([], None))
            prompt_logprobs = self._prompt_logprobs(row_step, prompt)
            results.append(RowResult(row_step.row, token_ids, logprobs, prompt_logprobs))
        return results

    def _verify(
        self, step: RowStep, sampled: list[Sampled]
    ) -> tuple[list[int], list[TokenLogprobs] | None]:
        """Append a row's run: what was sampled, up to the first that is not the draft."""
        token_ids = [one.token_id for one in sampled]
        if step.num_drafts:
            drafts = self._tensors.drafts(step.row, step.num_drafts)
            if self._synthetic_rate is None:
                num = num_accepted(drafts, token_ids)
            else:
                state = self._tensors.state(step.row)
                num = num_accepted_synthetically(
                    len(drafts), self._synthetic_rate, state.sampling.seed, state.num_tokens
                )
                token_ids[:num] = drafts[:num]
            del sampled[num + 1 :], token_ids[num + 1 :]
        num_guessed = 0 if step.draft_ids else step.num_drafts
        self._tensors.commit(step.row, token_ids, num_guessed)
        has_logprobs = sampled[0].logprobs is not None
        return token_ids, [
            one.logprobs for one in sampled if one.logprobs
        ] if has_logprobs else None

    def _prompt_logits(self, step: RowStep, start: int) -> "list[_PromptPart] | None":
        """Ask for what is needed to score the prompt tokens that this step's tokens predict.

        Args:
            start: the first of this row's tokens in the pass.
        """
        state = self._tensors.state(step.row)
        if state.sampling.num_prompt_logprobs < 0:
            return None
        first = state.num_computed - step.num_tokens + 1
        targets = self._tensors.token_ids(step.row)[first : state.num_computed + 1]
        targets = targets[: max(state.num_prompt - first, 0)]
        parts = []
        for part in range(0, len(targets), PROMPT_LOGPROBS_SLICE):
            some = targets[part : part + PROMPT_LOGPROBS_SLICE]
            lines = slice(start + part, start + part + len(some))
            parts.append(_PromptPart(some, self._model.logits(lines)))
        return parts

    def _prompt_logprobs(
        self, step: RowStep, parts: "list[_PromptPart] | None"
    ) -> list[TokenLogprobs] | None:
        """Log-probabilities of prompt tokens, some at a time."""
        if parts is None:
            return None
        k = self._tensors.state(step.row).sampling.num_prompt_logprobs
        return [
            entry
            for part in parts
            for entry in self._sampler.prompt_logprobs(part.logits(), part.targets, k)
        ]


class _PromptPart(NamedTuple):
    """Some tokens of a prompt, and the logits that predict them."""

    targets: Tensor  # [lines]
    logits: PendingLogits


class _Step(NamedTuple):
    """A step whose tokens are computed, or will be as soon as the pipeline's end has them."""

    rows: list[RowStep]
    prompts: list[list[_PromptPart] | None]  # of each row
    sampling: list[RowStep]  # the rows that sample
    lines: list[SampledRow]  # one for each line of logits
    logits: PendingLogits


def _watch(basis: Basis, room: Room, kv_stores: list[KVStore]) -> Pressure | None:
    """Looks how many blocks there is memory for; None where that is fixed.

    What torch has of a GPU's memory it shares with nobody.
    """
    args = basis.args
    is_fixed = args.num_gpu_blocks_override is not None or args.kv_cache_memory_bytes is not None
    if basis.device.type != "cpu" or is_fixed or not args.memory_reserve:
        return None
    bytes_per_block = room.slot_bytes * basis.local_rank.count
    written = kv_stores[0].written
    return Pressure(room.num_blocks, bytes_per_block, args.memory_reserve, written=written)


def _describe(
    basis: Basis, model: LoadedModel, num_blocks: int, memory: MemoryReport
) -> EngineInfo:
    args, spec = basis.args, basis.spec
    return EngineInfo(
        epoch=0,
        pids=[os.getpid()],
        num_blocks=num_blocks,
        kv=model.layout,
        max_model_len=basis.max_model_len,
        max_num_seqs=args.most_rows,
        max_num_batched_tokens=args.most_step_tokens,
        vocab_size=spec.vocab_size,
        eos_token_ids=list(spec.eos_token_ids),
        architecture=spec.architecture,
        dtype=str(basis.dtype).removeprefix("torch."),
        device=str(basis.device),
        num_parameters=spec.num_parameters,
        max_draft_len=basis.max_draft_len,
        checkpoint=_checkpoint(args),
        memory=memory,
    )


def _checkpoint(args: EngineArgs) -> str:
    """What tells the checkpoints that are served from others in the same directories."""
    draft = args.speculative_config.model if args.speculative_config else None
    paths = [args.model] if draft is None else [args.model, draft]
    return ".".join(digest for path in paths for digest in fingerprint(Path(path)).values())


def _synthetic_rate(config: SpeculativeConfig | None, log: Callable[[str], None]) -> float | None:
    rate = config.synthetic_acceptance_rate if config else None
    if rate is not None:
        log(
            f"warning: synthetic_acceptance_rate = {rate}: drafts are accepted whatever they are,"
            " and the text is not the model's"
        )
    return rate
