"""The AI SDK with `@ai-sdk/openai-compatible`; ai_sdk.mjs makes the calls."""

from collections.abc import Callable
from typing import Any

import pytest

from clients.calls import rendered, run_node
from support.gateway import wait_metric

CLIENT = "AI SDK"
CHAT = rendered(("system", "Be brief."), ("user", "Hi"))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def found(base_url: str, direct: Callable[..., list[str]]) -> dict[str, Any]:
    (text,) = direct(CHAT, **GREEDY)
    answers: dict[str, Any] = run_node("ai_sdk.mjs", base_url, text[6:9])
    return answers


@pytest.mark.parametrize("name", ["whole", "streamed"])
def test_chat(found: dict[str, Any], direct: Callable[..., list[str]], name: str) -> None:
    assert [found[name]["text"]] == direct(CHAT, **GREEDY)
    assert found[name]["finishReason"] == "length"
    assert found[name]["usage"]["outputTokens"] == 24


def test_completions_whole_and_streamed(found: dict[str, Any]) -> None:
    """The SDK renders a conversation of its own for completions."""
    assert found["completion"]["text"]
    assert found["completion"]["text"] == found["completionStreamed"]["text"]
    assert found["completion"]["usage"]["outputTokens"] == 24


def test_stop(found: dict[str, Any], direct: Callable[..., list[str]]) -> None:
    (text,) = direct(CHAT, **GREEDY)
    assert found["stopped"]["text"] == text[: text.index(text[6:9])]
    assert found["stopped"]["finishReason"] == "stop"


def test_vllm_extras(found: dict[str, Any], direct: Callable[..., list[str]]) -> None:
    sampled: dict[str, Any] = {"temperature": 1.1, "max_tokens": 24, "seed": 4}
    assert [found["extras"]["text"]] == direct(CHAT, top_k=4, min_p=0.05, **sampled)


def test_errors(found: dict[str, Any]) -> None:
    assert found["unknownModel"]["status"] == 404
    assert found["badValue"]["status"] == 400
    assert "top_p" in found["badValue"]["message"]


def test_an_aborted_stream_cancels(found: dict[str, Any], server: Any) -> None:
    assert found["begun"]
    wait_metric(server, "charonia_requests_running", 0)
