"""The engine of one process: executes plans, one step at a time.

Owns the order of a step (check, apply the diffs, compute, sample, append) and the engine's place
in the sequence of plans. Must not know who sends plans, or why a row computes what it computes.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from charonia.config import EngineArgs
from charonia.data.kv_store import KVStore, kv_layout, num_blocks_that_fit
from charonia.data.model.decoder import Decoder, Hidden
from charonia.data.model.loader import load_weights
from charonia.data.model.parameters import Parameters
from charonia.data.model.spec import ModelSpec
from charonia.data.ops.base import StepBatch
from charonia.data.ops.native.ops import NativeOps
from charonia.data.ops.select import select_ops
from charonia.data.plan_check import Progress, check_plan
from charonia.data.sampling.native_draw import NativeDraw
from charonia.data.sampling.sampler import SampledRow, Sampler
from charonia.data.step_tensors import StepTensors
from charonia.errors import ConfigError
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
        device = _device(args.device)
        dtype = getattr(torch, spec.dtype if args.dtype == "auto" else args.dtype)
        max_model_len = _max_model_len(args, spec, log)
        self.ops = ops = select_ops(args, dtype, device, log)
        parameters = Parameters(spec, dtype, device)
        num_parameters = load_weights(
            Path(args.model), parameters.checkpoint_tensors(), is_tied=spec.is_tied, log=log
        )
        self._model = Decoder(spec, parameters, ops, num_positions=max_model_len)
        layout = kv_layout(spec, ops, args.block_size, dtype)
        self._kv = KVStore(
            layout,
            ops.page_shapes(layout),
            _num_blocks(args, spec, layout, max_model_len, dtype, device),
            device,
        )
        self._tensors = StepTensors(
            num_rows=args.max_num_seqs,
            max_model_len=max_model_len,
            block_size=args.block_size,
            max_num_batched_tokens=args.max_num_batched_tokens,
            device=device,
        )
        native = NativeDraw(ops.kernels) if isinstance(ops, NativeOps) else None
        self._sampler = Sampler(spec.vocab_size, device, native)
        self._progress = Progress(epoch=0, step_id=-1, needs_reset=True)
        self._info = EngineInfo(
            epoch=0,
            pids=[os.getpid()],
            num_blocks=self._kv.num_blocks,
            kv=layout,
            max_model_len=max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            vocab_size=spec.vocab_size,
            eos_token_ids=list(spec.eos_token_ids),
            architecture=spec.architecture,
            dtype=layout.dtype,
            device=str(device),
            num_parameters=num_parameters,
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
            rows = self._compute(plan.rows) if plan.rows else []
        self._progress = Progress(plan.epoch, plan.step_id, needs_reset=False)
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            rows=rows,
            seconds=time.perf_counter() - started,
        )

    def _apply_diffs(self, plan: StepPlan) -> None:
        if plan.reset:
            self._tensors.clear()
        for row in plan.leaves:
            self._tensors.leave(row)
        for new in plan.joins:
            self._tensors.join(new)

    def _compute(self, steps: list[RowStep]) -> list[RowResult]:
        batch = self._tensors.begin(steps)
        hidden = self._model.hidden_states(batch, self._kv.pages)
        prompt_logprobs = [
            self._prompt_logprobs(step, hidden, start)
            for step, start in zip(steps, batch.query_starts, strict=False)
        ]
        sampled = self._sample(steps, batch, hidden)
        results = []
        for step, prompt in zip(steps, prompt_logprobs, strict=True):
            token_ids, logprobs = sampled.get(step.row, ([], None))
            results.append(RowResult(step.row, token_ids, logprobs, prompt))
        return results

    def _sample(
        self, steps: list[RowStep], batch: StepBatch, hidden: Hidden
    ) -> dict[int, tuple[list[int], list[TokenLogprobs] | None]]:
        """Sample for the rows whose cursor reached their last known token, and append."""
        rows, last_tokens = [], []
        for step, end in zip(steps, batch.query_starts[1:], strict=True):
            state = self._tensors.state(step.row)
            if state.num_computed == state.num_tokens:
                rows.append(step.row)
                last_tokens.append(end - 1)
        if not rows:
            return {}
        if len(rows) < len(batch.positions):
            hidden = hidden.rows(torch.tensor(last_tokens).to(batch.positions.device))
        sampled = self._sampler.sample(
            self._model.logits(hidden), [self._sampled_row(row) for row in rows]
        )
        self._tensors.append(rows, [one.token_id for one in sampled])
        return {
            row: ([one.token_id], None if one.logprobs is None else [one.logprobs])
            for row, one in zip(rows, sampled, strict=True)
        }

    def _sampled_row(self, row: int) -> SampledRow:
        state = self._tensors.state(row)
        return SampledRow(state.sampling, self._tensors.token_ids(row), state.num_prompt)

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
    layout: KVLayout,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    if args.num_gpu_blocks_override is not None:
        return args.num_gpu_blocks_override
    # Intermediates of a layer at full budget, and the logits (model's dtype and float32) with
    # as much again for sampling.
    widths = 4 * spec.hidden_size + 3 * spec.intermediate_size + 4 * spec.num_heads * spec.head_dim
    rows = max(args.max_num_seqs, _PROMPT_LOGPROBS_SLICE)
    reserved_bytes = (
        args.max_num_batched_tokens * widths * dtype.itemsize + rows * spec.vocab_size * 16
    )
    return num_blocks_that_fit(
        layout,
        device,
        max_useful_blocks=args.max_num_seqs * -(-max_model_len // args.block_size),
        gpu_memory_utilization=args.gpu_memory_utilization,
        reserved_bytes=reserved_bytes,
    )
