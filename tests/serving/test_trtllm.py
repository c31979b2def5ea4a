"""Requests of TensorRT-LLM's convention as the scheduler gets them, and its answers as theirs."""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.config import DEMO_CHECKPOINT
from charonia.errors import (
    CharoniaError,
    ExactTextError,
    InvalidRequestError,
    NotSupportedError,
    QueueFullError,
    RequestCancelledError,
)
from charonia.protocol import SamplingParams
from charonia.serving.convention import Part
from charonia.serving.tensors import NUMPY_TYPES, Outputs, RawRequest
from charonia.serving.trtllm.facade import (
    BATCH_NEEDS_DECOUPLED,
    MAX_RETURN_SEQUENCES,
    MAX_SEQUENCES,
    STOP_NEEDS_ID,
    STREAM_NEEDS_DECOUPLED,
    Facade,
    TextFacade,
    TokenFacade,
)
from charonia.serving.trtllm.rows import Row, pack_words
from charonia.serving.trtllm.tables import MODELS, Refused
from charonia.serving.trtllm.text import Postprocessing, Preprocessing
from charonia.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_dir(DEMO_CHECKPOINT)
PART_OF_CHARACTER = TOKENIZER.encode("\U0001f9ff", add_special_tokens=False)[0]
TOKENS: dict[str, Any] = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 4}
TEXT: dict[str, Any] = {"text_input": "a prompt", "max_tokens": 4}


def raw_request(model: str, rows: list[dict[str, Any]], **fields: Any) -> RawRequest:
    """A request for a batch; each row has the same inputs, as plain values."""
    types = {one.name: one for one in MODELS[model].inputs}
    tensors = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        one = types[name]
        if one.datatype == "STRING":
            values = [
                [text.encode() if isinstance(text, str) else text for text in value]
                if isinstance(value, list)
                else [value.encode() if isinstance(value, str) else value]
                for value in values
            ]
        elif len(one.dims) == 1 and not isinstance(values[0], list):
            values = [[value] for value in values]
        tensors[name] = np.array(values, dtype=NUMPY_TYPES[one.datatype])
    names = frozenset(one.name for one in MODELS[model].outputs)
    return RawRequest(tensors, {}, **({"output_names": names} | fields))


def facade(model: str = "tensorrt_llm", *, is_decoupled: bool = True) -> Facade:
    kind = TokenFacade if model == "tensorrt_llm" else TextFacade
    return kind(model, TOKENIZER, is_decoupled=is_decoupled)


@dataclass(frozen=True)
class Split:
    """A request of the scheduler, and what its answers mean."""

    request: RawRequest
    part: Part

    def answer(self, outputs: Outputs) -> Outputs | None:
        return self.part.answer(outputs)

    def failure(self, error: CharoniaError) -> CharoniaError | None:
        return self.part.failure(error)


def split(
    model: str, *rows: dict[str, Any], is_decoupled: bool = True, **fields: Any
) -> list[Split]:
    raw = raw_request(model, [*rows], **fields)
    return [Split(*pair) for pair in facade(model, is_decoupled=is_decoupled).split(raw)]


def sampling_of(part: Split) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(part.request.tensors["sampling_parameters"].item())
    SamplingParams(**{k: v for k, v in values.items() if k != "logit_bias"})
    return values


def sampling(model: str, **inputs: Any) -> dict[str, Any]:
    (part,) = split(model, (TOKENS if model == "tensorrt_llm" else TEXT) | inputs)
    return sampling_of(part)


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


# ---------------------------------------------------------------------- what is refused


REFUSED = [
    pytest.param(model, one, id=f"{model} {one.name}")
    for model in ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")
    for one in MODELS[model].refused
]


