"""The whole engine through the Python API against transformers' `generate`: token for token.

The same 16 prompts of mixed lengths run one at a time, together, chunked, preempted and cached;
in float32 every run must give what transformers gives. In bfloat16 the two round differently:
there the share of equal choices is reported, and how close the two best tokens were elsewhere.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from charonia import LLM, SamplingParams
from parity.reference import Reference, greedy, random_prompt
from support.checkpoints import ARCHITECTURES, assert_varied
from support.devices import DEVICES
from support.parity import ONE_THREAD, assert_equal_to, counter

Checkpoint = Callable[..., Path]
NUM_NEW = 24
PROMPT_LENGTHS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 64, 65, 90, 120, 150, 200)
MAX_BFLOAT16_MARGIN = 0.5

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("architecture", ARCHITECTURES),
]


@pytest.fixture
def open_llm(
    checkpoint: Checkpoint, architecture: str, device: str
) -> Iterator[Callable[..., LLM]]:
    opened = []

    def make(**engine_args: Any) -> LLM:
        values = {"dtype": "float32", "num_gpu_blocks_override": 400, **ONE_THREAD} | engine_args
        opened.append(LLM(str(checkpoint(architecture)), device=device, **values))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


@pytest.fixture
def references(checkpoint: Checkpoint, architecture: str, device: str) -> list[Reference]:
    return [
        greedy(checkpoint(architecture), prompt, NUM_NEW, device=device) for prompt in prompts()
    ]


def prompts() -> list[list[int]]:
    """Unlike prompts, but the last three share the first 48 tokens of another."""
    many = [random_prompt(length) for length in PROMPT_LENGTHS]
    for prompt in many[-3:]:
        prompt[:48] = many[12][:48]
    return many


def test_the_reference_text_is_varied(references: list[Reference]) -> None:
    for reference in references:
        assert_varied(reference.token_ids)


def test_one_prompt_at_a_time_equals_transformers(
    open_llm: Callable[..., LLM], references: list[Reference]
) -> None:
    assert_equal_to(references, open_llm(), prompts(), at_once=False)


def test_all_prompts_together_equal_transformers(
    open_llm: Callable[..., LLM], references: list[Reference]
) -> None:
    llm = open_llm(cpu_threads=2)
    assert_equal_to(references, llm, prompts())
    assert counter(llm, "preemptions") == 0


def test_chunked_prompts_equal_transformers(
    open_llm: Callable[..., LLM], references: list[Reference]
) -> None:
    llm = open_llm(max_num_batched_tokens=32)
    assert_equal_to(references, llm, prompts())
    num_steps = llm.metrics.histograms["charonia_step_seconds"].count
    assert num_steps >= sum(PROMPT_LENGTHS) / 32


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_preempted_requests_equal_transformers(
    open_llm: Callable[..., LLM], references: list[Reference], enable_prefix_caching: bool
) -> None:
    # 15 blocks hold the longest request alone; of the others only a few at a time.
    llm = open_llm(
        num_gpu_blocks_override=16,
        max_num_batched_tokens=32,
        enable_prefix_caching=enable_prefix_caching,
    )
    assert_equal_to(references, llm, prompts())
    assert counter(llm, "preemptions") > 0


def test_prefix_hits_equal_transformers_when_the_cache_is_cold_and_when_it_is_warm(
    open_llm: Callable[..., LLM], references: list[Reference]
) -> None:
    llm = open_llm(enable_prefix_caching=True)
    assert_equal_to(references, llm, prompts(), at_once=False)
    cold = counter(llm, "prefix_cache_hit_tokens")
    assert cold == 3 * 48
    assert_equal_to(references, llm, prompts(), at_once=False)
    # Now every prompt hits all of its whole blocks but for the last token's.
    warm = counter(llm, "prefix_cache_hit_tokens") - cold
    assert warm == sum((length - 1) // 16 * 16 for length in PROMPT_LENGTHS)
    assert_equal_to(references, llm, prompts())


def test_without_a_prefix_cache_nothing_is_hit(
    open_llm: Callable[..., LLM], references: list[Reference]
) -> None:
    llm = open_llm(enable_prefix_caching=False)
    assert_equal_to(references, llm, prompts())
    assert_equal_to(references, llm, prompts())
    assert counter(llm, "prefix_cache_hit_tokens") == 0


@pytest.mark.parametrize(
    "engine_args",
    [{}, {"max_num_batched_tokens": 32}, {"num_gpu_blocks_override": 20}],
    ids=["together", "chunked", "tiny pool"],
)
def test_bfloat16_differs_from_transformers_only_where_two_tokens_are_close(
    open_llm: Callable[..., LLM],
    checkpoint: Checkpoint,
    architecture: str,
    device: str,
    engine_args: dict[str, int],
    record_property: Callable[[str, object], None],
) -> None:
    """The reference's own text is given as prompt, so that one difference brings no others."""
    expected = [
        greedy(checkpoint(architecture), prompt, NUM_NEW, dtype="bfloat16", device=device)
        for prompt in prompts()
    ]
    texts = [
        prompt + reference.token_ids for prompt, reference in zip(prompts(), expected, strict=True)
    ]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    outputs = open_llm(dtype="bfloat16", **engine_args).generate(texts, params, use_tqdm=False)
    margins = []
    for output, reference in zip(outputs, expected, strict=True):
        assert output.prompt_logprobs is not None
        for entry, token_id, margin in zip(
            output.prompt_logprobs[-NUM_NEW:], reference.token_ids, reference.margins, strict=True
        ):
            assert entry is not None
            if entry[token_id].rank != 1:
                margins.append(margin)
    agreement = 1 - len(margins) / (NUM_NEW * len(texts))
    print(
        f"{architecture}: top-1 agreement in bfloat16 {agreement:.2%}; margins of the best two"
        f" tokens where they differ: {[round(margin, 4) for margin in margins]}"
    )
    record_property("top_1_agreement", agreement)
    record_property("margins", margins)
    assert max(margins, default=0.0) < MAX_BFLOAT16_MARGIN
    assert agreement > 0.9
