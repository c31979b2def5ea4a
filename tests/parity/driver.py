"""Drives a Runner by plans written by hand, without a scheduler."""

from pathlib import Path
from typing import Any

from charonia.config import EngineArgs
from charonia.data.runner import Runner
from charonia.protocol import NewRow, RowResult, RowSampling, RowStep, StepPlan, StepResult

GREEDY = RowSampling(seed=0, temperature=0.0, num_logprobs=0)
BLOCK_SIZE = 16


def make_runner(model_dir: Path, device: str = "cpu", **args: Any) -> Runner:
    values = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 8} | args
    return Runner(EngineArgs(model=str(model_dir), device=device, **values), log=lambda line: None)


class Driver:
    """Counts steps, and keeps what each row generated."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._epoch = runner.info().epoch + 1
        self._step_id = 0
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.prompt_logprobs: dict[int, list[float]] = {}

    def step(
        self,
        *rows: RowStep,
        joins: tuple[NewRow, ...] = (),
        leaves: tuple[int, ...] = (),
    ) -> list[RowResult]:
        results = self.execute(*rows, joins=joins, leaves=leaves).rows
        assert [result.row for result in results] == [step.row for step in rows]
        for result in results:
            self.tokens.setdefault(result.row, []).extend(result.token_ids)
            for entry in result.logprobs or []:
                self.logprobs.setdefault(result.row, []).append(entry.logprobs[0])
            for entry in result.prompt_logprobs or []:
                self.prompt_logprobs.setdefault(result.row, []).append(entry.logprobs[0])
        return results

    def execute(
        self,
        *rows: RowStep,
        joins: tuple[NewRow, ...] = (),
        leaves: tuple[int, ...] = (),
    ) -> StepResult:
        plan = StepPlan(
            epoch=self._epoch,
            step_id=self._step_id,
            reset=self._step_id == 0,
            leaves=list(leaves),
            joins=list(joins),
            rows=list(rows),
        )
        self._step_id += 1
        return self._runner.execute(plan)

    def decode(self, row: int, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.step(RowStep(row, 1))


def new_row(
    row: int,
    prompt: list[int],
    block_ids: list[int],
    *,
    num_prompt: int | None = None,
    num_computed: int = 0,
    sampling: RowSampling = GREEDY,
) -> NewRow:
    return NewRow(row, prompt, num_prompt or len(prompt), num_computed, block_ids, sampling)


def blocks_for(num_tokens: int, first: int = 1) -> list[int]:
    """Consecutive block ids that hold `num_tokens` tokens."""
    return list(range(first, first + -(-num_tokens // BLOCK_SIZE)))
