"""Requests of TensorRT-LLM's convention as the scheduler gets them, and its answers as theirs."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from charonia.errors import (
    InvalidRequestError,
)
from charonia.serving.conventions.schema import CancelCall, PromptLimits, parse
from charonia.serving.conventions.trtllm.rows import pack_words
from charonia.serving.requests.request_key import Sealer
from support.trtllm import (
    PART_OF_CHARACTER,
    TEXT,
    TOKENIZER,
    TOKENS,
    facade,
    raw_request,
    sampling,
    sampling_of,
    split,
)

# ---------------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
        ({"temperature": 0.5}, {"temperature": 0.0}),
        ({"top_k": 1, "temperature": 0.5}, {"temperature": 0.0, "top_k": 1}),
        ({"top_k": 0, "top_p": 0.0}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
        ({"top_k": 5}, {"temperature": 1.0, "top_k": 5, "top_p": 1.0}),
        ({"top_k": 5, "top_p": 0.0, "temperature": 0.5}, {"temperature": 0.5, "top_p": 1.0}),
        ({"top_p": 0.5}, {"temperature": 1.0, "top_k": 0, "top_p": 0.5}),
    ],
)
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
def test_without_a_limit_the_likeliest_token_is_taken(
    model: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    if model == "tensorrt_llm":
        given = {f"runtime_{k}" if k.startswith("top") else k: v for k, v in given.items()}
    found = sampling(model, **given)
    assert expected.items() <= found.items()


def test_everything_that_is_said_of_sampling_reaches_the_scheduler() -> None:
    found = sampling(
        "ensemble",
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        min_length=2,
        random_seed=2**64 - 1,
        length_penalty=2.0,
        pad_id=9,
        beam_width=1,
    )
    assert found == {
        "max_tokens": 4,
        "min_tokens": 2,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "seed": 2**64 - 1,
        "stop": [],
        "stop_token_ids": [],
        "include_stop_str_in_output": True,
        "bad_words": [],
        "logit_bias": {},
    }


def test_whose_a_request_is_and_when_it_is_due_comes_with_its_own_parameters() -> None:
    own = {"tenant": "a", "priority": -2, "deadline_ms": 50, "timeout": 9}
    raw = replace(raw_request("tensorrt_llm", [TOKENS]), parameters=own | {"top_k": 7, "x": 1})
    ((request, _),) = facade().split(raw)
    assert request.parameters == own
    params = parse(request, limits=PromptLimits(), sealer=Sealer(b"")).params
    assert (params.tenant, params.priority, params.deadline_ms) == ("a", -2, 50)
    stop = replace(raw_request("tensorrt_llm", [TOKENS | {"stop": True}]), request_id="r")
    ((request, _),) = facade().split(replace(stop, parameters=own))
    assert parse(request, limits=PromptLimits(), sealer=Sealer(b"")) == CancelCall("r", "a")


def test_without_an_end_only_tokens_go_on() -> None:
    assert "ignore_eos" not in sampling("ensemble")
    assert sampling("tensorrt_llm")["ignore_eos"] is True
    for model in ("ensemble", "tensorrt_llm"):
        found = sampling(model, end_id=7)
        assert (found["ignore_eos"], found["stop_token_ids"]) == (True, [7])
        assert sampling(model, end_id=-1)["stop_token_ids"] == []


def test_words_are_texts_and_special_tokens_ids() -> None:
    (special,) = sorted(TOKENIZER.special_ids)[:1]
    name = TOKENIZER.token_text(special)
    found = sampling("ensemble", stop_words=["ab", "", name], bad_words=["", "x"], end_id=3)
    assert (found["stop"], found["stop_token_ids"]) == (["ab"], [special, 3])
    assert found["bad_words"] == ["x"]
    words = [TOKENIZER.encode("ab", add_special_tokens=False), [special]]
    found = sampling("tensorrt_llm", stop_words_list=pack_words(words).tolist())
    assert (found["stop"], found["stop_token_ids"]) == (["ab"], [special])
    found = sampling("tensorrt_llm", bad_words_list=pack_words(words[:1]).tolist())
    assert found["bad_words"] == ["ab"]
    found = sampling("tensorrt_llm", stop_words_list=[[PART_OF_CHARACTER], [1]])
    assert (found["stop"], found["stop_token_ids"]) == ([], [PART_OF_CHARACTER])
    with pytest.raises(
        InvalidRequestError, match="stop_words must have special tokens, and those of no"
    ):
        sampling("ensemble", stop_words=[f"{name}ab"])


def test_biases_come_by_words_or_by_the_whole_vocabulary() -> None:
    first, second = TOKENIZER.encode("aq", add_special_tokens=False)
    found = sampling(
        "ensemble", embedding_bias_words=["aq", "a"], embedding_bias_weights=[1.5, -0.5]
    )
    assert found["logit_bias"] == {str(first): 1.0, str(second): 1.5}
    bias = [0.0] * 8
    bias[2] = -3.0
    assert sampling("tensorrt_llm", embedding_bias=bias)["logit_bias"] == {"2": -3.0}
    found = sampling("ensemble", embedding_bias_words=["", "a"], embedding_bias_weights=[9, 1])
    assert found["logit_bias"] == {str(first): 1.0}
    with pytest.raises(InvalidRequestError, match="embedding_bias_weights must be as many as"):
        sampling("ensemble", embedding_bias_words=["ab"], embedding_bias_weights=[1.0, 2.0])


def test_ranges_to_be_retained_are_of_the_prompt_and_what_is_generated_has_its_own() -> None:
    assert "cache_priority" not in sampling("tensorrt_llm")
    inputs = {
        "retention_token_range_starts": [0, 1, 3],
        "retention_token_range_ends": [1, -1, 9],
        "retention_token_range_priorities": [90, 10, 50],
    }
    first = {"start": 0, "end": 1, "priority": 90, "ttl_s": None}
    second = {"start": 1, "end": 3, "priority": 10, "ttl_s": None}
    assert sampling("tensorrt_llm", **inputs)["cache_priority"] == [first, second]
    found = sampling(
        "tensorrt_llm",
        **inputs,
        retention_token_range_durations_ms=[-1, 1500, 7],
        retention_decode_priority=0,
    )
    generated = {"start": 3, "end": None, "priority": 0, "ttl_s": None}
    assert found["cache_priority"] == [first, second | {"ttl_s": 1.5}, generated]
    found = sampling(
        "tensorrt_llm", retention_decode_priority=60, retention_decode_duration_ms=2000
    )
    assert found["cache_priority"] == [generated | {"priority": 60, "ttl_s": 2.0}]


# ---------------------------------------------------------------------- batches


def test_a_batch_of_sequences_is_a_request_for_each_with_seeds_in_a_row() -> None:
    row = TOKENS | {"num_return_sequences": 2, "random_seed": 40, "streaming": True}
    other = row | {"input_ids": [9, 9, 9], "input_lengths": 1, "request_output_len": 8}
    parts = split("tensorrt_llm", row, other, request_id="7")
    assert [part.request.tensors["input_ids"].tolist() for part in parts] == [
        [5, 6, 7],
        [5, 6, 7],
        [9],
        [9],
    ]
    assert [sampling_of(part)["seed"] for part in parts] == [40, 41, 40, 41]
    assert [sampling_of(part)["max_tokens"] for part in parts] == [4, 4, 8, 8]
    assert {part.request.request_id for part in parts} == {"7"}
    answers = [part.answer({"output_ids": [1, 2]}) for part in parts]
    indexes = [
        (one["batch_index"].tolist(), one["sequence_index"].tolist()) for one in answers if one
    ]
    assert indexes == [([[b]], [[s]]) for b in range(2) for s in range(2)]


def test_a_single_request_has_no_indexes_and_its_tokens_their_dimensions() -> None:
    (part,) = split("tensorrt_llm", TOKENS | {"exclude_input_in_output": True})
    answer = part.answer({"output_ids": [1, 2]})
    assert answer is not None
    assert {name: value.tolist() for name, value in answer.items()} == {
        "output_ids": [[[1, 2]]],
        "sequence_length": [[2]],
    }
    assert {value.dtype for value in answer.values()} == {np.dtype(np.int32)}


def test_what_is_not_streamed_begins_with_the_prompt() -> None:
    (part,) = split("tensorrt_llm", TOKENS)
    answer = part.answer({"output_ids": [1]})
    assert answer is not None
    assert answer["output_ids"].tolist() == [[[5, 6, 7, 1]]]
    assert answer["sequence_length"].tolist() == [[4]]
    (part,) = split("tensorrt_llm", TOKENS | {"streaming": True})
    answer = part.answer({"output_ids": [1]})
    assert answer is not None
    assert answer["output_ids"].tolist() == [[[1]]]
    for said, excludes in ((None, False), (False, False), (True, True)):
        inputs = {} if said is None else {"exclude_input_in_output": said}
        (part,) = split("ensemble", TEXT | inputs)
        assert part.request.tensors["exclude_input_in_output"].tolist() == [excludes]
    (part,) = split("ensemble", TEXT | {"stream": True})
    assert "exclude_input_in_output" not in part.request.tensors


def test_log_probabilities_come_by_beam_and_token() -> None:
    (part,) = split("ensemble", TEXT | {"return_log_probs": True})
    assert part.request.output_names == {"text_output", "cumulative_logprob", "logprobs"}
    assert sampling_of(part)["logprobs"] == 0
    entry = {"rank": 1, "decoded_token": "a"}
    logprobs = [{"5": {"logprob": -0.5, **entry}}, {"6": {"logprob": None, **entry}}]
    answer = part.answer(
        {
            "text_output": ["größer"],
            "cumulative_logprob": [-0.5],
            "logprobs": [json.dumps(logprobs)],
        }
    )
    assert answer is not None
    assert answer["text_output"].tolist() == ["größer".encode()]
    assert answer["cum_log_probs"].tolist() == [[-0.5]]
    assert answer["output_log_probs"].tolist() == [[[-0.5, -math.inf]]]
    cancelled = part.answer({"text_output": [""], "logprobs": ["null"]})
    assert cancelled is not None
    assert set(cancelled) == {"text_output", "output_log_probs"}
    assert cancelled["output_log_probs"].shape == (1, 1, 0)
    (part,) = split("ensemble", TEXT)
    assert part.request.output_names == {"text_output"}


def test_only_outputs_that_the_client_wants_are_asked_of_the_scheduler() -> None:
    names = frozenset({"sequence_length", "num_output_tokens", "context_logits"})
    row = TOKENS | {"return_num_output_tokens": True, "return_num_input_tokens": True}
    (part,) = split("tensorrt_llm", row, output_names=names)
    assert part.request.output_names == {"output_ids", "num_output_tokens"}
    answer = part.answer({"output_ids": [1], "num_output_tokens": [1]})
    assert answer is not None
    assert set(answer) == {"sequence_length", "num_output_tokens"}


@pytest.mark.parametrize("end_id", [7, TOKENIZER.encode("q", add_special_tokens=False)[0]])
def test_the_token_that_ends_an_answer_is_no_part_of_it(end_id: int) -> None:
    end = "" if end_id in TOKENIZER.special_ids else TOKENIZER.token_text(end_id)
    row = TEXT | {"end_id": end_id, "return_log_probs": True, "return_num_output_tokens": True}
    (part,) = split("ensemble", row)
    entry = {"rank": 1, "decoded_token": "a"}
    outputs = {
        "text_output": [f"ab{end}"],
        "output_ids": [5, end_id],
        "finish_reason": ["stop"],
        "cumulative_logprob": [-2.0],
        "logprobs": [
            json.dumps([{"5": {"logprob": -0.5} | entry}, {"7": {"logprob": -1} | entry}])
        ],
        "num_output_tokens": [2],
    }
    assert part.request.output_names == outputs.keys()
    answer = part.answer(outputs)
    assert answer is not None
    assert answer["text_output"].tolist() == [b"ab"]
    assert answer["output_log_probs"].tolist() == [[[-0.5]]]
    assert answer["num_output_tokens"].tolist() == [[1]]
    other = part.answer(outputs | {"finish_reason": ["None"]})
    assert other is not None
    assert other["num_output_tokens"].tolist() == [[2]]
    (part,) = split("tensorrt_llm", TOKENS | {"end_id": end_id})
    answer = part.answer({"output_ids": [5, end_id], "finish_reason": ["stop"]})
    assert answer is not None
    assert answer["output_ids"].tolist() == [[[5, 6, 7, 5]]]
    assert answer["sequence_length"].tolist() == [[4]]
