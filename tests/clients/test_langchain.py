"""LangChain's `ChatOpenAI`."""

from collections.abc import Callable
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr

from clients.calls import rendered
from support.e2e import ENDLESS

CLIENT = "LangChain ChatOpenAI"
MESSAGES = [SystemMessage("Be brief."), HumanMessage("Hi")]
CHAT = rendered(("system", "Be brief."), ("user", "Hi"))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


def chat(base_url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=options.pop("model", "small"),
        base_url=base_url,
        api_key=SecretStr("none"),
        max_retries=0,
        **options,
    )


def test_chat_whole(base_url: str, direct: Callable[..., list[str]]) -> None:
    answer = chat(base_url, **GREEDY).invoke(MESSAGES)
    assert [answer.content] == direct(CHAT, **GREEDY)
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 24


def test_chat_streamed_with_usage(base_url: str, direct: Callable[..., list[str]]) -> None:
    pieces = list(chat(base_url, stream_usage=True, **GREEDY).stream(MESSAGES))
    assert ["".join(str(piece.content) for piece in pieces)] == direct(CHAT, **GREEDY)
    totals = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert [total["output_tokens"] for total in totals] == [24]


def test_completions(base_url: str, direct: Callable[..., list[str]]) -> None:
    llm = OpenAI(model="small", base_url=base_url, api_key=SecretStr("none"), **GREEDY)
    assert [llm.invoke("def f(")] == direct("def f(", **GREEDY)
    assert ["".join(llm.stream("def f("))] == direct("def f(", **GREEDY)


def test_a_batch_and_several_samples(base_url: str, direct: Callable[..., list[str]]) -> None:
    answers = chat(base_url, **GREEDY).batch([MESSAGES, MESSAGES[1:]])
    assert [answers[0].content] == direct(CHAT, **GREEDY)
    assert [answers[1].content] == direct(rendered(("user", "Hi")), **GREEDY)
    sampled: dict[str, Any] = {"temperature": 1.1, "max_tokens": 8, "seed": 4, "n": 2}
    found = chat(base_url, **sampled).generate([MESSAGES])
    assert [one.text for one in found.generations[0]] == direct(CHAT, **sampled)


def test_an_answer_comes_back_in_the_history(
    base_url: str, direct: Callable[..., list[str]]
) -> None:
    message = chat(base_url, **GREEDY).invoke(MESSAGES)
    answer = chat(base_url, **GREEDY).invoke([*MESSAGES, message, MESSAGES[1]])
    turns = ("system", "Be brief."), ("user", "Hi"), ("assistant", str(message.content))
    assert [answer.content] == direct(rendered(*turns, ("user", "Hi")), **GREEDY)


def test_stop(base_url: str, direct: Callable[..., list[str]]) -> None:
    (text,) = direct(CHAT, **GREEDY)
    answer = chat(base_url, **GREEDY).invoke(MESSAGES, stop=[text[6:9]])
    assert answer.content == text[: text.index(text[6:9])]
    assert answer.response_metadata["finish_reason"] == "stop"


def test_logprobs(base_url: str) -> None:
    answer = chat(base_url, logprobs=True, top_logprobs=2, **GREEDY).invoke(MESSAGES)
    assert len(answer.response_metadata["logprobs"]["content"]) == 24


def test_vllm_extras_in_extra_body(base_url: str, direct: Callable[..., list[str]]) -> None:
    extras = {"top_k": 4, "min_p": 0.05, "ignore_eos": True}
    sampled: dict[str, Any] = {"temperature": 1.0, "max_tokens": 16, "seed": 3}
    answer = chat(base_url, extra_body=extras, **sampled).invoke(MESSAGES)
    assert [answer.content] == direct(CHAT, **sampled, **extras)


def test_errors(base_url: str) -> None:
    with pytest.raises(openai.NotFoundError):
        chat(base_url, model="other").invoke(MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        chat(base_url, top_p=7).invoke(MESSAGES)
    assert caught.value.param == "top_p"


@pytest.mark.usefixtures("idle_afterwards")
def test_closing_a_stream_cancels(base_url: str) -> None:
    options: dict[str, Any] = {"max_tokens": ENDLESS, "extra_body": {"ignore_eos": True}}
    stream = chat(base_url, **options).stream(MESSAGES)
    assert next(stream) is not None
    stream.close()  # type: ignore[attr-defined]
