"""Comparison of the engine's answers with transformers' `generate`, and its counters."""

from collections.abc import Sequence
from typing import Any

import pytest

from charonia import LLM, SamplingParams
from parity.reference import Reference

LOGPROB_TOLERANCE = 1e-4

ONE_THREAD = {"cpu_threads": 1}
"""An engine computes in one thread. More do not help with a model this small, and those of several
processes of tests, bound to the same cores, would spin while they wait for each other.
"""


def assert_equal_to(
    references: Sequence[Reference],
    llm: LLM,
    prompts: list[list[int]],
    *,
    at_once: bool = True,
    **sampling: Any,
) -> None:
    """Complete the prompts greedily; tokens must be the references', log-probabilities close.

    Args:
        at_once: hand all prompts over together, not one after the other.
        sampling: more of `SamplingParams`, which must not change a token.
    """
    num_new = len(references[0].token_ids)
    params = SamplingParams(
        temperature=0.0, max_tokens=num_new, ignore_eos=True, logprobs=0, **sampling
    )
    batches = [prompts] if at_once else [[prompt] for prompt in prompts]
    outputs = [one for batch in batches for one in llm.generate(batch, params, use_tqdm=False)]
    for output, reference in zip(outputs, references, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == reference.token_ids
        assert completion.finish_reason == "length"
        assert completion.logprobs is not None
        logprobs = [
            entry[token_id].logprob
            for entry, token_id in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        assert logprobs == pytest.approx(reference.logprobs, abs=LOGPROB_TOLERANCE)


def counter(llm: LLM, name: str) -> float:
    """Return the value of one of the engine's counters."""
    return llm.metrics.counters[f"charonia_{name}_total", ""]
