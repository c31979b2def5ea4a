"""The engine of one process: executes plans, one step at a time.

Owns the order of a step (check, apply the diffs, compute, sample, append) and the engine's place
in the sequence of plans. Must not know who sends plans, or why a row computes what it computes.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from charonia.config import EngineArgs, SpeculativeConfig
from charonia.data.draft_model import DraftModel, NativeDraftModel
from charonia.data.kv_store import KVStore, kv_layout, num_blocks_that_fit
from charonia.data.model.decoder import Decoder, Hidden
from charonia.data.model.loader import load_weights
from charonia.data.model.parameters import Parameters
from charonia.data.model.spec import ModelSpec, check_draft
from charonia.data.ops.base import Ops, StepBatch
from charonia.data.ops.native.ops import NativeOps
from charonia.data.ops.select import select_ops
from charonia.data.plan_check import Progress, check_plan
from charonia.data.sampling.native_draw import NativeDraw
from charonia.data.sampling.sampler import Sampled, SampledRow, Sampler
from charonia.data.sampling.verify import num_accepted, num_accepted_synthetically
from charonia.data.step_tensors import StepTensors
from charonia.errors import CheckpointError, ConfigError
from charonia.protocol import (
    EngineInfo,
    KVLayout,
    RowResult,
    RowStep,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

_PROMPT_LOGPROBS_SLICE = 256
"""Prompt positions whose logits are held at once."""


class Runner:
    """Loads a model and executes plans.

    Args:
        args: which model, on which device, how large.
        log: takes one line of progress at a time.

    Attributes:
        ops: what computes.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ConfigError: the device is not there, or its memory does not suffice.
    """

    def __init__(self, args: EngineArgs, *, log: Callable[[str], None]) -> None:
        spec = ModelSpec.from_dir(Path(args.model))
        draft_path = (args.speculative_config and args.speculative_config.model) or ""
        draft_spec = _draft_spec(draft_path, spec) if draft_path else None
        device = _device(args.device)
        dtype = getattr(torch, spec.dtype if args.dtype == "auto" else args.dtype)
        max_model_len = _max_model_len(args, spec, log)
        max_draft_len = min(max_model_len, draft_spec.max_position_embeddings) if draft_spec else 0
        self.ops = ops = select_ops(args, dtype, device, log)
        load = partial(_Model.load, args=args, dtype=dtype, device=device, log=log)
        model = load(args.model, spec, max_model_len, ops)
        draft = None
        if draft_spec is not None:
            draft_ops = _draft_ops(args.speculative_config, ops)
            draft = load(draft_path, draft_spec, max_draft_len, draft_ops)
        num_blocks = _num_blocks(args, spec, [model, draft], max_model_len, dtype, device)
        self._model = model.decoder
        self._kv = model.kv_store(ops, num_blocks, device)
        self._tensors = StepTensors(
            num_rows=args.max_num_seqs,
            max_model_len=max_model_len,
            block_size=args.block_size,
            max_num_batched_tokens=args.max_num_batched_tokens,
            device=device,
        )
        native = NativeDraw(ops.kernels) if isinstance(ops, NativeOps) else None
        self._sampler = Sampler(spec.vocab_size, device, native)
        self._draft_model: DraftModel | NativeDraftModel | None = None
        if draft is not None:
            kv = draft.kv_store(ops, num_blocks, device)
            if native is not None and isinstance(ops, NativeOps):
                guesser = draft.decoder.guesser(ops)
                self._draft_model = NativeDraftModel(
                    guesser, kv, args.block_size, self._tensors, native
                )
            else:
                self._draft_model = DraftModel(draft.decoder, kv, self._tensors, self._sampler)
        self._synthetic_rate = _synthetic_rate(args.speculative_config, log)
        self._progress = Progress(epoch=0, step_id=-1, needs_reset=True)
        self._info = EngineInfo(
            epoch=0,
            pids=[os.getpid()],
            num_blocks=num_blocks,
            kv=model.layout,
            max_model_len=max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            vocab_size=spec.vocab_size,
            eos_token_ids=list(spec.eos_token_ids),
            architecture=spec.architecture,
            dtype=model.layout.dtype,
            device=str(device),
            num_parameters=model.num_parameters,
            max_draft_len=max_draft_len,
        )

    def info(self) -> EngineInfo:
        """Describe the engine; `epoch` is that of the last plan begun."""
        return msgspec.structs.replace(self._info, epoch=self._progress.epoch)

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute the next plan.

        Raises:
            PlanRefusedError: the plan is not the next one, or something in it is out of range.
                Nothing has changed.
            Exception: whatever the step raised. The next plan must have `reset`.
        """
        started = time.perf_counter()
        check_plan(plan, self._progress, self._tensors.rows, self._info)
        self._progress = Progress(plan.epoch, plan.step_id, needs_reset=True)
        with torch.inference_mode():
            self._apply_diffs(plan)
            draft_seconds = self._guess(plan.rows)
            rows = self._compute(plan.rows) if plan.rows else []
        self._progress = Progress(plan.epoch, plan.step_id, needs_reset=False)
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            rows=rows,
            seconds=time.perf_counter() - started,
            draft_seconds=draft_seconds,
        )

    def _apply_diffs(self, plan: StepPlan) -> None:
        if plan.reset:
            self._tensors.clear()
        for row in plan.leaves:
            self._tensors.leave(row)
        for new in plan.joins:
            self._tensors.join(new)
        self._tensors.begin(plan.rows)

    def _guess(self, steps: list[RowStep]) -> float:
        """Have the draft model do its part; return the seconds that it took."""
        if self._draft_model is None or not any(step.num_draft_tokens for step in steps):
            return 0.0
        started = time.perf_counter()
        self._draft_model.guess(steps)
        return time.perf_counter() - started

    def _compute(self, steps: list[RowStep]) -> list[RowResult]:
        batch = self._tensors.batch(self._tensors.advance(steps))
        hidden = self._model.hidden_states(batch, self._kv.pages)
        prompt_logprobs = [
            self._prompt_logprobs(step, hidden, start)
            for step, start in zip(steps, batch.query_starts, strict=False)
        ]
        runs = self._sample(steps, batch, hidden)
        results = []
        for step, prompt in zip(steps, prompt_logprobs, strict=True):
            token_ids, logprobs = runs.get(step.row, ([], None))
            results.append(RowResult(step.row, token_ids, logprobs, prompt))
        return results

    def _sample(
        self, steps: list[RowStep], batch: StepBatch, hidden: Hidden
    ) -> dict[int, tuple[list[int], list[TokenLogprobs] | None]]:
        """Sample for the rows whose cursor reached their last known token, and append.

        Every draft's place is a line of its own, with the tokens before it as its history.
        """
        sampling: list[RowStep] = []
        rows: list[SampledRow] = []
        places: list[int] = []
        for step, end in zip(steps, batch.query_starts[1:], strict=True):
            state = self._tensors.state(step.row)
            if state.num_computed < state.num_tokens:
                continue
            sampling.append(step)
            places += range(end - step.num_drafts - 1, end)
            for num_drafts in range(step.num_drafts + 1):
                token_ids = self._tensors.token_ids(step.row, num_drafts)
                rows.append(SampledRow(state.sampling, token_ids, state.num_prompt))
        if not sampling:
            return {}
        if len(rows) < len(batch.positions):
            hidden = hidden.rows(torch.tensor(places).to(batch.positions.device))
        sampled = self._sampler.sample(self._model.logits(hidden), rows)
        runs, first = {}, 0
        for step in sampling:
            runs[step.row] = self._verify(step, sampled[first : first + step.num_drafts + 1])
            first += step.num_drafts + 1
        return runs

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

    def _prompt_logprobs(
        self, step: RowStep, hidden: Hidden, start: int
    ) -> list[TokenLogprobs] | None:
        """Log-probabilities of the prompt tokens that this step's tokens predict.

        Args:
            hidden: of all rows' tokens in this step. start: the first of this row's.
        """
        state = self._tensors.state(step.row)
        k = state.sampling.num_prompt_logprobs
        if k < 0:
            return None
        first = state.num_computed - step.num_tokens + 1
        targets = self._tensors.token_ids(step.row)[first : state.num_computed + 1]
        targets = targets[: max(state.num_prompt - first, 0)]
        entries: list[TokenLogprobs] = []
        for part in range(0, len(targets), _PROMPT_LOGPROBS_SLICE):
            some = targets[part : part + _PROMPT_LOGPROBS_SLICE]
            first_line = start + part
            logits = self._model.logits(hidden.rows(slice(first_line, first_line + len(some))))
            entries += self._sampler.prompt_logprobs(logits, some, k)
        return entries


