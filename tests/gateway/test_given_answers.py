"""An answer that was given before says so, over OpenAI's API too, and can be declined."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from charonia.gateway.generation import Usage
from charonia.gateway.openai.chat import ChatForm
from charonia.gateway.openai.completions import TextForm
from charonia.gateway.openai.logprobs import Spelling
from charonia.gateway.openai.requests import ChatRequest, CompletionRequest
from charonia.gateway.prompts import Prompt
from charonia.launch.server.tritonserver import TritonServer
from charonia.text.tokenizer import Tokenizer
from charonia_client import Chunk, Completion, Sample
from support.gateway import Gateway, running_gateway

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
SAMPLED: dict[str, Any] = {"max_tokens": 8, "seed": 5, "ignore_eos": True}
NUMBERS = count()


@pytest.fixture(scope="module")
def keeping(narrow_server: TritonServer, chatting: Path) -> Iterator[Gateway]:
    """A gateway in front of a server that keeps answers."""
    with running_gateway([narrow_server.grpc_url], chatting) as gateway:
        yield gateway


@pytest.fixture
def prompt() -> str:
    """A new one for each test."""
    return f"prompt {next(NUMBERS)}"


def body_of(path: str, prompt: str) -> dict[str, Any]:
    given = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {}
    return SAMPLED | (given or {"prompt": prompt})


def streamed(gateway: Gateway, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, without the one that has the usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = gateway.http.post(path, json=body | options).text.split("\n\n")
    data = [line.removeprefix("data: ") for line in lines if line]
    *chunks, last = [msgspec.json.decode(one) for one in data[:-1]]
    assert last["choices"] == []
    assert "cached" not in last
    return chunks


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_an_answer_that_was_given_before_says_so_whole_and_at_a_streams_end(
    keeping: Gateway, prompt: str, path: str
) -> None:
    body = body_of(path, prompt) | {"n": 2}
    first, again = (keeping.http.post(path, json=body).json() for _ in range(2))
    assert "cached" not in first
    assert again["cached"] == "exact"
    assert "similarity" not in again
    assert again["choices"] == first["choices"]
    *chunks, last = streamed(keeping, path, body)
    assert last["cached"] == "exact"
    assert chunks
    assert not any("cached" in one for one in chunks)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_who_declines_answers_that_were_given_before_gets_none(
    keeping: Gateway, prompt: str, path: str
) -> None:
    body = body_of(path, prompt)
    first = keeping.http.post(path, json=body).json()
    declined = keeping.http.post(path, json=body | {"use_answer_cache": False}).json()
    assert "cached" not in declined
    assert declined["choices"] == first["choices"]
    assert "cached" not in streamed(keeping, path, body | {"use_answer_cache": False})[-1]


def test_what_the_cache_keeps_makes_no_other_request(keeping: Gateway, prompt: str) -> None:
    """`cache_priority` and `cache_ttl_s` are taken, also for ranges, and change no token."""
    body = body_of(TEXT, prompt)
    ranges = [{"end": 4, "priority": 90, "ttl_s": 2.5}, {"start": 4, "priority": 0}]
    first = keeping.http.post(TEXT, json=body | {"cache_priority": ranges}).json()
    again = keeping.http.post(TEXT, json=body | {"cache_priority": 80, "cache_ttl_s": 60}).json()
    assert again["cached"] == "exact"
    assert again["choices"] == first["choices"]


def test_each_of_several_prompts_says_it_for_itself(keeping: Gateway, prompt: str) -> None:
    keeping.http.post(TEXT, json=body_of(TEXT, prompt))
    body = SAMPLED | {"prompt": [f"{prompt}, another", prompt], "n": 1}
    answer = keeping.http.post(TEXT, json=body).json()
    assert "cached" not in answer
    assert [one.get("cached") for one in answer["choices"]] == [None, "exact"]
    found = [
        {**choice, "top": chunk.get("cached")}
        for chunk in streamed(keeping, TEXT, body)
        for choice in chunk["choices"]
        if choice["finish_reason"]
    ]
    assert [one.get("cached") for one in found] == ["exact", "exact"]
    assert [one["top"] for one in found] == [None, None]


# ---------------------------------------------------------------------- without a server

SEMANTIC = {"cached": "semantic", "similarity": 0.97}


def test_a_similar_prompts_answer_says_how_similar_it_is(model: Path) -> None:
    spelling = Spelling(Tokenizer.from_dir(model))
    sample = Sample(index=0, text="a", finish_reason="stop")
    completion = Completion(request_id="r", samples=(sample,), timing=SEMANTIC)
    chunk = Chunk(text="a", finish_reason="stop", timing=SEMANTIC, is_final=True)
    forms: list[Any] = [
        ChatForm(spelling, ChatRequest(messages=[]), "r", "m"),
        TextForm(spelling, CompletionRequest(prompt="x"), [Prompt([1], "x")], [""], "r", "m"),
    ]
    for form in forms:
        for answer in (form.whole([completion], Usage(1)), form.pieces(0, chunk)[-1]):
            told = msgspec.json.decode(msgspec.json.encode(answer))
            assert (told["cached"], told["similarity"]) == ("semantic", 0.97)
            assert not any("cached" in choice for choice in told["choices"])


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_the_fields_are_passed_on_by_the_schedulers_names(kind: Any) -> None:
    ranges = [{"end": 4, "priority": 90, "ttl_s": 2.5}]
    fields = {"cache_priority": ranges, "cache_ttl_s": 5.0, "use_answer_cache": False}
    prompt = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    given = {name: value for name, value in prompt.items() if name in kind.model_fields}
    sampling = kind.model_validate(given | fields).sampling()
    assert {name: sampling[name] for name in fields} == fields
