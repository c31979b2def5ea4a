"""How many blocks the KV cache has, by what the largest step leaves of the memory."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from charonia.config import EngineArgs
from charonia.data import runner as runner_module
from charonia.data import sizing as sizing_module
from charonia.data.basis import Basis, LocalRank
from charonia.data.comm import ModelRank
from charonia.data.largest_step import largest_rows, run_largest_step
from charonia.data.loaded_models import Models
from charonia.data.memory import Memory
from charonia.data.model.decoder import Decoder
from charonia.data.ops.base import StepBatch
from charonia.data.runner import Runner
from charonia.data.sampling.sampler import Sampler
from charonia.data.sizing import Room, Sizing, line_of, size
from charonia.errors import ConfigError
from charonia.protocol import MemoryReport

Checkpoint = Callable[..., Path]
CPU = torch.device("cpu")
MIB = 2**20
HOLD_128_MIB_KEEP_64 = """
import torch
from charonia.data.usage import transient_bytes

kept = []

def work():
    torch.ones(128 * 2**20, dtype=torch.uint8)
    kept.append(torch.ones(64 * 2**20, dtype=torch.uint8))

torch.ones(1)
print(transient_bytes(work, torch.device("cpu")))
"""


def arguments(model: Path, **values: Any) -> EngineArgs:
    return EngineArgs(model=str(model), **({"device": "cpu", "max_num_seqs": 4} | values))


def loaded(args: EngineArgs, local_rank: LocalRank | None = None) -> tuple[Basis, Models]:
    def log(line: str) -> None:
        pass

    basis = Basis.of(args, log=log, local_rank=local_rank)
    return basis, Models.load(basis, ModelRank(), ModelRank(), log=log)


def sized(
    args: EngineArgs,
    monkeypatch: pytest.MonkeyPatch,
    *,
    available: int,
    step: int = 0,
    local_rank: LocalRank | None = None,
) -> Sizing:
    """The sizing where so much memory is available, and a step takes so much."""
    memory = Memory(available, 2 * available, "cgroup /app")
    monkeypatch.setattr(sizing_module, "available_memory", lambda: memory)
    monkeypatch.setattr(sizing_module, "transient_bytes", lambda work, device: step)
    return size(*loaded(args, local_rank), lambda pool_tokens: None)


def test_on_a_cpu_the_cache_takes_its_share_of_what_a_step_leaves(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(checkpoint("LlamaForCausalLM"), max_num_seqs=1000)
    one = sized(args, monkeypatch, available=100 * MIB).bytes_per_block
    for share, step, ranks in ((0.25, 0, 1), (0.25, 40 * MIB, 1), (1.0, 7 * MIB, 1), (0.5, 0, 4)):
        shared = msgspec.structs.replace(args, cpu_memory_utilization=share)
        found = sized(
            shared, monkeypatch, available=100 * MIB, step=step, local_rank=LocalRank(0, ranks)
        )
        assert found.num_blocks == int((100 * MIB // ranks - step) * share) // one
        assert found.step_bytes == step


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_is_left_is_what_all_ranks_of_a_machine_leave(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """Each sizes its cache by its share, so that together they take no more than there is."""
    args = arguments(checkpoint("LlamaForCausalLM"), max_num_seqs=1000, cpu_memory_utilization=1.0)
    available, step = 100 * MIB, 7 * MIB
    local_rank = LocalRank(0, num_ranks)
    found = sized(args, monkeypatch, available=available, step=step, local_rank=local_rank)
    report = found.report(found.room, CPU, num_ranks)
    assert report.kv_cache == found.num_blocks * found.bytes_per_block
    assert report.left == available - num_ranks * (step + report.kv_cache)
    assert 0 <= report.left < num_ranks * found.bytes_per_block + num_ranks
    more = found.report(Room(found.num_blocks, 2 * found.bytes_per_block), CPU, num_ranks)
    assert more.left == (report.left if num_ranks == 1 else 0), "another has a draft model as well"


def test_on_a_cpu_no_more_blocks_are_made_than_can_be_used(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(checkpoint("LlamaForCausalLM"), max_model_len=100, max_num_seqs=3)
    found = sized(args, monkeypatch, available=2**40)
    assert found.num_blocks == found.num_useful == 3 * 7 + 1  # of 16 tokens, and the null block


def test_a_size_that_is_given_is_taken_without_a_step(checkpoint: Checkpoint) -> None:
    def must_not_run(pool_tokens: int) -> None:
        pytest.fail("a step was run")

    model = checkpoint("LlamaForCausalLM")
    found = size(*loaded(arguments(model, num_gpu_blocks_override=7)), must_not_run)
    assert (found.num_blocks, found.step_bytes) == (7, None)
    num_bytes = 9 * found.bytes_per_block + 1
    found = size(*loaded(arguments(model, kv_cache_memory_bytes=num_bytes)), must_not_run)
    assert (found.num_blocks, found.step_bytes) == (9, None)


def test_memory_for_no_block_at_all_is_a_clear_error(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint("LlamaForCausalLM")
    with pytest.raises(ConfigError, match=r"at least 2 blocks .* cpu_memory_utilization"):
        sized(arguments(model), monkeypatch, available=1000)
    with pytest.raises(ConfigError, match=r"at least 2 blocks .* only 0 bytes are left"):
        sized(arguments(model), monkeypatch, available=100 * MIB, step=101 * MIB)
    with pytest.raises(ConfigError, match="only 5 bytes are left"):
        sized(arguments(model, kv_cache_memory_bytes=5), monkeypatch, available=100 * MIB)


@pytest.mark.parametrize(
    "size",
    [
        {"num_gpu_blocks_override": 10**13},
        {"num_gpu_blocks_override": 2**53},  # more bytes than 64 bits count
        {"kv_cache_memory_bytes": 2**53},
    ],
    ids=str,
)
def test_a_given_size_that_the_machine_does_not_have_is_a_clear_error(
    checkpoint: Checkpoint, size: dict[str, int]
) -> None:
    args = arguments(checkpoint("LlamaForCausalLM"), **size)
    reason = r"\d+ blocks of \d+ bytes cannot be allocated on cpu: .*; set a smaller num_gpu_bl"
    with pytest.raises(ConfigError, match=reason):
        Runner(args, log=lambda line: None)


def test_a_size_that_no_device_counts_is_a_clear_error(checkpoint: Checkpoint) -> None:
    _, models = loaded(arguments(checkpoint("LlamaForCausalLM")))
    with pytest.raises(ConfigError, match=r"cannot be allocated on meta: \d+ bytes are more than"):
        models.allocate(2**53, torch.device("meta"))


def test_on_a_gpu_the_cache_takes_what_its_share_leaves_beside_what_is_in_use(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    basis, models = loaded(arguments(checkpoint("LlamaForCausalLM"), gpu_memory_utilization=0.5))
    memory_info = (70 * MIB, 100 * MIB)  # free, total
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: memory_info)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * MIB)
    monkeypatch.setattr(sizing_module, "transient_bytes", lambda work, device: 5 * MIB)
    object.__setattr__(basis, "device", torch.device("cuda", 0))
    found = size(basis, models, lambda pool_tokens: None)
    assert found.num_blocks == 15 * MIB // found.bytes_per_block
    report = found.report(Room(10, found.bytes_per_block), basis.device, 2)
    assert (report.weights, report.step) == (20 * MIB, 5 * MIB)
    assert report.left == 65 * MIB - report.kv_cache
    assert (report.total, report.source) == (100 * MIB, "cuda:0")


def test_what_work_held_for_a_while_is_measured_and_what_it_keeps_is_not() -> None:
    """In a process that frees nothing else meanwhile."""
    result = subprocess.run(
        [sys.executable, "-c", HOLD_128_MIB_KEEP_64], capture_output=True, text=True, check=True
    )
    assert 56 * MIB < int(result.stdout) < 120 * MIB


@pytest.mark.parametrize(
    ("rows", "tokens", "length", "pool", "expected"),
    [
        (4, 16, 12, 0, [(12, 12), (2, 2), (1, 1), (1, 1)]),
        (3, 8, 100, 0, [(6, 6), (1, 1), (1, 1)]),
        (3, 8, 100, 50, [(6, 48), (1, 1), (1, 1)]),  # a chunk's context first
        (3, 8, 100, 158, [(6, 100), (1, 29), (1, 29)]),
        (3, 8, 20, 1000, [(6, 20), (1, 20), (1, 20)]),
        (8, 2, 20, 1000, [(1, 20), (1, 20)]),
        (2, 100, 10, 1000, [(10, 10), (10, 10)]),
        (1, 1, 10, 1000, [(1, 10)]),
    ],
)
def test_the_largest_step_has_all_tokens_and_rows_and_the_contexts_that_the_pool_holds(
    rows: int, tokens: int, length: int, pool: int, expected: list[tuple[int, int]]
) -> None:
    args = EngineArgs(model="m", max_num_seqs=rows, max_num_batched_tokens=tokens)
    assert largest_rows(args, length, pool) == expected


@pytest.mark.parametrize("cpu_kernels", ["auto", "torch"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_largest_step_is_run_by_all_that_computes(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, cpu_kernels: Any, kv_cache_dtype: Any
) -> None:
    if kv_cache_dtype != "auto" and cpu_kernels == "auto":
        pytest.skip("only torch's operations read these")
    shapes = []
    compute = Decoder.hidden_states

    def watched(decoder: Decoder, batch: StepBatch, pages: Any) -> Any:
        shapes.append((batch.query_starts[-1], len(batch.context_lens), max(batch.context_lens)))
        return compute(decoder, batch, pages)

    args = arguments(
        checkpoint("LlamaForCausalLM"),
        max_num_batched_tokens=300,
        cpu_kernels=cpu_kernels,
        kv_cache_dtype=kv_cache_dtype,
    )
    basis, models = loaded(args)
    monkeypatch.setattr(Decoder, "hidden_states", watched)
    sampler = Sampler(basis.spec.vocab_size, CPU)
    run_largest_step(basis, models, ModelRank(), ModelRank(), pool_tokens=10_000, sampler=sampler)
    longest = 297 if basis.kernels is not None else 512
    assert shapes == [(300, 4, longest)]


def test_an_engine_tells_what_its_memory_is_for(checkpoint: Checkpoint) -> None:
    lines: list[str] = []
    info = Runner(arguments(checkpoint("LlamaForCausalLM")), log=lines.append).info()
    memory = info.memory
    assert memory is not None
    assert memory.step is not None
    assert memory.kv_cache == info.num_blocks * info.kv.bytes_per_block
    assert 0 < memory.weights < memory.total
    assert 0 < memory.left < memory.total
    assert lines.count(line_of(memory, info.num_blocks)) == 1


def test_an_engine_says_where_memory_keeps_its_cache_small(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded_with(available: int) -> tuple[int, list[str]]:
        memory = Memory(available, 2 * available, "cgroup /app")
        monkeypatch.setattr(sizing_module, "available_memory", lambda: memory)
        lines: list[str] = []
        engine = Runner(
            arguments(checkpoint("LlamaForCausalLM"), max_model_len=64), log=lines.append
        )
        return engine.info().num_blocks, [line for line in lines if "loaded again" in line]

    monkeypatch.setattr(sizing_module, "transient_bytes", lambda work, device: 0)
    assert loaded_with(2**40) == (17, [])
    num_blocks, lines = loaded_with(2**18)
    assert 2 <= num_blocks < 17
    assert lines == [
        f"memory: 17 blocks could be used at most, but there is memory for {num_blocks} now; the KV"
        " cache has no more until the engine is loaded again"
    ]


def test_the_line_says_the_parts_and_the_number_of_blocks() -> None:
    report = MemoryReport(
        weights=3 * MIB,
        step=MIB // 2,
        kv_cache=10 * MIB,
        left=20 * MIB,
        total=40 * MIB,
        source="cgroup /app",
    )
    assert line_of(report, 12) == (
        "memory: 3.0 MiB in use with the weights; largest step 0.5 MiB; KV cache 10.0 MiB,"
        " 12 blocks; 20.0 MiB of 40.0 MiB are left (cgroup /app)"
    )
    unknown = msgspec.structs.replace(report, step=None)
    assert "largest step not measured" in line_of(unknown, 12)


def test_a_step_for_which_there_is_no_memory_keeps_the_engine_from_loading(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("a tensor of 5 bytes")

    monkeypatch.setattr(runner_module, "run_largest_step", fail)
    with pytest.raises(MemoryError, match="5 bytes"):
        Runner(arguments(checkpoint("LlamaForCausalLM")), log=lambda line: None)