class _Model(NamedTuple):
    """A loaded checkpoint, and the shape of its KV cache."""

    decoder: Decoder
    layout: KVLayout
    num_parameters: int

    @classmethod
    def load(
        cls,
        path: str,
        spec: ModelSpec,
        num_positions: int,
        ops: Ops[Any],
        *,
        args: EngineArgs,
        dtype: torch.dtype,
        device: torch.device,
        log: Callable[[str], None],
    ) -> "_Model":
        parameters = Parameters(spec, dtype, device)
        num_parameters = load_weights(
            Path(path), parameters.checkpoint_tensors(), is_tied=spec.is_tied, log=log
        )
        decoder = Decoder(spec, parameters, ops, num_positions=num_positions)
        return cls(decoder, kv_layout(spec, ops, args.block_size, dtype), num_parameters)

    def kv_store(self, ops: Ops[Any], num_blocks: int, device: torch.device) -> KVStore:
        return KVStore(self.layout, ops.page_shapes(self.layout), num_blocks, device)


def _synthetic_rate(config: SpeculativeConfig | None, log: Callable[[str], None]) -> float | None:
    rate = config.synthetic_acceptance_rate if config else None
    if rate is not None:
        log(
            f"warning: synthetic_acceptance_rate = {rate}: drafts are accepted whatever they are,"
            " and the text is not the model's"
        )
    return rate


