"""Several samples of one prompt: each is what a request of its own would say, by what is shared.

Greedy ones are held against transformers' `generate`, drawn ones against requests with their seeds.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from charonia import LLM, SamplingParams
from parity.reference import greedy, random_prompt
from support.checkpoints import assert_varied
from support.long import one_in
from support.parity import ONE_THREAD, counter

Checkpoint = Callable[..., Path]
NUM_NEW = 24
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 90)
NUM_SAMPLES = 4
SEED = 11
RUNS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "in chunks": {"max_num_batched_tokens": 13},
    "fewer rows than samples": {"max_num_seqs": 3},
    "preempted": {"num_gpu_blocks_override": 12},
    "preempted, without a cache": {
        "num_gpu_blocks_override": 12,
        "enable_prefix_caching": False,
    },
    "without a cache": {"enable_prefix_caching": False},
    "overlapping": {"async_scheduling": True},
    "with drafts": {
        "speculative_config": {
            "method": "ngram",
            "prompt_lookup_min": 1,
            "adaptive": False,
            "num_speculative_tokens": 3,
        }
    },
    "with a draft model": {"speculative_config": "itself"},
}


def make_llm(model_dir: Path, **args: Any) -> LLM:
    if args.get("speculative_config") == "itself":
        args["speculative_config"] = {
            "model": str(model_dir),
            "quantization": "int8",
            "num_speculative_tokens": 3,
            "adaptive": False,
        }
    values = {"num_gpu_blocks_override": 200, "dtype": "float32", "device": "cpu", **ONE_THREAD}
    return LLM(str(model_dir), **values | args)


def prompts() -> list[list[int]]:
    return [random_prompt(length) for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module", params=["auto", "torch"])
def cpu_kernels(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint, cpu_kernels: str) -> list[list[list[int]]]:
    """For each prompt and each seed the tokens of a request that runs alone."""
    with make_llm(checkpoint(), cpu_kernels=cpu_kernels) as llm:
        return [
            [
                llm.generate(prompt, drawn(SEED + i), use_tqdm=False)[0].outputs[0].token_ids
                for i in range(NUM_SAMPLES)
            ]
            for prompt in prompts()
        ]


def drawn(seed: int, **values: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=NUM_NEW, ignore_eos=True, **values)


def test_the_samples_differ(alone: list[list[list[int]]]) -> None:
    assert all(len({tuple(ids) for ids in samples}) == NUM_SAMPLES for samples in alone)


@pytest.mark.parametrize("run", one_in(2, ((run,) for run in RUNS)))
def test_each_sample_has_the_tokens_of_its_seed(
    checkpoint: Checkpoint, cpu_kernels: str, alone: list[list[list[int]]], run: str
) -> None:
    params = drawn(SEED, n=NUM_SAMPLES)
    with make_llm(checkpoint(), cpu_kernels=cpu_kernels, **RUNS[run]) as llm:
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        assert [[one.token_ids for one in output.outputs] for output in outputs] == alone
        assert (counter(llm, "preemptions") > 0) == run.startswith("preempted")
        llm.generate([5], SamplingParams(max_tokens=1), use_tqdm=False)
        assert llm.metrics.gauges["charonia_kv_blocks", "used"] == 0


def test_greedy_samples_equal_transformers(checkpoint: Checkpoint, cpu_kernels: str) -> None:
    params = SamplingParams(temperature=0.0, n=2, max_tokens=NUM_NEW, ignore_eos=True)
    references = [greedy(checkpoint(), prompt, NUM_NEW).token_ids for prompt in prompts()]
    for reference in references:
        assert_varied(reference)
    with make_llm(checkpoint(), cpu_kernels=cpu_kernels) as llm:
        outputs = llm.generate(prompts(), params, use_tqdm=False)
    for output, reference in zip(outputs, references, strict=True):
        assert [one.token_ids for one in output.outputs] == [reference] * 2


def test_the_best_are_those_of_the_greatest_log_probability(
    checkpoint: Checkpoint, cpu_kernels: str, alone: list[list[list[int]]]
) -> None:
    prompt = prompts()[-1]
    with make_llm(checkpoint(), cpu_kernels=cpu_kernels) as llm:
        [every] = llm.generate(prompt, drawn(SEED, n=NUM_SAMPLES, logprobs=0), use_tqdm=False)
        [best] = llm.generate(prompt, drawn(SEED, n=2, best_of=NUM_SAMPLES), use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda one: one.cumulative_logprob or 0.0, reverse=True)
    assert [one.token_ids for one in best.outputs] == [one.token_ids for one in ranked[:2]]
    assert [one.index for one in best.outputs] == [0, 1]
    assert [one.logprobs for one in best.outputs] == [None, None]
    assert sorted(one.token_ids for one in every.outputs) == sorted(alone[-1])


def test_a_prompt_that_is_scored_is_computed_once(
    checkpoint: Checkpoint, cpu_kernels: str, alone: list[list[list[int]]]
) -> None:
    prompt = prompts()[-1]
    with make_llm(checkpoint(), cpu_kernels=cpu_kernels) as llm:
        params = drawn(SEED, n=NUM_SAMPLES, prompt_logprobs=1)
        [output] = llm.generate(prompt, params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        assert [one.token_ids for one in output.outputs] == alone[-1]
        assert output.timing is not None
        assert output.timing["computed_tokens"] == len(prompt) + NUM_SAMPLES - 1
