"""The npm package `openai`; openai_client.mjs makes the calls."""

from collections.abc import Callable
from typing import Any

import pytest

from clients.calls import rendered, run_node
from support.gateway import wait_metric

CLIENT = "openai (npm)"
CHAT = rendered(("user", "Hi"))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
SAMPLED: dict[str, Any] = {"temperature": 1.1, "max_tokens": 8, "seed": 4}


@pytest.fixture(scope="module")
def found(base_url: str, direct: Callable[..., list[str]]) -> dict[str, Any]:
    (text,) = direct(CHAT, **GREEDY)
    answers: dict[str, Any] = run_node("openai_client.mjs", base_url, text[6:9])
    return answers


def test_chat_whole(found: dict[str, Any], direct: Callable[..., list[str]]) -> None:
    (choice,) = found["whole"]["choices"]
    assert [choice["message"]["content"]] == direct(CHAT, **GREEDY)
    assert choice["finish_reason"] == "length"
    assert found["whole"]["usage"]["completion_tokens"] == 24


def test_chat_streamed_with_usage(found: dict[str, Any], direct: Callable[..., list[str]]) -> None:
    *pieces, last = found["pieces"]
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert [text] == direct(CHAT, **GREEDY)
    assert last["usage"]["completion_tokens"] == 24


def test_completions_whole_and_streamed(
    found: dict[str, Any], direct: Callable[..., list[str]]
) -> None:
    wanted = direct("def f(", **GREEDY)
    assert [found["completion"]["choices"][0]["text"]] == wanted
    assert ["".join(one["choices"][0]["text"] for one in found["completionPieces"])] == wanted


def test_stop(found: dict[str, Any], direct: Callable[..., list[str]]) -> None:
    (text,) = direct(CHAT, **GREEDY)
    (choice,) = found["stopped"]["choices"]
    assert choice["message"]["content"] == text[: text.index(text[6:9])]
    assert choice["finish_reason"] == "stop"


def test_several_samples_and_extras(
    found: dict[str, Any], direct: Callable[..., list[str]]
) -> None:
    samples = [choice["message"]["content"] for choice in found["samples"]["choices"]]
    assert samples == direct(CHAT, n=2, **SAMPLED)
    extras = [choice["message"]["content"] for choice in found["extras"]["choices"]]
    assert extras == direct(CHAT, top_k=4, min_p=0.05, **SAMPLED)


def test_logprobs_and_models(found: dict[str, Any]) -> None:
    assert len(found["logprobs"]["choices"][0]["logprobs"]["content"]) == 24
    assert [model["id"] for model in found["models"]] == ["small"]


def test_errors(found: dict[str, Any]) -> None:
    assert found["unknownModel"] == {"name": "NotFoundError", "status": 404, "param": "model"}
    assert found["badValue"] == {"name": "BadRequestError", "status": 400, "param": "top_p"}


def test_leaving_a_stream_cancels(found: dict[str, Any], server: Any) -> None:
    assert found["begun"] == "chat.completion.chunk"
    wait_metric(server, "charonia_requests_running", 0)