def _draft_ops(config: SpeculativeConfig | None, ops: Ops[Any]) -> Ops[Any]:
    """The draft model's operations: the target's, or the same with int8 weights."""
    quantization = config.quantization if config else None
    is_wanted = quantization == "int8" or (quantization == "auto" and isinstance(ops, NativeOps))
    return ops.as_int8() if is_wanted else ops


def _draft_spec(path: str, target: ModelSpec) -> ModelSpec:
    """The draft model's shape, which fits the target."""
    try:
        spec = ModelSpec.from_dir(Path(path))
    except CheckpointError as error:
        raise CheckpointError(f"the draft model: {error}") from None
    check_draft(spec, target)
    return spec


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device = 'cuda', but torch finds no CUDA device; accepted is 'cpu'")
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    return torch.device(name)


def _max_model_len(args: EngineArgs, spec: ModelSpec, log: Callable[[str], None]) -> int:
    limit = spec.max_position_embeddings
    if spec.sliding_window is not None:
        log(
            f"max_model_len is limited to the model's sliding window ({limit}):"
            " beyond it, sliding-window attention is not supported"
        )
    if args.max_model_len is not None and args.max_model_len > limit:
        log(f"max_model_len {args.max_model_len} is lowered to {limit}, what the model supports")
    return min(args.max_model_len or limit, limit)


def _num_blocks(
    args: EngineArgs,
    spec: ModelSpec,
    models: Sequence[_Model | None],
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Size the KV cache, which all `models` have over the same block ids."""
    if args.num_gpu_blocks_override is not None:
        return args.num_gpu_blocks_override
    # Intermediates of a layer at full budget, and the logits (model's dtype and float32) with
    # as much again for sampling.
    widths = 4 * spec.hidden_size + 3 * spec.intermediate_size + 4 * spec.num_heads * spec.head_dim
    num_lines = args.max_num_seqs
    if args.speculative_config:
        num_lines *= 1 + args.speculative_config.max_drafts
    rows = max(min(num_lines, args.max_num_batched_tokens), _PROMPT_LOGPROBS_SLICE)
    reserved_bytes = (
        args.max_num_batched_tokens * widths * dtype.itemsize + rows * spec.vocab_size * 16
    )
    return num_blocks_that_fit(
        sum(model.layout.bytes_per_block for model in models if model),
        device,
        max_useful_blocks=args.max_num_seqs * -(-max_model_len // args.block_size),
        gpu_memory_utilization=args.gpu_memory_utilization,
        reserved_bytes=reserved_bytes,
    )
