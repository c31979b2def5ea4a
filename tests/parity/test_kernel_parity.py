"""Each kind of CPU kernels in its turn against transformers' `generate`, token for token.

`test_llm_parity` shows all ways of running a request with the kernels that this processor gets by
itself; here are the others, and a few of those ways.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from charonia import LLM
from parity.reference import Reference, greedy, random_prompt
from support.checkpoints import ARCHITECTURES
from support.kernels import ISAS
from support.parity import assert_equal_to, counter

Checkpoint = Callable[..., Path]
NUM_NEW = 20
PROMPT_LENGTHS = (1, 16, 17, 33, 64, 100, 290)

pytestmark = [
    pytest.mark.parametrize("architecture", ARCHITECTURES),
    pytest.mark.parametrize("cpu_kernels", [*ISAS, "torch"]),
]


@pytest.fixture
def open_llm(
    checkpoint: Checkpoint, architecture: str, cpu_kernels: str
) -> Iterator[Callable[..., LLM]]:
    opened = []

    def make(**engine_args: Any) -> LLM:
        values = {
            "dtype": "float32",
            "device": "cpu",
            "num_gpu_blocks_override": 100,
            "cpu_kernels": cpu_kernels,
            "cpu_threads": 1 if cpu_kernels == "torch" else 2,
            "cpu_binding": "none",
        }
        opened.append(LLM(str(checkpoint(architecture)), **values | engine_args))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


@pytest.fixture
def references(checkpoint: Checkpoint, architecture: str) -> list[Reference]:
    return [greedy(checkpoint(architecture), prompt, NUM_NEW) for prompt in prompts()]


def prompts() -> list[list[int]]:
    """Unlike prompts, but the last two begin alike."""
    many = [random_prompt(length) for length in PROMPT_LENGTHS]
    many[-1][:48] = many[-2][:48]
    return many


def test_prompts_together_and_then_from_the_prefix_cache_equal_transformers(
    open_llm: Callable[..., LLM], references: list[Reference]
) -> None:
    llm = open_llm()
    assert_equal_to(references, llm, prompts())
    before = counter(llm, "prefix_cache_hit_tokens")
    assert_equal_to(references, llm, prompts())
    hits = counter(llm, "prefix_cache_hit_tokens") - before
    assert hits == sum((length - 1) // 16 * 16 for length in PROMPT_LENGTHS)


def test_chunked_prompts_equal_transformers(
    open_llm: Callable[..., LLM], references: list[Reference]
) -> None:
    assert_equal_to(references, open_llm(max_num_batched_tokens=37, block_size=32), prompts())


def test_preempted_requests_equal_transformers(
    open_llm: Callable[..., LLM], references: list[Reference]
) -> None:
    llm = open_llm(num_gpu_blocks_override=22, max_num_batched_tokens=64)
    assert_equal_to(references, llm, prompts())
    assert counter(llm, "preemptions") > 0
