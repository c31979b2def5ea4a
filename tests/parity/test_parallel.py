"""A model split among ranks says what it says whole: token for token in float32.

Every layout of ranks, through torch.distributed (`cpu_kernels` "torch") and through our kernels and
shared memory, against transformers' `generate`: on few KV blocks and in small chunks, so that
requests are preempted all the time, behind prefix hits, and with drafts. The checkpoints are such
that little divides evenly.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from charonia import LLM, SamplingParams
from parity.reference import Reference, greedy, prompt_logprobs, random_prompt
from support.checkpoints import assert_varied
from support.long import one_in
from support.parity import LOGPROB_TOLERANCE, assert_equal_to, counter
from support.waiting import WAIT_S

Checkpoint = Callable[..., Path]

NUM_NEW = 24
PROMPT_LENGTHS = (1, 15, 16, 17, 33, 64, 90, 150)
CHUNK = 48
KERNELS = ("auto", "torch")
FIXED = {"adaptive": False, "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, **FIXED}

MODELS: dict[str, dict[str, Any]] = {
    # 389 token ids and 130 inner values: neither is a multiple of 4, nor is half of them of 2.
    "biases": {
        "architecture": "LlamaForCausalLM",
        "attention_bias": True,
        "mlp_bias": True,
        "vocab_size": 389,
        "intermediate_size": 130,
    },
    # Every rank has the one KV head.
    "one KV head": {
        "architecture": "MistralForCausalLM",
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "vocab_size": 386,
    },
    # Four ranks have two KV heads twice; the head's last rows are nobody's.
    "tied": {
        "architecture": "Qwen2ForCausalLM",
        "tie_word_embeddings": True,
        "vocab_size": 385,
        "intermediate_size": 100,
    },
    # Two stages have two layers and one.
    "three layers": {"architecture": "Qwen3ForCausalLM", "num_hidden_layers": 3},
    # Three ranks have two query heads each, of two KV heads with three query heads each.
    "six heads": {
        "architecture": "LlamaForCausalLM",
        "num_attention_heads": 6,
        "hidden_size": 96,
        "vocab_size": 388,
        "intermediate_size": 128,
    },
}
FOUR = tuple(MODELS)[:4]
LAYOUTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))
DRAFT_PARTS = {(2, 1): 1, (4, 1): 2, (2, 2): 2, (3, 1): 3}
"""Ranks that the draft model is split among; other layouts draft without a model."""


@dataclass(frozen=True)
class Case:
    """An engine to be tested."""

    model: str
    num_parts: int
    num_stages: int
    cpu_kernels: str

    def __str__(self) -> str:
        return f"{self.model}, TP {self.num_parts}, PP {self.num_stages}, {self.cpu_kernels}"

    def speculative_config(self, model_dir: Path) -> dict[str, Any]:
        """Drafts of which some are right: by the model itself, with its weights rounded."""
        draft_parts = DRAFT_PARTS.get((self.num_parts, self.num_stages))
        if draft_parts is None:
            return NGRAM
        return {
            "model": str(model_dir),
            "quantization": "int8",
            "draft_tensor_parallel_size": draft_parts,
            **FIXED,
        }


CASES = [
    *(Case("six heads", 3, 1, kernels) for kernels in KERNELS),
    *(
        Case(model, *layout, kernels)
        for model, layout, kernels in itertools.product(FOUR, LAYOUTS, KERNELS)
    ),
]


@dataclass(frozen=True)
class Engine:
    """A case's engine, which is started once, and what it must say."""

    case: Case
    model_dir: Path
    llm: LLM
    references: list[Reference]


@pytest.fixture(scope="module", params=one_in(11, ((case,) for case in CASES)), ids=str)
def engine(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[Engine]:
    case: Case = request.param
    model_dir = checkpoint(**MODELS[case.model])
    references = [greedy(model_dir, prompt, NUM_NEW) for prompt in prompts()]
    with LLM(
        str(model_dir),
        dtype="float32",
        device="cpu",
        tensor_parallel_size=case.num_parts,
        pipeline_parallel_size=case.num_stages,
        cpu_kernels=case.cpu_kernels,
        cpu_threads=1,
        rank_timeout_s=WAIT_S,
        num_gpu_blocks_override=16,
        max_num_seqs=6,
        max_num_batched_tokens=CHUNK,
        speculative_config=case.speculative_config(model_dir),
    ) as llm:
        yield Engine(case, model_dir, llm, references)


def prompts() -> list[list[int]]:
    return [random_prompt(length) for length in PROMPT_LENGTHS]


def test_the_reference_text_is_varied(engine: Engine) -> None:
    for reference in engine.references:
        assert_varied(reference.token_ids)


def test_chunked_and_preempted_requests_equal_transformers(engine: Engine) -> None:
    llm = engine.llm
    preempted, steps = counter(llm, "preemptions"), num_steps(llm)
    assert_equal_to(engine.references, llm, prompts(), speculation=False)
    assert counter(llm, "preemptions") > preempted
    assert num_steps(llm) - steps > sum(PROMPT_LENGTHS) / CHUNK
    assert counter(llm, "draft_tokens") == 0


def test_requests_behind_a_prefix_hit_equal_transformers(engine: Engine) -> None:
    llm, last = engine.llm, len(PROMPT_LENGTHS) - 1
    for _ in range(2):
        hits = counter(llm, "prefix_cache_hit_tokens")
        assert_equal_to(engine.references[last:], llm, prompts()[last:], speculation=False)
    assert counter(llm, "prefix_cache_hit_tokens") - hits == (PROMPT_LENGTHS[last] - 1) // 16 * 16


def test_requests_with_drafts_equal_transformers(engine: Engine) -> None:
    llm = engine.llm
    preempted = counter(llm, "preemptions")
    assert_equal_to(engine.references, llm, prompts())
    assert counter(llm, "preemptions") > preempted
    accepted, drafted = counter(llm, "accepted_tokens"), counter(llm, "draft_tokens")
    assert drafted > 0
    if engine.case.speculative_config(Path()) is not NGRAM:
        assert 0 < accepted < drafted


def test_samples_of_one_prompt_are_those_of_requests_of_their_own(engine: Engine) -> None:
    """Of all ranks, stages and models the blocks are copied with which they begin."""
    params = SamplingParams(n=3, seed=7, max_tokens=NUM_NEW, ignore_eos=True)
    alone = [SamplingParams(seed=7 + i, max_tokens=NUM_NEW, ignore_eos=True) for i in range(3)]
    for prompt in prompts()[3:]:
        together = engine.llm.generate(prompt, params, use_tqdm=False)[0].outputs
        expected = engine.llm.generate([prompt] * 3, alone, use_tqdm=False)
        assert [one.index for one in together] == [0, 1, 2]
        assert [one.token_ids for one in together] == [one.outputs[0].token_ids for one in expected]


def test_prompts_are_scored_as_by_transformers(engine: Engine) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = engine.llm.generate(prompts(), params, use_tqdm=False)
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert output.prompt_logprobs is not None
        scores = [
            entry[token_id].logprob
            for token_id, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
            if entry is not None
        ]
        assert scores == pytest.approx(
            prompt_logprobs(engine.model_dir, prompt), abs=LOGPROB_TOLERANCE
        )


def num_steps(llm: LLM) -> float:
    return llm.metrics.histograms["charonia_step_seconds"].count