@pytest.mark.parametrize(("model", "one"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(model: str, one: Refused) -> None:
    raw = raw_request(model, [TOKENS if model == "tensorrt_llm" else TEXT])
    dtype = NUMPY_TYPES[one.datatype]
    shape = [1, *(2 if size == -1 else size for size in one.dims)]
    value = np.full(shape, b"x" if dtype is np.object_ else 3, dtype=dtype)
    with pytest.raises(NotSupportedError, match=f"^{one.name} = .* is not supported; leave it out"):
        facade(model).split(replace_tensors(raw, {one.name: value}))
    for neutral in one.neutral:
        tensors = {one.name: np.full([1, *one.dims], neutral, dtype=dtype)}
        assert facade(model).split(replace_tensors(raw, tensors))
    empty = np.zeros([1, *(0 if size == -1 else size for size in one.dims)], dtype=dtype)
    if not empty.size:
        assert facade(model).split(replace_tensors(raw, {one.name: empty}))


def replace_tensors(raw: RawRequest, tensors: dict[str, Any]) -> RawRequest:
    return RawRequest(raw.tensors | tensors, {}, output_names=raw.output_names)


@pytest.mark.parametrize(
    ("model", "inputs", "text"),
    [
        ("ensemble", {"max_tokens": 4}, "text_input is not present in the request"),
        ("ensemble", {"text_input": "a"}, "max_tokens is not present in the request"),
        ("tensorrt_llm", {"input_ids": [1]}, "request_output_len is not present in the request"),
        (
            "tensorrt_llm",
            {"request_output_len": 1, "input_lengths": 1},
            "input_ids is not present in the request",
        ),
        ("tensorrt_llm", TOKENS | {"input_lengths": 4}, "input_lengths must be from 1 to 3"),
        ("tensorrt_llm", TOKENS | {"input_lengths": 0}, "input_lengths must be from 1 to 3"),
        ("tensorrt_llm", TOKENS | {"num_return_sequences": 0}, "must be from 1 to 64, but is 0"),
        (
            "tensorrt_llm",
            TOKENS | {"num_return_sequences": 10**9},
            f"num_return_sequences must be from 1 to {MAX_RETURN_SEQUENCES}",
        ),
        (
            "tensorrt_llm",
            TOKENS | {"stop_words_list": [[1, 2, 3], [2, 1, -1]]},
            "stop_words_list must say in its second row where each word ends, from 3 to 3",
        ),
        (
            "tensorrt_llm",
            TOKENS | {"bad_words_list": [[1, 2], [3, -1]]},
            "bad_words_list must say in its second row where each word ends, from 1 to 2",
        ),
        ("tensorrt_llm", TOKENS | {"input_ids": []}, "input_ids must have at least one token"),
        (
            "tensorrt_llm",
            TOKENS | {"stop_words_list": [[-5, 6], [2, -1]]},
            "stop_words_list must have token ids from 0 to 4095, but has -5",
        ),
        (
            "tensorrt_llm",
            TOKENS | {"bad_words_list": [[10**9], [1]]},
            "bad_words_list must have token ids from 0 to 4095, but has 1000000000",
        ),
        (
            "tensorrt_llm",
            TOKENS | {"bad_words_list": [[PART_OF_CHARACTER], [1]]},
            "bad_words_list must have words of whole characters",
        ),
        (
            "tensorrt_llm",
            TOKENS | {"embedding_bias": [1.0] * 5000},
            "embedding_bias must have at most 4096 values other than 0, but has 5000",
        ),
        ("ensemble", TEXT | {"stop_words": [b"\xff"]}, "stop_words is not valid UTF-8"),
        ("ensemble", {"text_input": "a" * (2**24 + 1), "max_tokens": 1}, "at most 16777216 bytes"),
        ("ensemble", TEXT | {"bad_words": ["a" * (2**18 + 1)]}, "at most 262144 bytes"),
        (
            "ensemble",
            TEXT | {"stop_words": ["a"] * 65},
            "stop_words must have at most 64 entries and 8192 characters, but has 65 and 65",
        ),
        (
            "ensemble",
            TEXT | {"embedding_bias_words": ["a" * 2**17], "embedding_bias_weights": [1.0]},
            "embedding_bias_words must have at most 4096 entries and 65536 characters",
        ),
    ],
)
def test_a_request_that_says_too_little_or_too_much_is_refused(
    model: str, inputs: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        split(model, inputs)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({}, "all inputs must have the same batch, but there are none"),
        (
            {"input_lengths": np.array([[1], [2]], dtype=np.int32)},
            "input_ids 1, input_lengths 2",
        ),
        (
            {"input_ids": np.array([1], dtype=np.int32)},
            r"input_ids must be INT32 of shape \[batch, n\], but has shape \[1\] and type int32",
        ),
        (
            {"input_ids": np.array([[1]], dtype=np.int64)},
            r"input_ids must be INT32 of shape \[batch, n\], but has shape \[1, 1\] and type int64",
        ),
        (
            {"input_ids": np.zeros((0, 1), dtype=np.int32)},
            "all inputs must have the same batch, but there are input_ids 0",
        ),
    ],
)
def test_tensors_without_a_common_batch_are_refused(tensors: dict[str, Any], text: str) -> None:
    given = {"input_ids": np.array([[1]], dtype=np.int32)} | tensors if tensors else {}
    with pytest.raises(InvalidRequestError, match=text):
        facade().split(RawRequest(given, {}))


def test_errors_say_which_request_of_a_batch_they_are_about() -> None:
    wrong = TOKENS | {"input_lengths": 4}
    with pytest.raises(InvalidRequestError, match=r"^request 1 of the batch: input_lengths"):
        split("tensorrt_llm", TOKENS, wrong)
    _, second = split("tensorrt_llm", TOKENS, TOKENS)
    found = second.failure(InvalidRequestError("max_tokens must be 1"))
    assert str(found) == "request 1 of the batch: request_output_len must be 1"


def test_one_request_does_not_fill_the_queue() -> None:
    row = TOKENS | {"num_return_sequences": 64}
    assert len(split("tensorrt_llm", *[row] * 4)) == MAX_SEQUENCES
    text = (
        "num_return_sequences of all requests in a batch must be at most 256 together, but is 320"
    )
    with pytest.raises(InvalidRequestError, match=text):
        split("tensorrt_llm", *[row] * 5)


def test_a_model_that_is_not_decoupled_says_what_it_cannot_do_as_theirs_does() -> None:
    for rows, text in (
        ([TOKENS, TOKENS], BATCH_NEEDS_DECOUPLED),
        ([TOKENS | {"streaming": True}], STREAM_NEEDS_DECOUPLED),
    ):
        with pytest.raises(ExactTextError) as error:
            split("tensorrt_llm", *rows, is_decoupled=False)
        assert str(error.value) == text
    with pytest.raises(InvalidRequestError, match="num_return_sequences must be 1 where"):
        split("tensorrt_llm", TOKENS | {"num_return_sequences": 2}, is_decoupled=False)
    assert len(split("tensorrt_llm", TOKENS | {"streaming": False}, is_decoupled=False)) == 1


def test_of_a_requests_own_parameters_only_tritons_count() -> None:
    row = TOKENS | {"stop": True}
    raw = raw_request("tensorrt_llm", [row], request_id="7")
    parameters = {"Streaming": True, "timeout": 5, "temperature": 3}
    ((request, _),) = facade().split(replace(raw, parameters=parameters))
    assert request.parameters == {"timeout": 5}


def test_a_stop_cancels_the_requests_of_its_id_and_needs_one() -> None:
    with pytest.raises(ExactTextError, match=STOP_NEEDS_ID):
        split("tensorrt_llm", TOKENS | {"stop": True})
    with pytest.raises(InvalidRequestError, match="stop must be the same in all of a batch"):
        split("tensorrt_llm", TOKENS | {"stop": True}, TOKENS | {"stop": False}, request_id="7")
    (part,) = split("tensorrt_llm", TOKENS | {"stop": True}, request_id="7")
    assert part.request.request_id == "7"
    assert {name: value.item() for name, value in part.request.tensors.items()} == {"cancel": True}
    assert part.answer({"text_output": [""]}) is None
    error = InvalidRequestError("no")
    assert part.failure(error) is error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequestError("max_tokens must be 1"), "request_output_len must be 1"),
        (InvalidRequestError("top_p must be 1"), "runtime_top_p must be 1"),
        (
            InvalidRequestError("min_tokens must be from 0 to max_tokens (4), but is 'top_p'"),
            "min_length must be from 0 to request_output_len (4), but is 'top_p'",
        ),
        (InvalidRequestError("a stop is no stop"), "a stop is no stop"),
        (QueueFullError("seed is full"), "random_seed is full"),
        (ExactTextError("seed is what it is"), "seed is what it is"),
    ],
)
def test_errors_speak_of_the_models_own_tensors(error: CharoniaError, expected: str) -> None:
    (part,) = split("tensorrt_llm", TOKENS)
    found = part.failure(error)
    assert found is not None
    assert (str(found), found.kind, found.code) == (expected, error.kind, error.code)


