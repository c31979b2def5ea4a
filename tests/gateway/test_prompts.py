"""A large request is rendered and tokenized beside the event loop, a small one on it."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from charonia.gateway import errors
from charonia.gateway.errors import ApiError
from charonia.gateway.observing import Metrics, Record
from charonia.gateway.openai import chat, completions, tokens
from charonia.gateway.prompts import SHORT_BYTES, Prompts
from charonia.gateway.rest import batch, generate
from charonia.gateway.serving import Serving
from charonia.gateway.settings import GatewaySettings
from charonia.gateway.upstream import Upstream
from charonia.gateway.watching import Reply
from charonia.text.chat_template import ChatTemplate
from charonia.text.tokenizer import Tokenizer
from charonia_client import Completion

SMALL = "x" * 1000
"""Of a size that is tokenized on the loop."""
LARGE = "words and words " * 1000
USER = {"role": "user", "content": "x"}
Handler = Callable[[Serving, bytes], Awaitable[None]]


class Nowhere(Upstream):
    """Servers that know no limit and answer nothing."""

    async def max_model_len(self) -> int | None:
        return None

    async def complete(self, *args: Any, **kwargs: Any) -> Completion:
        raise errors.unavailable("nobody answers")


class Unread:
    """An answer that nobody reads."""

    async def whole(self, value: Any, status: int = 200, **headers: str) -> None:
        pass


REPLY = cast(Reply, Unread())


def recorded(run: Callable[[Serving, Record, bytes, Reply], Awaitable[None]]) -> Handler:
    return lambda one, body: run(one, Record("r", time.monotonic(), Metrics()), body, REPLY)


HANDLERS: dict[str, Handler] = {
    "completions": recorded(completions.complete),
    "chat": recorded(chat.chat),
    "generate": recorded(generate.generate),
    "batch": recorded(batch.batch),
    "tokenize": lambda one, body: tokens.tokenize(one, body, REPLY),
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, threading.Thread]]:
    """What was rendered, tokenized or decoded so far, and where."""
    found: list[tuple[str, threading.Thread]] = []

    def note(owner: type, name: str) -> None:
        call = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            found.append((name, threading.current_thread()))
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    note(ChatTemplate, "render")
    note(Tokenizer, "encode")
    note(Tokenizer, "decode")
    return found


def handle(checkpoint: Path, handler: str, body: dict[str, Any]) -> None:
    """Handle a request in this thread, as far as that goes without a server."""

    async def main() -> None:
        tokenizer = Tokenizer.from_dir(checkpoint)
        prompts = Prompts(tokenizer, ChatTemplate.from_checkpoint(checkpoint), 2)
        settings = GatewaySettings(
            servers=("127.0.0.1:1",), tokenizer=checkpoint, model_names=("m",)
        )
        serving = Serving(settings, prompts, Nowhere(["127.0.0.1:1"], "scheduler"))
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(serving.close)
            if handler not in ("batch", "tokenize"):
                stack.enter_context(pytest.raises(ApiError, match="nobody answers"))
            await HANDLERS[handler](serving, json.dumps(body).encode())

    asyncio.run(main())


@pytest.mark.parametrize(
    ("handler", "body", "num_texts"),
    [
        ("chat", {"messages": [{**USER, "content": LARGE}]}, 1),
        ("chat", {"messages": [USER], "chat_template_kwargs": {"mood": LARGE}}, 1),
        ("chat", {"messages": [USER], "chat_template_kwargs": {"moods": [1] * 2000}}, 1),
        ("chat", {"messages": [USER], "chat_template_kwargs": {"a": {"b": [LARGE]}}}, 1),
        ("tokenize", {"messages": [USER], "chat_template_kwargs": {"mood": LARGE}}, 1),
        ("tokenize", {"prompt": LARGE}, 1),
        ("generate", {"prompt": LARGE}, 1),
        ("completions", {"prompt": LARGE}, 1),
        ("completions", {"prompt": [SMALL, SMALL, SMALL]}, 3),
        ("completions", {"prompt": [LARGE[:SHORT_BYTES]] * 128}, 128),
        ("batch", {"requests": [{"prompt": SMALL}] * 3}, 3),
        ("batch", {"requests": [{"prompt": LARGE[:SHORT_BYTES]}] * 128}, 128),
    ],
)
def test_a_large_request_never_holds_up_the_event_loop(
    chatting: Path,
    threads: list[tuple[str, threading.Thread]],
    handler: str,
    body: dict[str, Any],
    num_texts: int,
) -> None:
    handle(chatting, handler, body)
    names = [name for name, _ in threads]
    assert names.count("encode") == num_texts
    assert names.count("render") == ("messages" in body)
    assert {thread.name.rpartition("_")[0] for _, thread in threads} == {"charonia-tokenizing"}


@pytest.mark.parametrize(
    ("handler", "body"),
    [
        ("chat", {"messages": [USER], "chat_template_kwargs": {"mood": SMALL}}),
        ("tokenize", {"prompt": SMALL}),
        ("generate", {"prompt": SMALL}),
        ("completions", {"prompt": ["x", "y", "z"]}),
        ("batch", {"requests": [{"prompt": "x"}] * 3}),
    ],
)
def test_a_small_request_needs_no_thread(
    chatting: Path,
    threads: list[tuple[str, threading.Thread]],
    handler: str,
    body: dict[str, Any],
) -> None:
    handle(chatting, handler, body)
    assert {thread for _, thread in threads} == {threading.main_thread()}


@pytest.mark.parametrize(
    ("num_tokens", "thread"), [(3, "MainThread"), (SHORT_BYTES, "charonia-tokenizing")]
)
def test_token_ids_that_are_echoed_are_decoded_in_a_thread_if_they_are_many(
    chatting: Path, threads: list[tuple[str, threading.Thread]], num_tokens: int, thread: str
) -> None:
    handle(chatting, "completions", {"prompt": [5] * num_tokens, "echo": True})
    ((name, found),) = threads
    assert (name, found.name.partition("_")[0]) == ("decode", thread)


def test_a_rendering_that_grows_is_tokenized_in_a_thread(
    chatting: Path,
    threads: list[tuple[str, threading.Thread]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ChatTemplate, "render", lambda *args, **kwargs: LARGE)
    handle(chatting, "chat", {"messages": [USER]})
    ((name, thread),) = threads
    assert (name, thread.name.rpartition("_")[0]) == ("encode", "charonia-tokenizing")


def test_many_tokens_are_spelled_and_written_beside_the_loop(
    chatting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = []

    class Spelled(dict[int, str]):
        def get(self, *args: Any) -> Any:
            at.append(threading.current_thread())
            return super().get(*args)

    spell = Tokenizer.tokens
    monkeypatch.setattr(Tokenizer, "tokens", lambda self: Spelled(spell(self)))
    handle(chatting, "tokenize", {"prompt": LARGE, "return_token_strs": True})
    assert at
    assert threading.main_thread() not in at
