"""The client against the project's own models, by every way in."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from charonia.launch.server.tritonserver import TritonServer
from charonia_client import (
    AsyncClient,
    Cancelled,
    Client,
    InvalidRequest,
    Timeout,
    Timeouts,
)
from charonia_client.values import Protocol
from client.conftest import metrics_of, settings
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
        metrics = metrics_of(client)
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
    with pytest.raises(Timeout, match="deadline_ms has passed"):
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


def test_several_samples_are_those_of_their_seeds(client: Client) -> None:
    sampling = {"max_tokens": 12, "temperature": 1.2, "ignore_eos": True}
    alone = [client.generate(PROMPT, sampling, seed=11 + i) for i in range(3)]  # type: ignore[arg-type]
    whole = client.generate(PROMPT, sampling, seed=11, n=3)  # type: ignore[arg-type]
    assert [one.text for one in whole.samples] == [one.text for one in alone]
    assert [one.token_ids for one in whole.samples] == [one.token_ids for one in alone]
    assert [one.index for one in whole.samples] == [0, 1, 2]
    assert whole.num_output_tokens == 36
    texts, ids = [""] * 3, [()] * 3
    for chunk in client.stream(PROMPT, sampling, seed=11, n=3):  # type: ignore[arg-type]
        texts[chunk.index] += chunk.text
        ids[chunk.index] += chunk.token_ids  # type: ignore[assignment]
    assert texts == [one.text for one in alone]
    assert ids == [one.token_ids for one in alone]


def test_the_best_samples_come_first(client: Client) -> None:
    best = client.generate(
        PROMPT,
        n=2,
        best_of=4,
        max_tokens=6,
        seed=3,
        include=("cumulative_logprob",),
        timeouts=Timeouts(first_token_s=240),
    )
    first, second = (one.cumulative_logprob for one in best.samples)
    assert first is not None
    assert second is not None
    assert first >= second


def test_cancel_ends_one_sample_and_the_others_go_on(client: Client) -> None:
    with client.stream(PROMPT, max_tokens=ENDLESS, ignore_eos=True, n=3) as stream:
        next(stream)
        with pytest.raises(InvalidRequest, match="from 0 to 127, but has 128"):
            client.cancel(stream.request_id, samples=[1, 128])
        client.cancel(stream.request_id, samples=[1, 3])
        ended = next(chunk for chunk in stream if chunk.finish_reason is not None)
        assert (ended.index, ended.finish_reason, ended.is_final) == (1, "cancelled", False)
        assert {next(stream).index for _ in range(60)} == {0, 2}
        client.cancel(stream.request_id, samples=[0, 2])
        *_, last = stream
    assert last.is_final
    assert last.finish_reason == "cancelled"
    wait_until_idle(client)


def test_asyncio_streams_and_cancels_samples(
    real: TritonServer, protocol: Protocol, model: str
) -> None:
    async def main() -> list[tuple[int, bool]]:
        async with AsyncClient(**settings(real, protocol) | {"model": model}) as client:
            ends, to_cancel = [], [1, 0]
            async with client.stream(PROMPT, max_tokens=ENDLESS, ignore_eos=True, n=2) as stream:
                async for chunk in stream:
                    if chunk.finish_reason is not None:
                        assert chunk.finish_reason == "cancelled"
                        ends.append((chunk.index, chunk.is_final))
                    # Each once, lest chunks come faster than they are read.
                    if to_cancel and len(ends) + len(to_cancel) == 2:
                        await client.cancel(stream.request_id, samples=[to_cancel.pop(0)])
            return ends

    assert asyncio.run(main()) == [(1, False), (0, True)]


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


def test_a_probe_says_that_the_engine_is_up(real: TritonServer, protocol: Protocol) -> None:
    with Client(**settings(real, protocol) | {"model": "scheduler"}) as client:
        state = wait_for(client.probe, lambda state: state.step_age_s is not None)
    assert (state.is_up, state.reason, state.max_model_len) == (True, None, 65536)
    assert state.step_age_s is not None
    assert state.turn_age_s is not None

    async def ask() -> bool:
        async with AsyncClient(**settings(real, protocol) | {"model": "scheduler"}) as client:
            return (await client.probe()).is_up

    assert asyncio.run(ask())


def test_a_probe_that_nobody_answers_is_an_error(real: TritonServer, protocol: Protocol) -> None:
    with (
        Client(**settings(real, protocol) | {"model": "no_such"}) as client,
        pytest.raises(InvalidRequest, match="no_such"),
    ):
        client.probe()


def test_health_names_the_models_that_are_asked_for(client: Client) -> None:
    assert wait_for(lambda: client.health(["scheduler", "llm", "engine"]).is_serving, bool)
