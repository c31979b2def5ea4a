"""Bodies of OpenAI's requests, whatever is in them: a request, or a 400 that says little."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.gateway.errors import ApiError
from charonia.gateway.fields import Fields, read
from charonia.gateway.openai.requests import (
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    TextRequest,
    TokenizeRequest,
)
from support.fuzzing import DEEP, HUGE_INTEGER, MAX_MESSAGE, literals, texts, values

KINDS: list[type[Fields]] = [CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest]
MESSAGE = {"role": "user", "content": "x"}
VALID: dict[str, Any] = {"prompt": "x", "messages": [MESSAGE], "tokens": [1]}


def names(kind: type[Fields]) -> list[str]:
    """All that such a request may name."""
    return [*kind.model_fields, *kind.unserved]


def base(kind: type[Fields]) -> dict[str, Any]:
    """What such a request needs."""
    needed = {name for name, field in kind.model_fields.items() if field.is_required()}
    return {name: VALID[name] for name in needed}


def take(kind: type[Fields], body: bytes) -> None:
    """Read a request and all that it says."""
    try:
        request = read(kind, body)
        if isinstance(request, TextRequest):
            request.check()
            json.dumps(request.sampling())
        if isinstance(request, Conversation):
            json.dumps(request.rendering())
    except ApiError as error:
        refusal = error
    else:
        return
    assert refusal.status == 400
    assert 0 < len(refusal.message) <= MAX_MESSAGE
    assert len(refusal.param or "") <= 100
    msgspec.json.encode(refusal.body)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_value_of_any_field_is_taken_or_refused(kind: type[Fields], data: Any) -> None:
    fields = st.one_of(st.sampled_from(names(kind)), texts)
    given = data.draw(st.dictionaries(fields, values, max_size=3))
    take(kind, json.dumps(base(kind) | given).encode())


@pytest.mark.parametrize("kind", KINDS)
@given(body=literals)
def test_any_body_is_taken_or_refused(kind: type[Fields], body: str) -> None:
    take(kind, body.encode(errors="surrogatepass"))


@given(data=st.data())
def test_any_message_is_taken_or_refused(data: Any) -> None:
    parts = ("role", "content", "name", "tool_calls", "refusal")
    message = data.draw(st.dictionaries(st.sampled_from(parts), values))
    content = data.draw(st.one_of(values, st.lists(st.dictionaries(texts, values, max_size=2))))
    for one in (message, MESSAGE | message, MESSAGE | {"content": content}):
        take(ChatRequest, json.dumps({"messages": [one]}).encode())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "body",
    [
        "[" * DEEP,
        '{"prompt":' * DEEP,
        HUGE_INTEGER,
        f'{{"seed": {HUGE_INTEGER}}}',
        json.dumps({"stop": [1] * 10**6}),
        json.dumps({"messages": [{str(i): i for i in range(10**5)}] * 2}),
        json.dumps({str(i): i for i in range(10**5)}),
        json.dumps({"prompt": ["x"] * 10**6 + [1]}),
        json.dumps({"tokens": [1] * 10**6 + ["x"]}),
        json.dumps({"chat_template_kwargs": {str(i): i for i in range(10**5)}}),
    ],
    ids=range(10),
)
def test_what_is_deep_or_long_is_refused_by_little(kind: type[Fields], body: str) -> None:
    take(kind, body.encode())
