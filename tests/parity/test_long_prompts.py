"""Prompts of thousands of tokens, in chunks and from the cache, as transformers computes them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from charonia import LLM
from parity.reference import greedy, random_prompt
from support.kernels import ISAS
from support.long import one_in
from support.parity import assert_equal_to, counter

LENGTH, NUM_NEW = 4096, 20


@pytest.mark.parametrize(
    ("cpu_kernels", "chunk"),
    one_in(5, [(kernels, chunk) for kernels in (*ISAS, "torch") for chunk in (4096, 2048, 700)]),
)
def test_a_long_prompt_equals_transformers(
    checkpoint: Callable[..., Path], cpu_kernels: str, chunk: int
) -> None:
    model = checkpoint(max_position_embeddings=LENGTH + NUM_NEW)
    prompt = random_prompt(LENGTH)
    reference = greedy(model, prompt, NUM_NEW)
    llm = LLM(
        str(model),
        dtype="float32",
        device="cpu",
        cpu_kernels=cpu_kernels,
        cpu_threads=1 if cpu_kernels == "torch" else 2,
        cpu_binding="none",
        num_gpu_blocks_override=300,
        max_num_batched_tokens=chunk,
    )
    try:
        assert_equal_to([reference], llm, [prompt])
        before = counter(llm, "prefix_cache_hit_tokens")
        assert_equal_to([reference], llm, [prompt])
        assert counter(llm, "prefix_cache_hit_tokens") - before == LENGTH - 16
    finally:
        llm.close()
