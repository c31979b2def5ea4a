"""What slower tiers keep changes no token: held against transformers' `generate` in float32.

Each prompt is asked for twice, so that it is hit and saved, and the pool has room for few: by the
next round its blocks are gone, and loaded again.
"""

import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from charonia import LLM, SamplingParams
from charonia.errors import ConfigError
from parity.reference import Reference, greedy, random_prompt
from support.checkpoints import assert_varied
from support.long import long, one_in
from support.parity import ONE_THREAD, assert_equal_to, counter
from support.waiting import WAIT_S

Checkpoint = Callable[..., Path]

NUM_NEW = 12
NUM_PROMPTS = 4
LENGTH = 100
HIT = LENGTH // 16 * 16
SPACE = 0.002  # GiB
FILE = {"kv_cache_path": "kv", "kv_cache_file_space": SPACE}
HOST = {"swap_space": SPACE}
FIXED = {"adaptive": False, "num_speculative_tokens": 3}
RUNS: dict[str, dict[str, Any]] = {
    "host": HOST,
    "file": FILE,
    "host and file": HOST | FILE,
    "few slots": HOST | FILE | {"swap_space": 0.0001},
    "in chunks": FILE | {"max_num_batched_tokens": 13},
    "one step after the other": FILE | {"async_scheduling": False},
    "with drafts": FILE
    | {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, **FIXED}},
    "with a draft model": FILE | {"speculative_config": {"model": "itself", **FIXED}},
    "two parts": FILE | {"tensor_parallel_size": 2},
    "two stages": HOST | FILE | {"pipeline_parallel_size": 2},
}


def make_llm(model_dir: Path, directory: Path, **args: Any) -> LLM:
    if "kv_cache_path" in args:
        args["kv_cache_path"] = str(directory / args["kv_cache_path"])
    if args.get("speculative_config", {}).get("model"):
        args["speculative_config"] = args["speculative_config"] | {"model": str(model_dir)}
    values = {
        "num_gpu_blocks_override": 20,
        "dtype": "float32",
        "device": "cpu",
        "rank_timeout_s": WAIT_S,
    }
    return LLM(str(model_dir), **values | ONE_THREAD | args)


def prompts() -> list[list[int]]:
    """None begins as another does."""
    return [[7 + number, *random_prompt(LENGTH)[1:], 3] for number in range(NUM_PROMPTS)]


@pytest.fixture(scope="module", params=["auto", "torch"])
def cpu_kernels(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model_dir(checkpoint: Checkpoint) -> Path:
    return checkpoint()


@pytest.fixture(scope="module")
def references(model_dir: Path) -> list[Reference]:
    found = [greedy(model_dir, prompt, NUM_NEW) for prompt in prompts()]
    for reference in found:
        assert_varied(reference.token_ids)
    return found


def ask(llm: LLM, references: list[Reference], *, num_rounds: int = 1) -> None:
    """Ask for each prompt twice, in rounds; tokens must be the references'."""
    for _ in range(num_rounds):
        for prompt, reference in zip(prompts(), references, strict=True):
            for _ in range(2):
                assert_equal_to([reference], llm, [prompt])


@pytest.mark.parametrize("run", one_in(2, ((run,) for run in RUNS)))
def test_requests_whose_blocks_are_loaded_equal_transformers(
    model_dir: Path, tmp_path: Path, references: list[Reference], cpu_kernels: str, run: str
) -> None:
    with make_llm(model_dir, tmp_path, cpu_kernels=cpu_kernels, **RUNS[run]) as llm:
        ask(llm, references, num_rounds=3)
        num_tiers = len({"swap_space", "kv_cache_path"} & RUNS[run].keys())
        assert counter(llm, "kv_blocks_evicted") > 0
        assert counter(llm, "kv_blocks_saved") >= num_tiers * NUM_PROMPTS * HIT // 16
        assert counter(llm, "kv_blocks_loaded") >= NUM_PROMPTS * HIT // 16
        assert counter(llm, "kv_loads_failed") == 0
        llm.generate([5], SamplingParams(max_tokens=1), use_tqdm=False)
        assert llm.metrics.gauges["charonia_kv_blocks", "used"] == 0
    if "kv_cache_path" not in RUNS[run]:
        return
    with make_llm(model_dir, tmp_path, cpu_kernels=cpu_kernels, **RUNS[run]) as llm:
        for prompt, reference in zip(prompts(), references, strict=True):
            assert_equal_to([reference], llm, [prompt])
        assert counter(llm, "prefix_cache_hit_tokens") == NUM_PROMPTS * HIT, "after a restart"


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4"])
def test_quantized_blocks_are_loaded_as_they_were(
    checkpoint: Checkpoint, tmp_path: Path, kv_cache_dtype: str
) -> None:
    model_dir = checkpoint(head_dim=32)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)

    def answers(llm: LLM) -> list[list[int]]:
        outputs = [llm.generate([p] * 2, params, use_tqdm=False)[1] for p in prompts()]
        return [output.outputs[0].token_ids for output in outputs]

    with make_llm(model_dir, tmp_path, kv_cache_dtype=kv_cache_dtype) as llm:
        expected = answers(llm)
    with make_llm(model_dir, tmp_path, kv_cache_dtype=kv_cache_dtype, **FILE) as llm:
        for _ in range(3):
            assert answers(llm) == expected
        assert counter(llm, "kv_blocks_loaded") > 0


