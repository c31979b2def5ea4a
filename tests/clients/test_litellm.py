"""LiteLLM's provider `hosted_vllm/`.

With 1.83.0 the connection of its asynchronous streams stays open after `aclose`, and after the
reading task was cancelled: what reads the answer has no `aclose` that it could call. So the client
is closed, or the provider is `openai/`.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import litellm
import pytest
from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler

from clients.calls import rendered
from support.e2e import ENDLESS

CLIENT = "LiteLLM hosted_vllm/"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT = rendered(("user", "Hi"))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@pytest.fixture
def ask(base_url: str) -> Callable[..., Any]:
    def ask(**options: Any) -> Any:
        model = f"hosted_vllm/{options.pop('model', 'small')}"
        call = options.pop("call", litellm.completion)
        if call is litellm.completion:
            options.setdefault("messages", MESSAGES)
        return call(model=model, api_base=base_url, api_key="none", num_retries=0, **options)

    return ask


def test_chat_whole(ask: Callable[..., Any], direct: Callable[..., list[str]]) -> None:
    answer = ask(**GREEDY)
    assert [answer.choices[0].message.content] == direct(CHAT, **GREEDY)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24


def test_chat_streamed_with_usage(
    ask: Callable[..., Any], direct: Callable[..., list[str]]
) -> None:
    pieces = list(ask(stream=True, stream_options={"include_usage": True}, **GREEDY))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert [text] == direct(CHAT, **GREEDY)
    assert pieces[-1].usage.completion_tokens == 24


def test_completions(ask: Callable[..., Any], direct: Callable[..., list[str]]) -> None:
    whole = ask(call=litellm.text_completion, prompt="def f(", **GREEDY)
    assert [whole.choices[0].text] == direct("def f(", **GREEDY)
    pieces = ask(call=litellm.text_completion, prompt="def f(", stream=True, **GREEDY)
    assert ["".join(one.choices[0].text or "" for one in pieces)] == direct("def f(", **GREEDY)


def test_several_samples(ask: Callable[..., Any], direct: Callable[..., list[str]]) -> None:
    sampled: dict[str, Any] = {"temperature": 1.1, "max_tokens": 8, "seed": 4, "n": 2}
    answer = ask(**sampled)
    assert [choice.message.content for choice in answer.choices] == direct(CHAT, **sampled)


def test_stop(ask: Callable[..., Any], direct: Callable[..., list[str]]) -> None:
    (text,) = direct(CHAT, **GREEDY)
    answer = ask(stop=[text[6:9]], **GREEDY)
    assert answer.choices[0].message.content == text[: text.index(text[6:9])]
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs(ask: Callable[..., Any]) -> None:
    answer = ask(logprobs=True, top_logprobs=2, **GREEDY)
    assert len(answer.choices[0].logprobs.content) == 24


def test_vllm_extras(ask: Callable[..., Any], direct: Callable[..., list[str]]) -> None:
    extras = {"top_k": 4, "min_p": 0.05, "ignore_eos": True}
    sampled: dict[str, Any] = {"temperature": 1.0, "max_tokens": 16, "seed": 3}
    answer = ask(**sampled, **extras)
    assert [answer.choices[0].message.content] == direct(CHAT, **sampled, **extras)


def test_errors(ask: Callable[..., Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        ask(model="other")
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        ask(top_p=7)


def test_an_answer_comes_back_in_the_history(
    ask: Callable[..., Any], direct: Callable[..., list[str]]
) -> None:
    message = ask(**GREEDY).choices[0].message
    answer = ask(messages=[*MESSAGES, message, *MESSAGES], **GREEDY)
    history = rendered(("user", "Hi"), ("assistant", message.content), ("user", "Hi"))
    assert [answer.choices[0].message.content] == direct(history, **GREEDY)


@pytest.mark.usefixtures("idle_afterwards")
def test_a_timeout_of_the_library_cancels(ask: Callable[..., Any]) -> None:
    with pytest.raises(litellm.Timeout):
        ask(max_tokens=ENDLESS, ignore_eos=True, timeout=0.5)


async def left_stream(base_url: str, provider: str, **options: Any) -> None:
    """Begin an endless stream, and close it."""
    stream: Any = await litellm.acompletion(
        model=f"{provider}/small",
        api_base=base_url,
        api_key="none",
        num_retries=0,
        messages=MESSAGES,
        max_tokens=ENDLESS,
        stream=True,
        extra_body={"ignore_eos": True},
        **options,
    )
    await anext(stream)
    await stream.aclose()


@pytest.mark.usefixtures("idle_afterwards")
def test_closing_the_client_of_an_asynchronous_stream_cancels(base_url: str) -> None:
    async def main() -> None:
        client = AsyncHTTPHandler()
        await left_stream(base_url, "hosted_vllm", client=client)
        await client.close()

    asyncio.run(main())


@pytest.mark.usefixtures("idle_afterwards")
def test_closing_an_asynchronous_stream_of_the_provider_openai_cancels(base_url: str) -> None:
    asyncio.run(left_stream(base_url, "openai"))
