"""What the kernels raise, in whatever thread: an error for the caller, and the next call is right.

What is injected is real: memory, and threads, that the operating system does not give, and wrong
values that are found in the middle of an operation. A mistake here ends the process or hangs it, so
all of it is run in a process of its own.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from charonia.config import EngineArgs
from charonia.core.inline import InlineExecutor
from charonia.data.runner import Runner
from charonia.errors import StepFailedError
from charonia.protocol import NewRow, RowSampling, RowStep, StepPlan
from support.kernels import ISAS, kernels_for
from support.long import long, one_in
from support.memory import limited_memory
from support.ranks import Ranks

Checkpoint = Callable[..., Path]
VOCAB = 17 << 20
"""A copy of a line takes more than malloc reserves for a thread, so it is asked for each time."""
LINES = 4
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def process() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that lives as long as it survives what is called."""
    ranks = Ranks(1)

    def call(function: Callable[..., Any], *args: Any) -> Any:
        ranks.start(0, function, *args)
        return ranks.result(0)

    yield call
    ranks.close()


def draw(kernels: ModuleType, logits: Tensor) -> list[int]:
    """Draw from lines that are edited, for which every thread needs memory for a copy."""
    samplings = [
        kernels.Sampling(seed, 1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, {seed: 1.0}, [], [], 0, [])
        for seed in range(len(logits))
    ]
    history = torch.arange(5)
    return kernels.draw(logits, samplings, [history] * len(logits), [5] * len(logits))


def fail_to_draw(isa: str, warm_up: str) -> tuple[int, bool]:
    """Draw without memory, by three threads of which some have what they need from before.

    Returns:
        how often it failed, and whether it was right afterwards.
    """
    kernels = kernels_for(isa)
    logits = torch.randn(LINES, VOCAB, generator=torch.Generator().manual_seed(1))
    kernels.set_threads(1, [])
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        expected = first.submit(draw, kernels, logits).result()
        kernels.set_threads(3, [])
        if warm_up == "helpers":  # often enough for each of them to have had a part of it
            for _ in range(10):
                assert first.submit(draw, kernels, logits).result() == expected
        caller = first if warm_up == "caller" else second
        caller.submit(int).result()  # the thread itself is not what fails
        failures = 0
        with limited_memory(MIB):
            for _ in range(100):
                try:
                    assert caller.submit(draw, kernels, logits).result() == expected
                except MemoryError:
                    failures += 1
                    if failures == 3:
                        break
        is_right = caller.submit(draw, kernels, logits).result() == expected
    return failures, is_right


@pytest.mark.parametrize(
    "warm_up",
    ["nobody", pytest.param("caller", marks=long), pytest.param("helpers", marks=long)],
)
def test_work_that_finds_no_memory_is_an_error_of_the_call_alone(
    process: Callable[..., Any], warm_up: str
) -> None:
    failures, is_right = process(fail_to_draw, ISAS[0], warm_up)
    assert failures > 0
    assert is_right


def meet_wrong_values(isa: str) -> None:
    kernels = kernels_for(isa)
    kernels.set_threads(3, [])
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(1))
    samplings = [
        kernels.Sampling(seed, 1.0, 0, 1.0, 0.0, 1.5, 0.0, 0.0, {}, [], [], 0, [])
        for seed in range(40)
    ]
    right = [torch.arange(i + 1) for i in range(40)]
    expected = kernels.draw(logits, samplings, right, [1] * 40)
    for wrong in range(40):
        for token_id in (3000, -1, 2**62):
            known = list(right)
            known[wrong] = torch.tensor([1, token_id, 2])
            with pytest.raises(ValueError, match=f"token ids has {token_id}; accepted are 0 to"):
                kernels.draw(logits, samplings, known, [1] * 40)
        assert kernels.draw(logits, samplings, right, [1] * 40) == expected


@pytest.mark.parametrize("isa", ISAS)
def test_what_a_piece_of_work_throws_is_thrown_by_the_call(
    process: Callable[..., Any], isa: str
) -> None:
    process(meet_wrong_values, isa)


def start_too_many_threads(isa: str) -> str:
    kernels = kernels_for(isa)
    head = kernels.Head(kernels.Norm(torch.ones(32), 0.0), torch.randn(500, 32), None)
    x = torch.randn(100, 32)
    expected = head(x, x)
    with limited_memory(20 * MIB), pytest.raises(RuntimeError) as caught:
        kernels.set_threads(64, [])
    assert 1 <= kernels.num_threads() < 64
    assert torch.equal(head(x, x), expected)
    kernels.set_threads(3, [])
    assert kernels.num_threads() == 3
    assert torch.equal(head(x, x), expected)
    return str(caught.value)


