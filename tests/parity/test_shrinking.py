"""A KV cache that shrinks as requests run changes no token: against transformers in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from charonia import LLM, SamplingParams
from parity.reference import greedy, random_prompt
from support.checkpoints import assert_varied
from support.parity import ONE_THREAD, assert_equal_to
from support.waiting import WAIT_S, eventually

Checkpoint = Callable[..., Path]
NUM_NEW = 24
ALL_IS_TOO_LITTLE = 0.999
"""To be left for others: more than any machine leaves."""


def blocks(llm: LLM, state: str) -> float:
    return llm.metrics.gauges["charonia_kv_blocks", state]


@pytest.mark.parametrize(
    "args", [{}, {"cpu_kernels": "torch"}, {"tensor_parallel_size": 2}], ids=str
)
def test_requests_on_blocks_that_become_fewer_equal_transformers(
    checkpoint: Checkpoint, args: dict[str, Any]
) -> None:
    model_dir = checkpoint()
    prompts = [random_prompt(length) for length in (90, 17, 150, 33, 64)]
    references = [greedy(model_dir, prompt, NUM_NEW) for prompt in prompts]
    for reference in references:
        assert_varied(reference.token_ids)
    values = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 200,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "rank_timeout_s": WAIT_S,
        "memory_reserve": ALL_IS_TOO_LITTLE,
    }
    with LLM(str(model_dir), **values | ONE_THREAD | args) as llm:
        for _ in range(2):
            assert_equal_to(references, llm, prompts)

        def has_least() -> bool:
            llm.generate([1, 2], SamplingParams(max_tokens=1), use_tqdm=False)
            return blocks(llm, "total") - blocks(llm, "aside") == -(-200 // 16)

        eventually(has_least)
        assert_equal_to(references, llm, prompts)
        assert blocks(llm, "used") == 0
