"""What is lost by K and V in fewer bits: the demo model on Python's own library, beside itself.

`test_invariance` shows that nothing else changes tokens; here is what the bits do, by our kernels
and by torch's operations alike.
"""

import inspect
import itertools
import json
import math
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from charonia import LLM, SamplingParams
from charonia.config import DEMO_CHECKPOINT
from parity.reference import random_prompt
from support.kernels import ISAS
from support.long import one_in

Checkpoint = Callable[..., Path]
NUM_TOKENS = 500
MIN_AGREEMENT = {"int8": 0.98, "fp8": 0.96, "int4": 0.9}
MAX_LOSS = {"int8": 0.004, "fp8": 0.012, "int4": 0.04}
"""Nats per token. The texts are short, so a few positions weigh a lot."""


class Reading(NamedTuple):
    """What a model makes of some texts: its first choices, and how likely each token was."""

    best: list[int]
    logprobs: list[float]

    @property
    def loss(self) -> float:
        """Nats per token."""
        return -math.fsum(self.logprobs) / len(self.logprobs)


def open_llm(model: str, cpu_kernels: str, **engine_args: Any) -> LLM:
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "cpu_kernels": cpu_kernels,
        "cpu_threads": 1 if cpu_kernels == "torch" else 2,
        "cpu_binding": "none",
    }
    return LLM(model, **values | engine_args)


@cache
def read(cpu_kernels: str, kv_cache_dtype: str) -> Reading:
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    reading = Reading([], [])
    with open_llm(str(DEMO_CHECKPOINT), cpu_kernels, kv_cache_dtype=kv_cache_dtype) as llm:
        texts = [
            llm.tokenizer.encode(inspect.getsource(module))[:NUM_TOKENS]
            for module in (textwrap, json, inspect)
        ]
        for text, output in zip(texts, llm.generate(texts, params, use_tqdm=False), strict=True):
            assert output.prompt_logprobs is not None
            for token_id, entry in zip(text[1:], output.prompt_logprobs[1:], strict=True):
                assert entry is not None
                reading.best.append(min(entry, key=lambda other: entry[other].rank))
                reading.logprobs.append(entry[token_id].logprob)
    return reading


def agreement(one: Reading, other: Reading) -> float:
    return sum(a == b for a, b in zip(one.best, other.best, strict=True)) / len(one.best)


@pytest.mark.parametrize(
    ("name", "cpu_kernels"), one_in(4, itertools.product(MIN_AGREEMENT, (*ISAS, "torch")))
)
def test_fewer_bits_agree_with_what_they_stand_for(
    name: str, cpu_kernels: str, record_property: Callable[[str, object], None]
) -> None:
    whole, quantized = read(cpu_kernels, "auto"), read(cpu_kernels, name)
    record_property("top_1_agreement", agreement(whole, quantized))
    record_property("loss", {"unquantized": whole.loss, name: quantized.loss})
    assert whole.logprobs != quantized.logprobs, f"{name} was not on"
    assert agreement(whole, quantized) > MIN_AGREEMENT[name]
    assert abs(quantized.loss - whole.loss) < MAX_LOSS[name]


@pytest.mark.parametrize(("name", "cpu_kernels"), one_in(7, itertools.product(MIN_AGREEMENT, ISAS)))
def test_kernels_read_what_torchs_operations_read(name: str, cpu_kernels: str) -> None:
    """The bits are the same but where a number lies between two; so the losses are close."""
    ours, torchs = read(cpu_kernels, name), read("torch", name)
    assert agreement(ours, torchs) > 0.985
    assert abs(ours.loss - torchs.loss) < 2e-3


@pytest.mark.parametrize("name", MIN_AGREEMENT)
def test_samples_are_what_requests_with_their_seeds_are(checkpoint: Checkpoint, name: str) -> None:
    """So the block in which a prompt ends is copied with its scales."""
    prompts = [random_prompt(length) for length in (1, 15, 17, 40)]
    with open_llm(
        str(checkpoint(head_dim=32)), "auto", kv_cache_dtype=name, num_gpu_blocks_override=100
    ) as llm:
        for prompt in prompts:
            params = SamplingParams(seed=5, n=3, max_tokens=20, ignore_eos=True)
            together = llm.generate(prompt, params, use_tqdm=False)[0].outputs
            for index, sample in enumerate(together):
                one = SamplingParams(seed=5 + index, max_tokens=20, ignore_eos=True)
                alone = llm.generate(prompt, one, use_tqdm=False)[0].outputs[0]
                assert sample.token_ids == alone.token_ids
