"""The demo pair on two ranks beside itself on one: drafts, samples, bfloat16 and int8.

In bfloat16 and int8 the ranks' sums round otherwise than one sum does, and a rank's part of a
matrix is quantized by itself. There the choices over one text are compared, position by position.
"""

import dataclasses
import inspect
import json
import math
import textwrap
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from charonia import LLM, SamplingParams
from charonia.config import DEMO_CHECKPOINT, DEMO_DRAFT_CHECKPOINT
from charonia.text.tokenizer import Tokenizer
from parity.reference import greedy
from support.long import long
from support.parity import counter
from support.waiting import WAIT_S

NUM_NEW = 24
TEXT_LENGTH = 600
MIN_AGREEMENT = 0.99
FIXED = {"adaptive": False, "num_speculative_tokens": 3}


def test_the_demo_pair_says_the_same_on_two_ranks_greedy_and_sampled() -> None:
    """A checkpoint as it is in use, real text, and drafts by a model that is split as well."""
    prompts = [text[at : at + 60] for text in texts() for at in range(0, 240, 60)]
    asked = [
        SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, temperature=0.8 * (i % 2), seed=i)
        for i in range(len(prompts))
    ]
    sides = []
    for num_ranks in (1, 2):
        drafts = {"model": str(DEMO_DRAFT_CHECKPOINT), "draft_tensor_parallel_size": num_ranks}
        with open_demo(
            num_ranks, "auto", dtype="float32", speculative_config=drafts | FIXED
        ) as llm:
            outputs = llm.generate(prompts, asked, use_tqdm=False)
            assert 0 < counter(llm, "accepted_tokens") < counter(llm, "draft_tokens")
        sides.append([output.outputs[0].token_ids for output in outputs])
    assert sides[0] == sides[1]
    for i in range(0, len(prompts), 2):
        assert sides[1][i] == greedy(DEMO_CHECKPOINT, prompts[i], NUM_NEW).token_ids


@pytest.mark.parametrize("cpu_kernels", ["auto", pytest.param("torch", marks=long)])
@pytest.mark.parametrize(
    "precision",
    [
        {"dtype": "bfloat16"},
        pytest.param({"dtype": "float32", "quantization": "int8"}, marks=long),
        {"dtype": "bfloat16", "quantization": "int8"},
    ],
    ids=lambda precision: ", ".join(precision.values()),
)
def test_two_ranks_choose_as_one_does_in_a_rounded_model(
    cpu_kernels: str, precision: dict[str, str], record_property: Callable[[str, object], None]
) -> None:
    """The text is given, so that one difference brings no others."""
    one, two = (read(open_demo(num_ranks, cpu_kernels, **precision)) for num_ranks in (1, 2))
    margins = [
        min(here.margin, there.margin)
        for here, there in zip(one, two, strict=True)
        if here.token_id != there.token_id
    ]
    agreement = 1 - len(margins) / len(one)
    print(
        f"{cpu_kernels}, {precision}: two ranks choose as one does at {agreement:.2%} of {len(one)}"
        f" positions, and at {margins.count(0.0)} others there are two best tokens;"
        f" margins where they differ: {[round(margin, 4) for margin in sorted(margins)]}"
    )
    record_property("top_1_agreement", agreement)
    record_property("positions", len(one))
    record_property("margins", margins)
    assert len({choice.token_id for choice in one}) > 100
    if cpu_kernels == "torch" and len(precision) == 2 and precision["dtype"] == "bfloat16":
        # Torch's head gives bfloat16 logits, and its int8 products are rounded twice: 33 of 2,995
        # choices differ, 22 of them between tokens of equal logits.
        agreement += margins.count(0.0) / len(one)
    # The texts are those of this Python's library, so a sample: of two where the rate is 99.0 % one
    # has less. Python 3.11.2's have 30 differences where 3.11.7's have fewer.
    chance = 2 * math.sqrt(MIN_AGREEMENT * (1 - MIN_AGREEMENT) / len(one))
    assert agreement >= MIN_AGREEMENT - chance


@dataclass(frozen=True)
class Choice:
    """What a model would have said somewhere, and by how much before the next best."""

    token_id: int
    margin: float


def texts() -> list[list[int]]:
    tokenizer = Tokenizer.from_dir(DEMO_CHECKPOINT)
    modules = (textwrap, json.decoder, inspect, typing, dataclasses)
    return [tokenizer.encode(inspect.getsource(module))[:TEXT_LENGTH] for module in modules]


def read(llm: LLM) -> list[Choice]:
    """The model's choice at every position of the texts."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    choices = []
    with llm:
        for output in llm.generate(texts(), params, use_tqdm=False):
            for entry in (output.prompt_logprobs or [])[1:]:
                assert entry is not None
                best, second = sorted(entry, key=lambda token_id: entry[token_id].rank)[:2]
                choices.append(Choice(best, entry[best].logprob - entry[second].logprob))
    return choices


def open_demo(num_ranks: int, cpu_kernels: str, **engine_args: Any) -> LLM:
    return LLM(
        str(DEMO_CHECKPOINT),
        device="cpu",
        tensor_parallel_size=num_ranks,
        cpu_kernels=cpu_kernels,
        cpu_threads=1,
        rank_timeout_s=WAIT_S,
        num_gpu_blocks_override=400,
        **engine_args,
    )
