"""A request's priority reaches the scheduler, and what it did with drafts is told."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    ENDLESS_BLOCKS,
    ONE_THREAD,
    one_torch_thread,
    scrape,
    wait_for,
    wait_idle,
)
from support.gateway import Gateway, asking, running_gateway, wait_metric

ACCEPTED, DRAFTED = "charonia_accepted_tokens_total", "charonia_draft_tokens_total"
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
GENERATED = "charonia_generation_tokens_total"
PREEMPTED = "charonia_preemptions_total"
RUNNING, WAITING = "charonia_requests_running", "charonia_requests_waiting"


@contextmanager
def one_at_a_time(model: Path, chatting: Path) -> Iterator[tuple[TritonServer, Gateway]]:
    """A server with one row, given by priority, whose engine drafts from what has been said."""
    settings = (
        ONE_THREAD,
        ENDLESS_BLOCKS,
        "max_num_seqs=1",
        "scheduling_policy=priority",
        f"speculative_config={json.dumps(DRAFTS)}",
    )
    names = ("--served-model-name", "small")
    with (
        one_torch_thread(),
        running_server(model=model, settings=settings) as server,
        running_gateway([server.grpc_url], chatting, *names) as gateway,
    ):
        yield server, gateway


@pytest.fixture(scope="module")
def pair(model: Path, chatting: Path) -> Iterator[tuple[TritonServer, Gateway]]:
    with one_at_a_time(model, chatting) as found:
        yield found


@pytest.fixture
def new_pair(model: Path, chatting: Path) -> Iterator[tuple[TritonServer, Gateway]]:
    """No request has been drafted for yet."""
    with one_at_a_time(model, chatting) as found:
        yield found


def figures(gateway: Gateway) -> dict[str, Any]:
    """The answer of /v1/metrics."""
    found: dict[str, Any] = gateway.http.get("/v1/metrics").json()
    return found


def complete(openai: OpenAI, **more: Any) -> int:
    """Complete a prompt; how many tokens came."""
    answer = openai.completions.create(model="small", prompt="y", max_tokens=4, extra_body=more)
    assert answer.usage is not None
    return answer.usage.completion_tokens


def chat(openai: OpenAI, **more: Any) -> int:
    """Ask in a chat; how many tokens came."""
    answer = openai.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "y"}],
        max_completion_tokens=4,
        extra_body=more,
    )
    assert answer.usage is not None
    return answer.usage.completion_tokens


@pytest.mark.parametrize("ask", [complete, chat])
def test_an_urgent_request_displaces_others_and_an_equal_one_waits(
    pair: tuple[TritonServer, Gateway], ask: Callable[..., int]
) -> None:
    """Neither of the others would end by itself."""
    server, gateway = pair
    before = wait_idle(server)
    with asking(gateway, prompt="x", priority=1), asking(gateway, prompt="z", priority=1):
        wait_metric(server, WAITING, 1)
        wait_for(lambda: scrape(server)[GENERATED], lambda found: found > before[GENERATED])
        page = scrape(server)
        assert (page[RUNNING], page[WAITING]) == (1, 1)
        assert page[PREEMPTED] == before[PREEMPTED]
        assert ask(gateway.openai, priority=-1, ignore_eos=True) == 4
        after = wait_for(lambda: scrape(server), lambda found: found[RUNNING] == 1)
        assert (after[RUNNING], after[WAITING]) == (1, 1), "the others have not ended"
        assert after[PREEMPTED] == before[PREEMPTED] + 1
    wait_idle(server)


def test_the_acceptance_rate_is_the_schedulers(new_pair: tuple[TritonServer, Gateway]) -> None:
    server, gateway = new_pair

    def complete(prompt: list[int], **more: Any) -> None:
        body = {"prompt": prompt, "ignore_eos": True, "max_tokens": 48, **more}
        assert gateway.http.post("/v1/completions", json=body).status_code == 200

    complete([5, 6, 7, 8], max_tokens=1)
    before = figures(gateway)
    assert before["servers"][0]["load"]["draft_tokens"] == 0
    assert before["acceptance_rate"] is None
    # One token again and again is what is drafted; of two that are drawn it is often the other.
    complete([5, 6, 7, 8], temperature=0, logit_bias={"9": 100})
    complete([5, 6, 7, 8], temperature=1, seed=3, logit_bias={"9": 100, "10": 100})
    page = wait_idle(server)
    after = wait_for(  # an answer may be some tenths of a second old
        lambda: figures(gateway),
        lambda found: found["servers"][0]["load"]["draft_tokens"] == page[DRAFTED],
    )
    assert 0 < page[ACCEPTED] < page[DRAFTED]
    assert after["acceptance_rate"] == pytest.approx(page[ACCEPTED] / page[DRAFTED])
    assert after["servers"][0]["load"]["accepted_tokens"] == page[ACCEPTED]