@pytest.mark.parametrize(
    "changed",
    [
        {"cpu_kernels": "torch"},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_an_engine_that_computes_otherwise_finds_nothing_and_says_why(
    checkpoint: Checkpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any],
) -> None:
    model_dir = checkpoint(head_dim=32)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    numbers = []
    for args in ({}, {}, changed):
        with make_llm(model_dir, tmp_path, verbose=True, **FILE | args) as llm:
            [output] = llm.generate(prompts()[0], params, use_tqdm=False)
            llm.generate(prompts()[0], params, use_tqdm=False)
            assert output.timing is not None
            numbers.append(output.timing["cached_tokens"])
    assert numbers == [0, HIT, 0]
    (line,) = (line for line in capsys.readouterr().out.split("\n") if "kv_file_not_used" in line)
    (name,) = changed
    assert f"another {'what computes' if name == 'cpu_kernels' else name} (there" in line


def test_files_of_other_layouts_count_as_those_of_other_models(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model_dir = checkpoint(head_dim=32)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    layouts = [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}, {"block_size": 8}, {}]
    one_file = {"kv_cache_path": "kv", "kv_cache_file_space": 0.0002}
    for layout in layouts:
        with make_llm(model_dir, tmp_path, **one_file | layout) as llm:
            for prompt in prompts() * 2:
                llm.generate([prompt] * 2, params, use_tqdm=False)
        paths = sorted((tmp_path / "kv").iterdir())
        assert sum(path.stat().st_blocks * 512 for path in paths) <= 2 * 0.0002 * 2**30
    assert len(paths) < len(layouts)


def test_a_directory_at_home_is_there(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernels are found where they were built, which would take minutes.
    monkeypatch.setenv(
        "XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or f"{Path.home()}/.cache"
    )
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with LLM(
        str(model_dir),
        device="cpu",
        num_gpu_blocks_override=20,
        kv_cache_path="~/kv",
        kv_cache_file_space=SPACE,
        **ONE_THREAD,
    ):
        assert len(list((tmp_path / "home" / "kv").iterdir())) == 1
    assert not (tmp_path / "~").exists()


def test_more_memory_than_there_is_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"swap_space = 100000 GiB for each of 1 ranks is more"):
        make_llm(model_dir, tmp_path, swap_space=100_000)


@pytest.mark.parametrize("is_other_rank", [False, True])
def test_what_a_full_disk_does_not_keep_is_not_told_of_as_saved(
    model_dir: Path, tmp_path: Path, references: list[Reference], is_other_rank: bool
) -> None:
    """A limit of the process stands for the disk; all slots of a file lie behind it."""
    args = FILE | ({"tensor_parallel_size": 2} if is_other_rank else {})
    others = set(psutil.Process().children())  # servers that tests share
    with make_llm(model_dir, tmp_path, **args) as llm:
        ranks = set(psutil.Process().children()) - others
        (pid,) = [one.pid for one in ranks] if is_other_rank else [0]
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (8192, before[1]))
        try:
            ask(llm, references)
            llm.generate([5], SamplingParams(max_tokens=1), use_tqdm=False)
            assert llm.metrics.gauges["charonia_kv_tier_blocks", "file"] == 0
            assert counter(llm, "kv_blocks_saved") == 0
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        ask(llm, references)
        llm.generate([5], SamplingParams(max_tokens=1), use_tqdm=False)
        num_saved = llm.metrics.gauges["charonia_kv_tier_blocks", "file"]
        assert num_saved == counter(llm, "kv_blocks_saved") == NUM_PROMPTS * HIT // 16
        assert counter(llm, "kv_loads_failed") == 0


def damage(path: Path, state: random.Random) -> None:
    """Write nonsense over some of a file, or cut it off."""
    data = bytearray(path.read_bytes())
    used = next(i for i in range(len(data) - 1, 0, -1) if data[i])
    start = state.randrange(used)
    end = min(used, start + state.choice([1, 64, 4096, 100_000]))
    if state.random() < 0.2:
        del data[start:]
    else:
        data[start:end] = state.randbytes(end - start)
    path.write_bytes(data)


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=long) for i in range(1, 40))])
def test_a_damaged_file_costs_time_and_no_token(
    model_dir: Path, tmp_path: Path, references: list[Reference], seed: int
) -> None:
    """Of one rank of two, whatever the other one has."""
    args = FILE | ({"tensor_parallel_size": 2} if seed % 2 else {})
    with make_llm(model_dir, tmp_path, **args) as llm:
        ask(llm, references)
    state = random.Random(seed)
    for _ in range(3):
        damage(state.choice(sorted((tmp_path / "kv").iterdir())), state)
        with make_llm(model_dir, tmp_path, **args) as llm:
            ask(llm, references)
            hits, loads = counter(llm, "kv_blocks_loaded"), counter(llm, "kv_loads_failed")
            assert hits + loads + counter(llm, "kv_blocks_saved") > 0


@long
def test_another_rank_that_has_lost_its_file_costs_time_and_no_token(
    model_dir: Path, tmp_path: Path, references: list[Reference]
) -> None:
    args = FILE | {"tensor_parallel_size": 2}
    with make_llm(model_dir, tmp_path, **args) as llm:
        ask(llm, references)
    _, second = sorted((tmp_path / "kv").iterdir())
    second.unlink()
    with make_llm(model_dir, tmp_path, **args) as llm:
        ask(llm, references)
        assert counter(llm, "kv_loads_failed") + counter(llm, "kv_blocks_saved") > 0
    with make_llm(model_dir, tmp_path, **args) as llm:
        for prompt, reference in zip(prompts(), references, strict=True):
            assert_equal_to([reference], llm, [prompt])
        assert counter(llm, "prefix_cache_hit_tokens") == NUM_PROMPTS * HIT
        assert counter(llm, "kv_loads_failed") == 0, "it was forgotten"
