"""The engine's own process: executes plans in order.

Owns the order of a step (check, apply the diffs, compute, sample, append) and the engine's position
in the sequence of plans. Must not know who sends plans, or the reasons for their contents.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from charonia.config import EngineArgs, SpeculativeConfig
from charonia.data.basis import Basis
from charonia.data.comm import ModelRank
from charonia.data.draft_model import DraftModel, NativeDraftModel
from charonia.data.kv_store import KVStore
from charonia.data.kv_tiers import make_tiers
from charonia.data.largest_step import run_largest_step
from charonia.data.loaded_models import LoadedModel, Models
from charonia.data.model.fingerprint import fingerprint
from charonia.data.model.paged import Model, PagedModel
from charonia.data.plan_check import Progress, check_plan
from charonia.data.pressure import Pressure
from charonia.data.rank_group import RankGroup
from charonia.data.sampling.native_draw import NativeDraw
from charonia.data.sampling.sampler import Sampler
from charonia.data.sizing import Room, Sizing, line_of, size
from charonia.data.step_tensors import StepTensors
from charonia.data.target_model import TargetModel
from charonia.errors import RankLostError
from charonia.protocol import (
    EngineInfo,
    MemoryReport,
    RowResult,
    RowStep,
    StepPlan,
    StepResult,
)


class Runner:
    """Loads a model and executes plans.

    Args:
        args: the model, its device and all limits.
        log: takes lines about the progress, one at a time.
        group: the other ranks; None if there are none.

    Attributes:
        ops: the operations that compute.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ConfigError: the device does not exist or has too little memory, or the model cannot be
            split among the ranks.
        RankLostError: a rank was lost while loading.
    """

    def __init__(
        self, args: EngineArgs, *, log: Callable[[str], None], group: RankGroup | None = None
    ) -> None:
        basis = Basis.of(args, log=log, local_rank=group.local_rank if group else None)
        self.ops = ops = basis.ops
        self._group = group
        model_rank, draft_rank = group.join(basis) if group else (ModelRank(), ModelRank())
        models = Models.load(basis, model_rank, draft_rank, log=log)
        native = NativeDraw(ops.kernels) if ops.kernels else None
        self._sampler = Sampler(basis.spec.vocab_size, basis.device, native)
        sizing = self._size(basis, models, model_rank, draft_rank)
        room = group.agree(sizing.room) if group else sizing.room
        num_blocks = room.num_blocks
        memory = sizing.report(room, basis.device, basis.local_rank.count)
        log(line_of(memory, num_blocks))
        if line := sizing.shortage(num_blocks):
            log(line)
        kv = models.allocate(num_blocks, basis.device)
        self._kv_stores = [store for store in kv if store is not None]
        self._has_discarded = False
        self._pressure = _watch(basis, room, self._kv_stores)
        self._tiers = make_tiers(basis, models, kv, model_rank.place, room.slot_bytes, log=log)
        self._tensors = StepTensors(
            num_rows=args.most_rows,
            max_model_len=basis.max_model_len,
            block_size=args.block_size,
            max_num_batched_tokens=args.most_step_tokens,
            device=basis.device,
        )
        self._target = TargetModel(
            self._lead("target", PagedModel(models.target.decoder, kv.target)),
            self._tensors,
            self._sampler,
            _synthetic_rate(args.speculative_config, log),
        )
        self._draft_model: DraftModel | NativeDraftModel | None = None
        if models.draft is not None:
            assert kv.draft is not None
            self._draft_model = self._make_draft_model(models.draft, kv.draft, native)
        self._progress = Progress(epoch=0, step_id=-1, needs_reset=True)
        self._info = msgspec.structs.replace(
            _describe(basis, models.target, num_blocks, memory),
            watches_memory=self._pressure is not None,
        )
        if group:
            self._info = group.describe(self._info)
        self._info = self.info()

    def _size(
        self, basis: Basis, models: Models, model_rank: ModelRank, draft_rank: ModelRank | None
    ) -> Sizing:
        """Measure how many KV blocks fit, together with the other ranks."""

        def run_step(pool_tokens: int) -> None:
            run_largest_step(
                *(basis, models, model_rank, draft_rank),
                pool_tokens=pool_tokens,
                sampler=self._sampler,
            )

        if self._group:
            self._group.measure()
        try:
            return size(basis, models, run_step)
        except BaseException as error:
            if self._group:  # they are in the middle of the step, and wait for this one
                self._group.lose(f"rank 0: {type(error).__name__}: {error}")
                if isinstance(error, RankLostError):
                    self._group.check()  # names the rank that was lost, if one was
            raise

    def _lead(self, name: str, model: PagedModel) -> Model:
        return self._group.lead(name, model) if self._group else model

    def _make_draft_model(
        self, model: LoadedModel, kv: KVStore, native: NativeDraw | None
    ) -> DraftModel | NativeDraftModel:
        if native and (guesser := model.decoder.guesser()):
            block_size = model.layout.block_size
            return NativeDraftModel(guesser, kv, block_size, self._tensors, native)
        led = self._lead("draft", PagedModel(model.decoder, kv))
        return DraftModel(led, self._tensors, self._sampler)

    def info(self) -> EngineInfo:
        """Describe the engine; `epoch` is that of the last plan begun."""
        kept = self._tiers.kept() if self._tiers else None
        return msgspec.structs.replace(self._info, epoch=self._progress.epoch, kept=kept)

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute the next plan; see `begin`."""
        return self.begin(plan)()

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin the next plan; return a function that ends it.

        If the model is a pipeline, the next plans may begin before this one ends, because they have
        other rows. Plans must end in the order in which they began.

        Raises:
            PlanRefusedError: the plan is not the next one, or a value is out of range. Nothing has
                changed.
            RankLostError: there are other ranks, and a rank was lost. Any error of the step, here
                or at its end, counts as such a loss.
            Exception: the step's own error, if there are no other ranks. The next plan must have
                `reset`.
        """
        started = time.perf_counter()
        check_plan(plan, self._progress, self._tensors.rows, self._info)
        self._progress = Progress(plan.epoch, plan.step_id, needs_reset=False)
        with self._whole_or_not_at_all():
            self._apply_diffs(plan)
            not_loaded, not_saved = self._move_blocks(plan)
            self._tensors.begin(plan.rows)
            draft_seconds = self._guess(plan.rows)
            step = self._target.begin(plan.rows) if plan.rows else None

        def end() -> StepResult:
            rows: list[RowResult] = []
            if step is not None:
                with self._whole_or_not_at_all():
                    rows = self._target.end(step)
            return StepResult(
                epoch=plan.epoch,
                step_id=plan.step_id,
                rows=rows,
                seconds=time.perf_counter() - started,
                draft_seconds=draft_seconds,
                collectives=self._group.collectives() if self._group else None,
                not_loaded=not_loaded,
                not_saved=not_saved,
                num_blocks=self._pressure.num_blocks() if self._pressure else None,
            )

        return end

    def close(self) -> None:
        """End the other ranks, and release the slower tiers."""
        if self._group:
            self._group.close()
        if self._tiers is not None:
            self._tiers.close()

    @contextmanager
    def _whole_or_not_at_all(self) -> Iterator[None]:
        """Guard a part of a step: if it fails, the next plan must have `reset`.

        Other ranks are in the middle of the step then, and wait for this one, so they are given up.
        """
        try:
            with torch.inference_mode():
                yield
        except BaseException as error:
            self._progress = replace(self._progress, needs_reset=True)
            if self._group:
                self._group.lose(f"rank 0: {type(error).__name__}: {error}")
                if isinstance(error, Exception):
                    self._group.check()
            raise

    def _apply_diffs(self, plan: StepPlan) -> None:
        if plan.reset:
            self._tensors.clear()
        for row in plan.leaves:
            self._tensors.leave(row)
        for new in plan.joins:
            self._tensors.join(new)

    def _move_blocks(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Save, load, discard and copy blocks; return `StepResult`'s not_loaded, not_saved."""
        not_loaded: list[int] = []
        not_saved: list[int] = []
        if self._pressure is not None:
            self._pressure.note_plan(plan.num_blocks, is_first=plan.reset)
        # A new epoch begins with all blocks, until it is told how many fit into memory.
        uses_all = self._has_discarded and plan.num_blocks is None and not plan.reset
        self._has_discarded = bool(plan.discards) or (self._has_discarded and not uses_all)
        has_moved = bool(plan.saves or plan.loads or plan.discards or uses_all)
        others = self._group.move(plan, uses_all=uses_all) if self._group and has_moved else None
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
            self._target.copy_blocks(plan.copies)
            if self._draft_model is not None:
                self._draft_model.copy_blocks(plan.copies)
        return not_loaded, not_saved

    def _guess(self, steps: list[RowStep]) -> float:
        """Run the draft model; return the seconds that it took."""
        if self._draft_model is None or not any(step.num_draft_tokens for step in steps):
            return 0.0
        started = time.perf_counter()
        self._draft_model.guess(steps)
        return time.perf_counter() - started


def _watch(basis: Basis, room: Room, kv_stores: list[KVStore]) -> Pressure | None:
    """Watch how many KV blocks fit into memory; None if the number is fixed.

    On a GPU it is fixed too: torch does not share its memory with other processes.
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
    """A digest that distinguishes the served checkpoints from others in the same directories."""
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
