"""Ranks see together what the largest step takes, and what the one with the least has room for."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from charonia.config import EngineArgs
from charonia.data import runner
from charonia.errors import ConfigError
from charonia.parallel.engine import load_engine
from charonia.parallel.messages import Ready
from charonia.parallel.worker_group import WorkerGroup
from support.ranked_engine import rank_args, ranked_engine

Checkpoint = Callable[..., Path]
SPLITS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
    {"cpu_kernels": "torch", "dtype": "bfloat16"},
]


def measured_args(model: Path, **values: Any) -> EngineArgs:
    size = {"num_gpu_blocks_override": None, "max_model_len": 64, "max_num_batched_tokens": 100}
    return rank_args(model, **(size | values))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_ranks_run_the_largest_step_together_and_then_compute(
    checkpoint: Checkpoint, split: dict[str, Any]
) -> None:
    with ranked_engine(measured_args(checkpoint("LlamaForCausalLM"), **split)) as engine:
        info = engine.runner.info()
        assert info.num_blocks == 4 * 4 + 1  # all that four rows can use
        assert info.memory is not None
        assert info.memory.step is not None
        assert len(engine.step([1, 2, 3]).rows[0].token_ids) == 1


def test_the_rank_with_the_least_room_decides(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = WorkerGroup._collect

    def with_less(self: WorkerGroup, kind: Any) -> Any:
        found = collect(self, kind)
        return (
            {rank: Ready(5, one.slot_bytes) for rank, one in found.items()}
            if kind is Ready
            else found
        )

    monkeypatch.setattr(WorkerGroup, "_collect", with_less)
    with ranked_engine(measured_args(checkpoint("LlamaForCausalLM"))) as engine:
        info = engine.runner.info()
        assert info.num_blocks == 5
        assert info.memory is not None
        assert info.memory.kv_cache == 5 * info.kv.bytes_per_block


def test_the_engines_own_step_may_fail_while_the_others_wait_in_theirs(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)  # the other rank most likely waits by now; if not, it will
        raise MemoryError("a tensor of 5 bytes")

    monkeypatch.setattr(runner, "run_largest_step", fail)
    with pytest.raises(MemoryError, match="5 bytes"):
        load_engine(measured_args(checkpoint("LlamaForCausalLM")), log=lambda line: None)


def test_no_room_for_a_block_is_told_in_words(checkpoint: Checkpoint) -> None:
    args = measured_args(checkpoint("LlamaForCausalLM"), kv_cache_memory_bytes=10)
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        load_engine(args, log=lambda line: None)
