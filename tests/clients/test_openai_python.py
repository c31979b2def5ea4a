"""The package `openai` of Python: whole and streamed, chats and completions, errors, retries."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from clients.calls import broken_gateway, rendered
from support.e2e import ENDLESS, wait_for
from support.gateway import Gateway

CLIENT = "openai (Python)"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT = rendered(("user", "Hi"))
PROMPT = "def f("
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_chat_whole(client: openai.OpenAI, direct: Callable[..., list[str]]) -> None:
    answer = client.chat.completions.create(model="small", messages=MESSAGES, **GREEDY)
    assert [answer.choices[0].message.content] == direct(CHAT, **GREEDY)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_chat_streamed_with_usage(client: openai.OpenAI, direct: Callable[..., list[str]]) -> None:
    *pieces, last = client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert [text] == direct(CHAT, **GREEDY)
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.usage is not None
    assert last.usage.completion_tokens == 24


def test_completions_whole_and_streamed(
    client: openai.OpenAI, direct: Callable[..., list[str]]
) -> None:
    whole = client.completions.create(model="small", prompt=PROMPT, **GREEDY)
    pieces = client.completions.create(model="small", prompt=PROMPT, stream=True, **GREEDY)
    wanted = direct(PROMPT, **GREEDY)
    assert [whole.choices[0].text] == wanted
    assert ["".join(piece.choices[0].text for piece in pieces)] == wanted


def test_stop(client: openai.OpenAI, direct: Callable[..., list[str]]) -> None:
    (text,) = direct(CHAT, **GREEDY)
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, stop=[text[6:9]], **GREEDY
    )
    assert answer.choices[0].message.content == text[: text.index(text[6:9])]
    assert answer.choices[0].finish_reason == "stop"


def test_several_samples(client: openai.OpenAI, direct: Callable[..., list[str]]) -> None:
    sampled: dict[str, Any] = {"max_tokens": 12, "temperature": 1.2, "seed": 5, "n": 3}
    answer = client.chat.completions.create(model="small", messages=MESSAGES, **sampled)
    assert [choice.message.content for choice in answer.choices] == direct(CHAT, **sampled)


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 24
    assert all(one.logprob == one.top_logprobs[0].logprob for one in logprobs.content)
    data = b"".join(bytes(one.bytes or ()) for one in logprobs.content)
    assert data.decode(errors="replace") == answer.choices[0].message.content


def test_vllm_extras_in_extra_body(client: openai.OpenAI, direct: Callable[..., list[str]]) -> None:
    extras = {"top_k": 4, "min_p": 0.05, "repetition_penalty": 1.3, "ignore_eos": True}
    sampled: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "seed": 3}
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, extra_body=extras, **sampled
    )
    assert [answer.choices[0].message.content] == direct(CHAT, **sampled, **extras)
    assert direct(CHAT, **sampled) != direct(CHAT, **sampled, **extras)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").id == "small"


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="small", messages=MESSAGES, top_p=7)
    assert wrong.value.param == "top_p"


@pytest.mark.usefixtures("idle_afterwards")
def test_closing_a_stream_cancels(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        stream=True,
        max_tokens=ENDLESS,
        extra_body={"ignore_eos": True},
    ) as stream:
        assert next(iter(stream)).choices


@pytest.mark.usefixtures("idle_afterwards")
def test_a_timeout_of_the_sdk_cancels(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(
            model="small",
            prompt=PROMPT,
            max_tokens=ENDLESS,
            extra_body={"ignore_eos": True},
            timeout=httpx.Timeout(0.5),
        )


def test_the_async_client(base_url: str, direct: Callable[..., list[str]]) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
            stream = await client.chat.completions.create(
                model="small", messages=MESSAGES, stream=True, **GREEDY
            )
            return ["".join([one.choices[0].delta.content or "" async for one in stream])]

    assert asyncio.run(ask()) == direct(CHAT, **GREEDY)


def test_the_sdk_retries_after_503(model: Path) -> None:
    def count(gateway: Gateway) -> int:
        return sum("status=503" in line for line in gateway.lines)

    with (
        broken_gateway(model) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=1) as client,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="small", prompt="x")
        assert caught.value.status_code == 503
        assert wait_for(lambda: count(gateway), lambda found: found == 2) == 2