def test_a_request_that_is_stopped_just_ends() -> None:
    (part,) = split("tensorrt_llm", TOKENS)
    assert part.failure(RequestCancelledError("the request was cancelled")) is None


# ---------------------------------------------------------------------- word lists and texts


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), max_size=6))
def test_packed_words_are_the_same_words(words: list[list[int]]) -> None:
    packed = pack_words(words)
    assert packed.shape == (2, sum(map(len, words)))
    assert Row({"stop_words_list": packed}).word_list("stop_words_list") == words


def test_preprocessing_gives_what_tensorrt_llm_takes(tmp_path: Any) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    model = Preprocessing(TOKENIZER, tmp_path)
    rows = [
        {"QUERY": "abc", "STOP_WORDS_DICT": ["a", "bc"], "BAD_WORDS_DICT": ["x", ""]},
        {"QUERY": "a", "STOP_WORDS_DICT": ["", "q"], "BAD_WORDS_DICT": ["", ""]},
    ]
    raw = raw_request("preprocessing", [row | {"REQUEST_OUTPUT_LEN": 9} for row in rows])
    outputs = model.answer(raw)
    ids = [TOKENIZER.encode(str(row["QUERY"])) for row in rows]
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[len(one)] for one in ids]
    for row, one in zip(outputs["INPUT_ID"].tolist(), ids, strict=True):
        assert row == one + [3] * (len(row) - len(one))
    assert outputs["OUT_END_ID"].tolist() == outputs["OUT_PAD_ID"].tolist() == [[3], [3]]
    assert outputs["REQUEST_OUTPUT_LEN"].tolist() == [[9], [9]]
    assert outputs["EMBEDDING_BIAS"].shape == (2, 0)
    words = [
        Row({"w": words}).word_list("w")
        for words in (*outputs["STOP_WORDS_IDS"], *outputs["BAD_WORDS_IDS"])
    ]
    assert [["".join(map(TOKENIZER.token_text, ids)) for ids in one] for one in words] == [
        ["a", "bc"],
        ["q"],
        ["x"],
        [],
    ]


