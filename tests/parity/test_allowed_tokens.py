"""Only allowed tokens are generated, and they are the right ones, however a request is run.

Greedy ones are held against transformers' `generate` with a logits processor in float32. Drawn ones
are held against the maximum of transformers' logits and charonia's noise over the allowed tokens.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from charonia import LLM, SamplingParams
from charonia.data.sampling.noise import gumbel, signed_seed
from charonia.llm import CompletionOutput
from parity.reference import Reference, greedy, logits_of, random_prompt
from support.checkpoints import VOCAB_SIZE
from support.parity import LOGPROB_TOLERANCE, ONE_THREAD, counter

Checkpoint = Callable[..., Path]
NUM_NEW = 24
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 90)
NUM_SAMPLES = 3
SEED = 5
TEMPERATURE = 0.8
CLOSE = 1e-3
"""Sums of logit and noise that rounding may order in either way."""
ALLOWED = (*random.Random(3).sample(range(1, VOCAB_SIZE), 24), 17, 17)
BIAS = {ALLOWED[0]: 2.5, ALLOWED[1]: -3.0, 0: 100.0}
"""Of two allowed tokens, and of one that is not."""
FIXED = {"adaptive": False, "num_speculative_tokens": 3}
RUNS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "in torch": {"cpu_kernels": "torch"},
    "in chunks": {"max_num_batched_tokens": 13},
    "fewer rows than samples": {"max_num_seqs": 2},
    "preempted": {"num_gpu_blocks_override": 12},
    "overlapping": {"async_scheduling": True},
    "two parts": {"tensor_parallel_size": 2},
    "with drafts": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, **FIXED}},
    "with a draft model": {"speculative_config": {"model": "itself", **FIXED}},
    "with a draft model, overlapping": {
        "speculative_config": {"model": "itself", **FIXED},
        "async_scheduling": True,
    },
    "with a draft model in torch": {
        "speculative_config": {"model": "itself", **FIXED},
        "cpu_kernels": "torch",
    },
}


class Allowing(LogitsProcessor):
    """Adds biases, and then excludes all but some tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See transformers."""
        return constrained(scores)


PROCESSOR = Allowing()


def constrained(logits: Tensor) -> Tensor:
    """Logits [n, vocab] with the biases, and -inf where a token is not allowed."""
    biased = logits.clone()
    for token_id, bias in BIAS.items():
        biased[:, token_id] += bias
    excluded = torch.full_like(logits, -torch.inf)
    allowed = sorted({*ALLOWED})
    excluded[:, allowed] = biased[:, allowed]
    return excluded


def make_llm(model_dir: Path, **args: Any) -> LLM:
    if args.get("speculative_config", {}).get("model"):
        args["speculative_config"] = args["speculative_config"] | {"model": str(model_dir)}
    values = {"num_gpu_blocks_override": 200, "dtype": "float32", "device": "cpu", **ONE_THREAD}
    return LLM(str(model_dir), **values | args)


def prompts() -> list[list[int]]:
    return [random_prompt(length) for length in PROMPT_LENGTHS]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=NUM_NEW,
        ignore_eos=True,
        allowed_token_ids=ALLOWED,
        logit_bias=BIAS,
        logprobs=2,
        **values,
    )


@pytest.fixture(scope="module")
def references(checkpoint: Checkpoint) -> list[Reference]:
    return [greedy(checkpoint(), prompt, NUM_NEW, processor=PROCESSOR) for prompt in prompts()]


def test_the_constraint_changes_the_reference(
    checkpoint: Checkpoint, references: list[Reference]
) -> None:
    for prompt, reference in zip(prompts(), references, strict=True):
        assert {*reference.token_ids} <= {*ALLOWED}
        assert reference.token_ids != greedy(checkpoint(), prompt, NUM_NEW).token_ids
    assert len({token_id for one in references for token_id in one.token_ids}) > 5


@pytest.mark.parametrize("run", RUNS)
def test_allowed_tokens_are_those_of_transformers(
    checkpoint: Checkpoint, references: list[Reference], run: str
) -> None:
    with make_llm(checkpoint(), **RUNS[run]) as llm:
        greedily = llm.generate(prompts(), params(temperature=0.0, n=2), use_tqdm=False)
        sampling = params(temperature=TEMPERATURE, seed=SEED, n=NUM_SAMPLES)
        drawn = llm.generate(prompts(), sampling, use_tqdm=False)
        assert (counter(llm, "preemptions") > 0) == (run == "preempted")
        assert (counter(llm, "accepted_tokens") > 0) == ("speculative_config" in RUNS[run])
    for output, reference in zip(greedily, references, strict=True):
        for one in output.outputs:
            assert one.token_ids == reference.token_ids
            assert logprobs_of(one) == pytest.approx(reference.logprobs, abs=LOGPROB_TOLERANCE)
    num_close = 0
    for prompt, output in zip(prompts(), drawn, strict=True):
        assert len({tuple(one.token_ids) for one in output.outputs}) > 1
        for one in output.outputs:
            num_close += assert_drawn(checkpoint(), prompt, one, SEED + one.index)
    assert num_close < 0.02 * NUM_NEW * NUM_SAMPLES * len(PROMPT_LENGTHS)


def assert_drawn(model_dir: Path, prompt: list[int], drawn: CompletionOutput, seed: int) -> int:
    """Compare each token with the one that is drawn independently; returns how many are close."""
    logits = logits_of(model_dir, prompt + drawn.token_ids[:-1])[len(prompt) - 1 :]
    positions = torch.arange(len(prompt), len(prompt) + NUM_NEW)
    token_ids = torch.arange(VOCAB_SIZE).expand(NUM_NEW, -1)
    noise = gumbel(torch.tensor([signed_seed(seed)] * NUM_NEW), positions, token_ids)
    scores = constrained(logits).double() / TEMPERATURE + noise
    best = scores.topk(2, dim=-1)
    is_close = best.values[:, 0] - best.values[:, 1] < CLOSE
    assert all(
        close or token_id == expected
        for close, token_id, expected in zip(
            is_close.tolist(), drawn.token_ids, best.indices[:, 0].tolist(), strict=True
        )
    )
    assert {*drawn.token_ids} <= {*ALLOWED}
    chosen = torch.tensor(drawn.token_ids).unsqueeze(1)
    expected = torch.log_softmax(logits.double(), -1).gather(1, chosen).flatten().tolist()
    assert logprobs_of(drawn) == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
    return int(is_close.sum())


def logprobs_of(completion: CompletionOutput) -> list[float]:
    """The log-probabilities of its tokens: raw, so they know of no constraint."""
    assert completion.logprobs is not None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [entry[token_id].logprob for token_id, entry in pairs]
