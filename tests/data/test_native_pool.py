"""The kernels' threads: many small operations, from many Python threads, with other sizes between.

A mistake here ends the process or hangs it, so what is most likely to is run in one of its own.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from charonia import LLM, SamplingParams
from support.kernels import ISAS, kernels_for
from support.long import long
from support.waiting import WAIT_S

Checkpoint = Callable[..., Path]
Job = tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]
"""A head, its two inputs, which are the same, and what it must give."""

some_isas = pytest.mark.parametrize(
    "isa",
    [pytest.param(isa, marks=[] if isa in (ISAS[0], ISAS[-1]) else long) for isa in ISAS],
)
"""For what takes all cores for a while, and is alike for all of them."""

# Rows on both sides of 64, where Python's lock is let go.
ROWS = (1, 2, 5, 33, 63, 64, 100, 400)


def jobs(kernels: ModuleType, seed: int) -> list[Job]:
    """Products of many sizes; what they must give is computed with one thread."""
    generator = torch.Generator().manual_seed(seed)
    kernels.set_threads(1, [])
    many: list[Job] = []
    for rows in ROWS:
        weight = torch.randn(40 + 24 * seed, 32, generator=generator)
        x = torch.randn(rows, 32, generator=generator)
        head = kernels.Head(kernels.Norm(torch.ones(32), 0.0), weight, None)
        expected = head(x, x)
        normed = x / x.square().mean(1, keepdim=True).sqrt()
        torch.testing.assert_close(expected, normed @ weight.T, atol=5e-5, rtol=5e-5)
        many.append((head, x, expected))
    return many


def repeat(many: list[Job], seconds: float) -> None:
    """Run all jobs over and over, five times at least, and check each result."""
    until = time.monotonic() + seconds
    rounds = 0
    while rounds < 5 or time.monotonic() < until:
        for head, x, expected in many:
            assert torch.equal(head(x, x), expected)
        rounds += 1


@some_isas
def test_operations_of_two_python_threads_at_once_do_not_mix(isa: str) -> None:
    kernels = kernels_for(isa)
    many = [jobs(kernels, seed) for seed in range(2)]
    kernels.set_threads(2, [])
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda some: repeat(some, 0.5), many))


@some_isas
def test_threads_can_be_more_or_fewer_at_any_time(isa: str) -> None:
    kernels = kernels_for(isa)
    many = jobs(kernels, 0)
    with ThreadPoolExecutor(1) as threads:
        busy = threads.submit(repeat, many, 0.5)
        changes = 0
        while changes < 7 or not busy.done():
            count = (1, 2, 3, 8, 2, 1, 4)[changes % 7]
            kernels.set_threads(count, [])
            assert kernels.num_threads() == count
            changes += 1
            time.sleep(0.001)
        busy.result()
    kernels.set_threads(2, [])


@pytest.mark.parametrize("isa", ISAS)
def test_threads_that_fell_asleep_wake_up(isa: str) -> None:
    """They sleep 0.2 ms after the last operation; some pauses end just then."""
    kernels = kernels_for(isa)
    many = jobs(kernels, 0)
    kernels.set_threads(3, [])
    for pause in [0.0001, 0.00019, 0.0002, 0.00021, 0.0005, 0.005] * 10:
        time.sleep(pause)
        for head, x, expected in many[-2:]:
            assert torch.equal(head(x, x), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 100])
def test_after_an_operation_that_raised_any_thread_can_compute(isa: str, rows: int) -> None:
    """It has taken the kernels' lock by then, and from 64 rows on let go of Python's."""
    kernels = kernels_for(isa)
    many = jobs(kernels, 0)
    kernels.set_threads(2, [])
    half = torch.ones(rows, 8, dtype=torch.float16)
    with ThreadPoolExecutor(1) as threads:
        for _ in range(3):
            with pytest.raises(ValueError, match=r"not .*Half"):
                kernels.rms_norm(None, half, half[0], 1e-6)
            repeat(many, 0)
            threads.submit(repeat, many, 0).result()


CONSTRUCT_WHILE_COMPUTING = """
import sys, threading, time
import torch
from charonia.data.ops.native.build import load_kernels
kernels = load_kernels(sys.argv[1], print)
kernels.set_threads(2, [])
weight, x = torch.randn(512, 512), torch.randn(128, 512)
norm = kernels.Norm(torch.ones(512), 1e-6)
head = kernels.Head(norm, weight, None)
expected = head(x, x)
until = time.monotonic() + float(sys.argv[2])
def rounds():  # some at least, however slow the machine is
    number = 0
    while number < 50 or time.monotonic() < until:
        yield number
        number += 1
def compute():
    for _ in rounds():
        assert torch.equal(head(x, x), expected)
thread = threading.Thread(target=compute)
thread.start()
for _ in rounds():
    assert torch.equal(kernels.Head(norm, weight, None)(x[:1], x[:1]), expected[:1])
thread.join()
print("done")
"""


@pytest.mark.parametrize("seconds", [0.5, pytest.param(2, marks=long)])
def test_a_model_can_be_made_while_another_computes(seconds: float) -> None:
    result = subprocess.run(
        [sys.executable, "-c", CONSTRUCT_WHILE_COMPUTING, ISAS[0], str(seconds)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


CHOOSE_TWICE = """
import os, threading
import torch
from charonia.config import EngineArgs
from charonia.data.ops.select import select_ops
before = os.sched_getaffinity(0)
for _ in range(2):
    lines = []
    select_ops(EngineArgs(model=""), torch.float32, torch.device("cpu"), lines.append)
    print(lines[-1])
thread = threading.Thread(target=lambda: print(os.sched_getaffinity(0) == before))
thread.start()
thread.join()
"""


@long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_second_model_of_a_process_gets_as_many_cores_as_the_first() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CHOOSE_TWICE], capture_output=True, text=True, timeout=WAIT_S
    )
    first, second, is_free = result.stdout.splitlines()
    assert first == second
    # Threads that are started later (a server's, a library's) are not held to the first core.
    assert is_free == "True"


@pytest.mark.parametrize("isa", ISAS)
def test_two_engines_in_two_threads_generate_what_each_does_alone(
    checkpoint: Checkpoint, isa: str
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [[[5 + seed, 9, 200, 31 + i] * (3 + 20 * i) for i in range(3)] for seed in range(2)]
    engine_args = {
        "dtype": "bfloat16",
        "cpu_kernels": isa,
        "cpu_threads": 2,
        "cpu_binding": "none",
        "num_gpu_blocks_override": 64,
    }
    started = threading.Barrier(2)

    def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def together(llm: LLM, prompts: list[list[int]]) -> list[list[list[int]]]:
        started.wait()
        return [generate(llm, prompts) for _ in range(3)]

    models = [checkpoint("LlamaForCausalLM"), checkpoint("Qwen3ForCausalLM")]
    llms = [LLM(str(model_dir), **engine_args) for model_dir in models]
    expected = [generate(llm, some) for llm, some in zip(llms, prompts, strict=True)]
    with ThreadPoolExecutor(2) as threads:
        actual = list(threads.map(together, llms, prompts))
    for llm in llms:
        llm.close()
    assert actual == [[tokens] * 3 for tokens in expected]
