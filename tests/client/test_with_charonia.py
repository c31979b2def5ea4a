"""The client against the project's own models, by every way in."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from charonia.launch.server import TritonServer
from charonia_client import (
    AsyncClient,
    Cancelled,
    Client,
    InvalidRequest,
    Timeout,
)
from charonia_client.values import Protocol
from client.conftest import settings
from support.e2e import wait_for

PROMPT = "def f("
ENDLESS = 60_000
"""More tokens than come before a test has cancelled them, however slow the client is."""


@pytest.fixture(params=["scheduler", "llm"])
def model(request: pytest.FixtureRequest) -> str:
    """Both public entries."""
    return str(request.param)


@pytest.fixture
def client(real: TritonServer, protocol: Protocol, model: str) -> Iterator[Client]:
    """A synchronous client of each entry over each protocol."""
    with Client(**settings(real, protocol) | {"model": model}) as client:
        yield client


def wait_until_idle(client: Client) -> None:
    """Until no request runs and no block is in use."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        metrics = client.metrics()
        running = metrics.value("charonia_requests_running")
        if running == metrics.value("charonia_kv_blocks", state="used") == 0:
            return
        time.sleep(0.05)
    pytest.fail("a request still runs after 60 s")


def test_a_stream_and_a_completion_are_the_same(client: Client) -> None:
    sampling = {"max_tokens": 24, "temperature": 1.2, "seed": 11, "ignore_eos": True, "logprobs": 2}
    include = ("token_ids", "num_tokens", "timing", "cumulative_logprob")
    chunks = list(client.stream(PROMPT, sampling, include=include))  # type: ignore[arg-type]
    whole = client.generate(PROMPT, sampling, include=include)  # type: ignore[arg-type]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [i for chunk in chunks for i in chunk.token_ids] == list(whole.token_ids)
    assert [position for chunk in chunks for position in chunk.logprobs or ()] == list(
        whole.logprobs or ()
    )
    assert whole.finish_reason == "length"
    assert whole.num_output_tokens == len(whole.token_ids) == len(whole.logprobs or ()) == 24
    assert whole.cumulative_logprob == pytest.approx(
        sum(position[0].logprob for position in whole.logprobs or ()), abs=1e-3
    )
    assert whole.timing is not None
    assert whole.timing["total_seconds"] > 0


def test_a_prompt_may_be_token_ids_with_logprobs_of_its_own(client: Client) -> None:
    completion = client.generate([5, 6, 7], max_tokens=1, prompt_logprobs=1)
    assert completion.num_input_tokens == 3
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[0] is None
    assert [position[0].token_id for position in completion.prompt_logprobs[1:] if position] == [
        6,
        7,
    ]


def test_what_the_server_refuses_is_an_invalid_request_with_its_text(
    client: Client, model: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate(PROMPT, top_p=7.0)
    prefix = "in ensemble 'llm', " if model == "llm" else ""
    assert str(caught.value) == f"{prefix}top_p must be above 0 and at most 1, but is 7.0"


def test_a_deadline_of_the_server_is_a_timeout(client: Client) -> None:
    with pytest.raises(Timeout, match="Request timeout expired"):
        client.generate(PROMPT, max_tokens=ENDLESS, ignore_eos=True, deadline_ms=1)


def test_closing_a_stream_frees_its_blocks(client: Client) -> None:
    with client.stream(PROMPT, max_tokens=ENDLESS, ignore_eos=True) as stream:
        next(stream)
    wait_until_idle(client)


def test_cancel_ends_a_request_of_the_same_id_and_tenant_only(client: Client) -> None:
    with client.stream(PROMPT, max_tokens=ENDLESS, ignore_eos=True, tenant="a") as stream:
        next(stream)
        client.cancel(stream.request_id, tenant="b")
        next(stream)
        client.cancel(stream.request_id, tenant="a")
        with pytest.raises(Cancelled, match="the request was cancelled"):
            list(stream)


def test_many_asyncio_completions_run_side_by_side(
    real: TritonServer, protocol: Protocol, model: str
) -> None:
    async def main() -> list[str]:
        async with AsyncClient(**settings(real, protocol) | {"model": model}) as client:
            sampling = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
            calls = [client.generate(PROMPT, sampling, seed=seed % 4) for seed in range(16)]  # type: ignore[arg-type]
            return [completion.text for completion in await asyncio.gather(*calls)]

    texts = asyncio.run(main())
    assert texts[:4] * 4 == texts
    assert len(set(texts)) == 4


def test_health_names_the_models_that_are_asked_for(client: Client) -> None:
    assert wait_for(lambda: client.health(["scheduler", "llm", "engine"]).is_serving, bool)