def test_preprocessing_takes_the_clients_ends_and_biases(tmp_path: Any) -> None:
    row = {
        "QUERY": "a",
        "END_ID": 7,
        "PAD_ID": 8,
        "EMBEDDING_BIAS_WORDS": ["b"],
        "EMBEDDING_BIAS_WEIGHTS": [2.5],
    }
    outputs = Preprocessing(TOKENIZER, tmp_path).answer(raw_request("preprocessing", [row]))
    assert (outputs["OUT_END_ID"].item(), outputs["OUT_PAD_ID"].item()) == (7, 8)
    (biased,) = TOKENIZER.encode("b", add_special_tokens=False)
    bias = outputs["EMBEDDING_BIAS"]
    assert bias.shape == (1, TOKENIZER.vocab_size)
    assert (bias[0, biased], np.count_nonzero(bias)) == (2.5, 1)
    plain = Preprocessing(TOKENIZER, tmp_path).answer(
        raw_request("preprocessing", [{"QUERY": "a"}])
    )
    assert plain["OUT_END_ID"].item() == -1


def test_postprocessing_decodes_what_counts_and_hands_the_rest_on() -> None:
    ids = TOKENIZER.encode("größer", add_special_tokens=False)
    tensors = {
        "TOKENS_BATCH": np.array([[ids], [ids]], dtype=np.int32),
        "SEQUENCE_LENGTH": np.array([[len(ids)], [2]], dtype=np.int32),
        "CUM_LOG_PROBS": np.array([[0.5], [1.5]], dtype=np.float32),
    }
    model = Postprocessing(TOKENIZER)
    outputs = model.answer(RawRequest(tensors, {}))
    assert outputs["OUTPUT"].tolist() == ["größer".encode(), TOKENIZER.decode(ids[:2]).encode()]
    assert outputs["OUT_CUM_LOG_PROBS"].tolist() == [[0.5], [1.5]]
    wrong = tensors | {"SEQUENCE_LENGTH": np.array([[len(ids) + 1], [2]], dtype=np.int32)}
    with pytest.raises(InvalidRequestError, match="SEQUENCE_LENGTH must have 1 numbers"):
        model.answer(RawRequest(wrong, {}))
    with pytest.raises(InvalidRequestError, match="TOKENS_BATCH must have token ids from 0"):
        model.answer(RawRequest(tensors | {"TOKENS_BATCH": tensors["TOKENS_BATCH"] - 4096}, {}))
    del tensors["SEQUENCE_LENGTH"]
    with pytest.raises(InvalidRequestError, match="SEQUENCE_LENGTH is not present"):
        model.answer(RawRequest(tensors, {}))