def test_threads_that_cannot_be_had_are_an_error_and_the_others_compute(
    process: Callable[..., Any],
) -> None:
    assert "of 64 threads: Resource" in process(start_too_many_threads, ISAS[0])


COMPUTE = """
import os, sys, threading, time, warnings
import torch
from charonia.data.ops.native.build import load_kernels
kernels = load_kernels(sys.argv[1], print)
kernels.set_threads(2, [])
head = kernels.Head(kernels.Norm(torch.ones(4096), 1e-6), torch.randn(512, 4096), None)
x = torch.randn(128, 4096)
expected = head(x, x)
kept = []  # for torch aborts the process when one of its tensors is freed while Python ends

def compute():
    while True:
        kept.append(head(x, x))

for _ in range(2):
    threading.Thread(target=compute, daemon=True).start()
time.sleep(0.1)
"""
FORK = """
warnings.simplefilter("ignore")  # of processes with threads that fork
child = os.fork()
if not child:
    for _ in range(2):
        assert torch.equal(head(x, x), expected)
        kernels.set_threads(2, [])
    print("computed")
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""


def run_script(text: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", text, ISAS[0]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return result.returncode, result.stdout, result.stderr


def test_an_interpreter_ends_while_threads_of_its_compute() -> None:
    assert run_script(COMPUTE) == (0, "", "")


@long
def test_what_is_registered_to_run_at_the_end_may_compute() -> None:
    at_exit = "import atexit; atexit.register(lambda: print(head(x, x).equal(expected)))\n"
    first, rest = COMPUTE.split("def compute", 1)
    before_the_kernels = at_exit + first  # what is registered first is called last
    assert run_script(f"{before_the_kernels}def compute{rest}") == (0, "True\n", "")


@long
def test_a_child_that_is_forked_while_threads_compute_can_compute() -> None:
    assert run_script(COMPUTE + FORK) == (0, "computed\n", "")


PROMPT = [5 + 7 * i % 300 for i in range(2500)]


def plan_of(epoch: int, step_id: int) -> StepPlan:
    if step_id:
        return StepPlan(epoch=epoch, step_id=step_id, rows=[RowStep(0, 1)])
    joins = [NewRow(0, PROMPT, 2500, 0, list(range(1, 160)), RowSampling(seed=1))]
    return StepPlan(epoch=epoch, step_id=0, reset=True, joins=joins, rows=[RowStep(0, 2500)])


def run_short_of_memory(isa: str, model_dir: str) -> tuple[list[str], list[list[int]]]:
    """Give a step a little more memory each time, until it has enough.

    Returns:
        The reasons of the failures, and the tokens of two epochs: first and last.
    """
    args = EngineArgs(
        model=model_dir,
        cpu_kernels=isa,
        cpu_threads=2,
        num_gpu_blocks_override=170,
        max_num_batched_tokens=2500,
    )

    def executor() -> InlineExecutor:
        return InlineExecutor(lambda: Runner(args, log=lambda line: None))

    def tokens(executor: InlineExecutor, epoch: int) -> list[int]:
        results = [executor.submit(plan_of(epoch, step)).result(None) for step in range(4)]
        return [token for result in results for token in result.rows[0].token_ids]

    tested, reasons = executor(), []
    for epoch in range(1, 100):
        try:
            with limited_memory((epoch - 1) * 256 * KIB):
                tested.submit(plan_of(epoch, 0)).result(None)
        except StepFailedError as error:
            reasons.append(str(error))
        else:
            break
    return reasons, [tokens(tested, epoch + 1), tokens(executor(), 1)]


@pytest.mark.parametrize("isa", one_in(len(ISAS), ((isa,) for isa in ISAS)))
def test_a_step_without_memory_fails_and_its_engine_goes_on(
    checkpoint: Checkpoint, isa: str
) -> None:
    model_dir = checkpoint("LlamaForCausalLM", max_position_embeddings=4096)
    ranks = Ranks(1)  # its own: the kernels keep the memory that they were given once
    ranks.start(0, run_short_of_memory, isa, str(model_dir))
    reasons, (actual, expected) = ranks.result(0)
    ranks.close()
    assert actual == expected
    assert len(actual) == 4
    assert "MemoryError: std::bad_alloc" in reasons
