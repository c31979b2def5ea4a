"""What makes two requests equal: every parameter counts that somebody did not exclude."""

import msgspec
import pytest

from charonia.config import EngineArgs, SpeculativeConfig
from charonia.control import Limits
from charonia.core.answers.answer_key import (
    CHANGES_NO_TOKEN,
    is_determined,
    prompt_digest,
    revision_of,
    scope_of,
)
from charonia.core.generation_request import GenerationRequest
from charonia.protocol import KeptBlocks, MemoryReport, SamplingParams
from support.echo import EchoExecutor

OTHER = {
    "max_tokens": 17,
    "min_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 4,
    "n": 2,
    "best_of": 2,
    "stop": ("x",),
    "stop_token_ids": (3,),
    "include_stop_str_in_output": True,
    "bad_words": ("y",),
    "allowed_token_ids": (3,),
    "ignore_eos": True,
    "skip_special_tokens": False,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {3: 1.0},
    "logprobs": 0,
    "prompt_logprobs": 0,
    "priority": 1,
    "deadline_ms": 5,
    "tenant": "t",
    "cache_salt": "s",
    "speculation": False,
    "cache_priority": 50,
    "cache_ttl_s": 5.0,
    "use_answer_cache": False,
}
"""A value of each parameter that is not its default."""
REVISION = b"revision"


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_every_parameter_counts_but_those_that_change_no_token(name):
    assert name in OTHER, "say what another value is, and whether it changes tokens"
    needed = {"cache_priority": 35} if name == "cache_ttl_s" else {}
    base = SamplingParams(seed=1, **needed)
    other = msgspec.structs.replace(base, **{name: OTHER[name]})
    is_same = scope_of(base, REVISION) == scope_of(other, REVISION)
    assert is_same == (name in CHANGES_NO_TOKEN)


def test_the_order_of_a_bias_does_not_count():
    one = SamplingParams(logit_bias={1: 2.0, 3: 4.0})
    other = SamplingParams(logit_bias={3: 4.0, 1: 2.0})
    assert scope_of(one, REVISION) == scope_of(other, REVISION)


def test_tenant_and_salt_cannot_be_confused():
    one = SamplingParams(tenant="ab", cache_salt="c")
    other = SamplingParams(tenant="a", cache_salt="bc")
    assert scope_of(one, REVISION) != scope_of(other, REVISION)


@pytest.mark.parametrize(
    ("params", "is_one"),
    [
        ({}, False),
        ({"seed": 0}, True),
        ({"temperature": 0.0}, True),
        ({"top_k": 1}, True),
        ({"top_k": 2}, False),
        ({"temperature": 0.01}, False),
        ({"n": 3, "seed": 1}, True),
    ],
)
def test_an_answer_is_determined_by_a_seed_or_by_greed(params, is_one):
    request = GenerationRequest(key="a", prompt_ids=[1], params=SamplingParams(**params))
    assert is_determined(request) == is_one


def test_a_prompt_counts_token_by_token():
    prompts = [[1], [1, 1], [256], [0, 1], [1, 0], [2**31 - 1]]
    assert len({prompt_digest(prompt) for prompt in prompts}) == len(prompts)


def revision(info=None, **args):
    info = EchoExecutor().info() if info is None else info
    return revision_of(info, EngineArgs(**{"model": "m"} | args), limits_of(info))


def limits_of(info):
    return Limits.of_engine(
        info, async_scheduling=True, enable_prefix_caching=True, enable_chunked_prefill=True
    )


def test_a_revision_is_the_same_for_an_engine_that_was_loaded_again():
    info = EchoExecutor().info()
    kept = KeptBlocks(hash_secret=b"secret", slot_bytes=1, tiers=[])
    memory = MemoryReport(weights=1, step=2, kv_cache=3, left=4, total=5, source="machine")
    changes = {"epoch": 7, "pids": [1, 2], "kept": kept, "memory": memory}
    again = msgspec.structs.replace(info, **changes)
    assert revision(info) == revision(again)


@pytest.mark.parametrize(
    "other",
    [{"checkpoint": "x"}, {"eos_token_ids": [3]}, {"dtype": "int8"}, {"max_model_len": 99}],
)
def test_another_model_is_another_revision(other):
    info = EchoExecutor().info()
    assert revision(info) != revision(msgspec.structs.replace(info, **other))


def test_a_cache_that_shortens_answers_is_another_revision():
    info = EchoExecutor(num_blocks=64).info()
    assert revision(info) != revision(msgspec.structs.replace(info, num_blocks=32))


@pytest.mark.parametrize(
    "other", [{"model": "n"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}]
)
def test_other_arguments_of_the_engine_are_another_revision(other):
    assert revision() != revision(**other)


def test_there_is_none_where_the_text_is_not_the_models():
    config = SpeculativeConfig(model="d", synthetic_acceptance_rate=0.0)
    assert revision(speculative_config=config) is None
