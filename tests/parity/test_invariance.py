"""A request's tokens do not depend on how it is run, in bfloat16 and fewer bits neither.

The CPU kernels promise it to the bit, so here nothing is close: a request alone, together with
others, chunked, preempted, resumed, with drafts and answered from the cache gives the same tokens,
greedy and sampled. Weights may be in 8 bits meanwhile, and K and V in 8 or 4.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from charonia import LLM, SamplingParams
from parity.reference import random_prompt
from support.checkpoints import assert_varied
from support.kernels import ISAS
from support.long import one_in

Checkpoint = Callable[..., Path]
NUM_NEW = 40
PROMPT_LENGTHS = (1, 5, 16, 31, 33, 64, 90, 150, 300)

pytestmark = [
    pytest.mark.parametrize(
        ("quantization", "kv_cache_dtype", "architecture", "cpu_kernels"),
        one_in(
            11,
            itertools.product(
                (None, "int8", "w8a8"),
                ("auto", "int8", "fp8", "int4"),
                ("LlamaForCausalLM", "Qwen3ForCausalLM"),
                ISAS,
            ),
        ),
    ),
]

RUNS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked": {"max_num_batched_tokens": 23},
    "chunked more, with one thread": {"max_num_batched_tokens": 7, "cpu_threads": 1},
    "two at a time": {"max_num_seqs": 2},
    "preempted": {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 64},
    "preempted, without a cache": {"num_gpu_blocks_override": 26, "enable_prefix_caching": False},
    "with drafts of its own": {"speculative_config": "itself"},
}


def params() -> list[SamplingParams]:
    """Every other request is greedy, the rest are drawn with a seed of their own.

    The penalty keeps greedy ones from loops, into which some of these models fall.
    """
    return [
        SamplingParams(temperature=0.0, frequency_penalty=1, max_tokens=NUM_NEW, ignore_eos=True)
        if index % 2
        else SamplingParams(temperature=1.0, seed=index, max_tokens=NUM_NEW, ignore_eos=True)
        for index in range(len(PROMPT_LENGTHS))
    ]


def prompts() -> list[list[int]]:
    many = [random_prompt(length) for length in PROMPT_LENGTHS]
    many[-1][:64] = many[-2][:64]
    return many


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(prompts(), params(), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_a_requests_tokens_do_not_depend_on_how_it_is_run(
    checkpoint: Checkpoint,
    cpu_kernels: str,
    architecture: str,
    kv_cache_dtype: str,
    quantization: str | None,
) -> None:
    model_dir = checkpoint(architecture, head_dim=32)  # as int4 needs a multiple of

    def open_llm(**engine_args: Any) -> LLM:
        if engine_args.get("speculative_config") == "itself":
            drafts = {"model": str(model_dir), "num_speculative_tokens": 3, "adaptive": False}
            engine_args["speculative_config"] = drafts
        values = {
            "kv_cache_dtype": kv_cache_dtype,
            "dtype": "bfloat16",
            "device": "cpu",
            "quantization": quantization,
            "num_gpu_blocks_override": 200,
            "cpu_kernels": cpu_kernels,
            "cpu_threads": 2,
            "cpu_binding": "none",
        }
        return LLM(str(model_dir), **values | engine_args)

    with open_llm() as llm:
        # The last of these finds its first blocks in the cache, and then all find all of theirs.
        alone = [
            llm.generate([prompt], one, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, one in zip(prompts(), params(), strict=True)
        ]
        assert generate(llm) == alone, "with a warm cache"
        assert llm.metrics.counters["charonia_prefix_cache_hit_tokens_total", ""] > 600
    for tokens in alone:
        assert_varied(tokens)
    for name, engine_args in RUNS.items():
        with open_llm(**engine_args) as llm:
            assert generate(llm) == alone, name
            preemptions = llm.metrics.counters["charonia_preemptions_total", ""]
            assert (preemptions > 0) == name.startswith("preempted")
