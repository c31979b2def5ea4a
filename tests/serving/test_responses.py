"""What a response carries of a chunk."""

import json
import math

import pytest

from charonia.core.output.outputs import Chunk
from charonia.errors import RequestCancelledError
from charonia.protocol import TokenLogprobs
from charonia.serving.conventions.interface import OUTPUTS
from charonia.serving.conventions.schema import OutputOptions
from charonia.serving.requests.responses import Answer, chunk_outputs
from charonia.text.tokenizer import Tokenizer
from support.checkpoints import make_tokenizer

STREAMING = OutputOptions(
    is_streaming=True, has_echo=False, names=frozenset(one.name for one in OUTPUTS)
)
WHOLE = OutputOptions(is_streaming=False, has_echo=True, names=frozenset({"text_output"}))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(make_tokenizer())


def test_a_chunk_in_mid_stream_has_no_reason_yet(tokenizer: Tokenizer) -> None:
    chunk = Chunk("k", text="ab", token_ids=(7, 8), num_prompt_tokens=3)
    outputs = chunk_outputs(Answer([chunk], "", tokenizer), STREAMING)
    assert outputs == {
        "text_output": ["ab"],
        "finish_reason": ["None"],
        "num_input_tokens": [3],
        "num_output_tokens": [2],
        "logprobs": ["null"],
        "output_ids": [7, 8],
    }


def test_the_last_chunk_says_why_it_ends(tokenizer: Tokenizer) -> None:
    chunk = Chunk("k", token_ids=(7,), finish_reason="stop", timing={"total_seconds": 1.5})
    outputs = chunk_outputs(Answer([chunk], "", tokenizer), STREAMING)
    assert outputs["finish_reason"] == ["stop"]
    assert json.loads(outputs["timing"][0]) == {"total_seconds": 1.5}


def test_of_cancelled_samples_those_that_had_ended_keep_their_reason(tokenizer: Tokenizer) -> None:
    error = RequestCancelledError("the request was cancelled")
    chunks = [
        Chunk("k", token_ids=(7,), finish_reason="length"),
        Chunk("k", token_ids=(8,), error=error, index=1),
        Chunk("k", token_ids=(9,), finish_reason="stop", error=error, index=2),
    ]
    outputs = chunk_outputs(Answer(chunks, "", tokenizer), STREAMING)
    assert outputs["finish_reason"] == ["length", "cancelled", "stop"]
    assert outputs["output_ids"] == [7, 8, 9]
    assert outputs["num_output_tokens"] == [1, 1, 1]


def test_without_streaming_the_prompt_comes_first(tokenizer: Tokenizer) -> None:
    chunk = Chunk("k", text=" b", token_ids=(7,), finish_reason="length")
    outputs = chunk_outputs(Answer([chunk], "a", tokenizer), WHOLE)
    assert outputs == {"text_output": ["a b"]}


def test_logprobs_are_json_by_token_id_with_rank_and_text(tokenizer: Tokenizer) -> None:
    entry = TokenLogprobs(token_ids=[65, 66], logprobs=[-2.0, -0.5], rank=4)
    chunk = Chunk("k", text="x", token_ids=(65,), logprobs=(entry,), prompt_logprobs=[None, entry])
    outputs = chunk_outputs(Answer([chunk], "", tokenizer), STREAMING)
    expected = {
        "65": {"logprob": -2.0, "rank": 4, "decoded_token": tokenizer.token_text(65)},
        "66": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.token_text(66)},
    }
    assert json.loads(outputs["logprobs"][0]) == [expected]
    assert json.loads(outputs["prompt_logprobs"][0]) == [None, expected]


def test_a_logprob_that_json_has_no_number_for_is_null(tokenizer: Tokenizer) -> None:
    entry = TokenLogprobs(token_ids=[65, 66], logprobs=[-math.inf, -0.5], rank=2)
    chunk = Chunk("k", text="x", token_ids=(65,), logprobs=(entry,))
    (text,) = chunk_outputs(Answer([chunk], "", tokenizer), STREAMING)["logprobs"]
    assert [one["logprob"] for one in json.loads(text)[0].values()] == [None, -0.5]


def test_each_output_of_the_interface_is_a_property_of_an_answer() -> None:
    properties = {name for name, value in vars(Answer).items() if isinstance(value, property)}
    assert properties == {one.name for one in OUTPUTS}
