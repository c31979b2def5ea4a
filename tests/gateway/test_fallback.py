"""The fallback model: it answers, under its own name, while no server of the model can."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from charonia.gateway.generation import Run
from charonia.gateway.observing import Metrics, Record
from charonia.gateway.prompts import Prompt, Prompts
from charonia.gateway.serving import Serving
from charonia.gateway.settings import GatewaySettings
from charonia.gateway.upstream import LOAD_AGE_S, Server, Upstream
from charonia.launch.server.processes import ReservedPorts
from charonia.launch.server.tritonserver import TritonServer
from charonia.text.tokenizer import Tokenizer
from charonia_client import ConnectionLost, EngineState, Sampling, client
from support.e2e import ENDLESS, wait_idle
from support.gateway import Gateway, posting, running_gateway, wait_metric
from support.held_back import severable
from support.stopping import stop_process
from support.waiting import WAIT_S

TEXT, CHAT, GENERATE, BATCH = "/v1/completions", "/v1/chat/completions", "/v1/generate", "/v1/batch"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
ENDLESSLY = {"max_tokens": ENDLESS, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Hi"}]


def fallback_to(server: TritonServer, tokenizer: Path) -> tuple[str, ...]:
    """Arguments of a gateway."""
    return (
        f"--fallback-server={server.grpc_url}",
        f"--fallback-tokenizer={tokenizer}",
        "--fallback-model-name=backup",
    )


@pytest.fixture(scope="module")
def falling(server: TritonServer, chatting: Path) -> Iterator[Gateway]:
    """A gateway whose own server is not there."""
    with contextlib.closing(ReservedPorts("127.0.0.1", 1)) as ports:
        url = f"127.0.0.1:{ports.ports[0]}"
        arguments = ("--served-model-name", "large", *fallback_to(server, chatting))
        with running_gateway([url], chatting, *arguments) as gateway:
            yield gateway


def test_answers_are_those_of_the_fallback_model_and_name_it(
    falling: Gateway, gateway: Gateway
) -> None:
    before = falling.metrics()["charonia_gateway_fallbacks_total"]
    for path, body in (
        (TEXT, {"prompt": ["def f(", "x"]}),
        (CHAT, {"messages": MESSAGES}),
        (GENERATE, {"prompt": "def f("}),
    ):
        wanted = gateway.http.post(path, json={**GREEDY, **body}).json()
        model = {"model": "large"} if path != GENERATE else {}
        reply = falling.http.post(path, json={**GREEDY, **body, **model})
        assert reply.status_code == 200, reply.text
        found = reply.json()
        assert (found["model"], wanted["model"]) == ("backup", "small")
        for name in ("choices", "text", "token_ids", "prompt_tokens"):
            assert found.get(name) == wanted.get(name)
    chunks = list(
        falling.openai.completions.create(model="large", prompt="x", max_tokens=8, stream=True)
    )
    assert {chunk.model for chunk in chunks} == {"backup"}
    entries = [{"prompt": "x", **GREEDY}, {"prompt": "x", "model": "small"}]
    first, second = falling.http.post(BATCH, json={"requests": entries}).json()["responses"]
    assert (first["model"], first["generated_tokens"]) == ("backup", 8)
    assert second["error"]["code"] == "model_not_found"
    assert falling.metrics()["charonia_gateway_fallbacks_total"] == before + 5
    assert falling.wait_line(" request ", f"path={CHAT}", "status=200", "fallback=backup")


def test_the_gateway_is_ready_by_its_fallback_and_says_so(falling: Gateway) -> None:
    reply = falling.http.get("/health/ready")
    own, other = reply.json()["servers"]
    assert (reply.status_code, reply.json()["status"]) == (200, "ready")
    assert (own["ready"], own.get("fallback")) == (False, None)
    assert (other["ready"], other["fallback"]) == (True, True)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [5, 6]},
        {"prompt": "x", "stop_token_ids": [5]},
        {"prompt": "x", "allowed_token_ids": [5]},
        {"prompt": "x", "logit_bias": {"5": 1}},
        {"prompt": "x", "temperature": -1},
    ],
)
def test_the_first_error_stands_where_the_fallback_cannot_answer(
    falling: Gateway, body: dict[str, Any]
) -> None:
    """Token ids mean other texts to another model."""
    for stream in (False, True):
        reply = falling.http.post(TEXT, json={**body, "stream": stream})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
        assert reply.headers["retry-after"]


def test_it_is_asked_only_while_the_model_cannot_answer(
    narrow_server: TritonServer, server: TritonServer, chatting: Path
) -> None:
    arguments = ("--served-model-name", "large", *fallback_to(server, chatting))
    with running_gateway([narrow_server.grpc_url], chatting, *arguments) as gateway:

        def model_of(**body: Any) -> str:
            reply = gateway.http.post(TEXT, json={"prompt": "x", "max_tokens": 1, **body})
            return str(reply.json().get("model", reply.status_code))

        assert model_of() == "large"
        assert model_of(temperature=-1) == "400"
        assert model_of(model="backup") == "404"
        with contextlib.ExitStack() as stack:
            for tenant, name, number in (
                ("other", "running", 1),
                ("narrow", "waiting", 1),
                ("other", "waiting", 2),
            ):
                body = {"prompt": "x", "tenant": tenant, **ENDLESSLY}
                stack.enter_context(posting(gateway, GENERATE, body))
                wait_metric(narrow_server, f"charonia_requests_{name}", number)
                if tenant == "narrow":
                    reply = gateway.http.post(GENERATE, json={"prompt": "x", "tenant": tenant})
                    assert reply.status_code == 429, "no way around the tenant's own limit"
                    assert reply.headers["retry-after"]
            assert model_of() == "backup"
        wait_idle(narrow_server)
        assert model_of() == "large"


@contextlib.asynccontextmanager
async def serving_of(url: str, fallback: str, tokenizer: Path) -> AsyncGenerator[Serving, None]:
    """What answers in a gateway's process.

    Args:
        url, fallback: gRPC endpoints of its server and of that of the fallback model.
    """

    def made(url: str, *, has_fallback: bool, **more: Any) -> Serving:
        prompts = Prompts(Tokenizer.from_dir(tokenizer), "there is no template", 1)
        upstream = Upstream([url], "scheduler", has_fallback=has_fallback)
        return Serving(settings, prompts, upstream, **more)

    settings = GatewaySettings(servers=(url,), tokenizer=tokenizer, model_names=("large",))
    backup = made(fallback, has_fallback=False, answers_as="backup")
    serving = made(url, has_fallback=True, fallback=backup)
    try:
        yield serving
    finally:
        await serving.close()


def run_of(serving: Serving, record: Record, **sampling: Any) -> Run:
    generation = serving.generation("r", [Prompt([5, 6], "ab")], Sampling(**sampling), None)
    return Run(generation, serving.upstream, record)


def test_what_came_of_a_stream_is_not_counted_again_though_none_of_it_was_sent(
    server: TritonServer, chatting: Path
) -> None:
    asked = []

    async def main() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            severable(server.grpc_url) as (url, cut),
            serving_of(url, server.grpc_url, chatting) as serving,
        ):
            record = Record("r", time.monotonic(), Metrics())

            async def answer(one: Serving) -> None:
                asked.append(one)
                endless = ENDLESSLY if one is serving else {"max_tokens": 1}
                async for _ in run_of(one, record, **endless).stream():
                    if one is serving:
                        cut()

            with pytest.raises(ConnectionLost):
                await serving.answered(record, answer)
            assert asked == [serving]
            assert (record.prompt_tokens, record.fallback) == (2, None)

    asyncio.run(main())
    wait_idle(server)


def test_it_answers_at_once_while_the_only_server_is_silent(
    narrow_server: TritonServer,
    server: TritonServer,
    chatting: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        urls = narrow_server.grpc_url, server.grpc_url
        async with asyncio.timeout(WAIT_S), serving_of(*urls, chatting) as serving:
            (own,) = serving.upstream.servers

            async def answered_by() -> str | None:
                record = Record("r", time.monotonic(), Metrics())

                async def answer(one: Serving) -> None:
                    await run_of(one, record, max_tokens=1).complete()

                await serving.answered(record, answer)
                return record.fallback

            assert await answered_by() is None
            await own.refreshed(LOAD_AGE_S)  # it began with that request
            pid = narrow_server.pid
            assert pid is not None
            stop_process(pid)
            try:
                with monkeypatch.context() as patch:
                    patch.setattr(client, "_PROBE_S", 0.2)
                    assert await own.refreshed(0.0) is None
                turn = own.turn
                assert [await answered_by() for _ in range(2)] == ["backup"] * 2
                assert own.turn == turn, "it was not asked"
            finally:
                os.kill(pid, signal.SIGCONT)
            while await own.refreshed(0.0) is None:
                pass
            assert await answered_by() is None

    asyncio.run(main())


@pytest.mark.parametrize(
    ("is_up", "reason", "takes_none"),
    [
        (False, "the engine is down and cannot be loaded", True),
        (False, None, False),
        (True, None, False),
    ],
)
def test_it_is_not_asked_while_requests_wait_for_another_engine(
    is_up: bool, reason: str | None, takes_none: bool
) -> None:
    server = Server("127.0.0.1:1", "scheduler", time.monotonic)
    server.last_state = EngineState(is_up=is_up, reason=reason, step_age_s=None, turn_age_s=None)
    server.is_known_down = not is_up
    assert server.takes_none == takes_none
