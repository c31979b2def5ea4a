"""What is lost by weights of 8 bits: the demo model on Python's own library, beside itself."""

import inspect
import itertools
import json
import math
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import charonia.demo
from charonia import LLM, SamplingParams
from support.kernels import ISAS
from support.long import one_in

MODEL = Path(charonia.demo.__file__).parent / "checkpoints" / "charonia-demo"
NUM_TOKENS = 600
MIN_AGREEMENT = 0.93
MAX_LOSS = 0.01
"""Nats per token."""


def read(cpu_kernels: str, **engine_args: object) -> tuple[list[int], float]:
    """The model's first choice at every position of some texts, and its mean loss on them."""
    values: dict[str, object] = {
        "device": "cpu",
        "cpu_kernels": cpu_kernels,
        "cpu_threads": 1 if cpu_kernels == "torch" else 2,
        "cpu_binding": "none",
    }
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    best, losses = [], []
    with LLM(str(MODEL), **values | engine_args) as llm:
        texts = [
            llm.tokenizer.encode(inspect.getsource(module))[:NUM_TOKENS]
            for module in (textwrap, json, inspect)
        ]
        for text, output in zip(texts, llm.generate(texts, params, use_tqdm=False), strict=True):
            assert output.prompt_logprobs is not None
            for token_id, entry in zip(text[1:], output.prompt_logprobs[1:], strict=True):
                assert entry is not None
                best.append(min(entry, key=lambda other: entry[other].rank))
                losses.append(-entry[token_id].logprob)
    return best, math.fsum(losses) / len(losses)


@pytest.mark.parametrize(
    ("quantization", "cpu_kernels", "dtype"),
    one_in(11, itertools.product(("int8", "w8a8"), (*ISAS, "torch"), ("float32", "bfloat16"))),
)
def test_8_bits_agree_with_the_unquantized_model(
    quantization: str,
    cpu_kernels: str,
    dtype: str,
    record_property: Callable[[str, object], None],
) -> None:
    whole, whole_loss = read(cpu_kernels, dtype=dtype)
    int8, int8_loss = read(cpu_kernels, dtype=dtype, quantization=quantization)
    agreement = sum(a == b for a, b in zip(whole, int8, strict=True)) / len(whole)
    print(
        f"{cpu_kernels}, {dtype}: {quantization} chooses as the unquantized model does at"
        f" {agreement:.2%} of {len(whole)} positions; loss per token {whole_loss:.4f},"
        f" quantized {int8_loss:.4f}"
    )
    record_property("top_1_agreement", agreement)
    record_property("loss", {"unquantized": whole_loss, quantization: int8_loss})
    assert whole != int8, f"{quantization} was not on"
    assert agreement > MIN_AGREEMENT
    assert abs(int8_loss - whole_loss) < MAX_LOSS
