"""Priority on the real server: through every way in, whatever runs already."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    ENDLESS,
    infer_grpc,
    infer_http,
    request_inputs,
    scrape,
    stream_grpc,
    wait_for,
    wait_idle,
)
from support.live_stream import LiveStream

PROMPT = [5, 6, 7]
SHORT = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(infer_grpc, id="generate over gRPC"),
        pytest.param(infer_http, id="generate over HTTP"),
        pytest.param(partial(stream_grpc, model="scheduler"), id="scheduler"),
        pytest.param(partial(stream_grpc, model="llm"), id="llm"),
    ],
)
def test_an_urgent_request_is_served_at_once_and_whom_it_displaces_loses_nothing(
    narrow_server: TritonServer, ask: Callable[..., Any]
) -> None:
    """The one row is taken by a request that would never end."""
    before = wait_idle(narrow_server)["charonia_preemptions_total"]
    sampling = {"temperature": 0.8, "seed": 4, "ignore_eos": True}
    running = LiveStream(narrow_server.grpc_url, PROMPT, priority=1, max_tokens=ENDLESS, **sampling)
    running.wait_tokens(20)
    assert ask(narrow_server, request_inputs([7, 8, 9], SHORT | {"priority": -1}))
    assert not running.is_over, running.error
    num_tokens = len(running.token_ids) + 20
    running.wait_tokens(num_tokens)
    running.leave()
    running.wait_over()
    assert wait_idle(narrow_server)["charonia_preemptions_total"] - before == 1
    undisturbed = LiveStream(narrow_server.grpc_url, PROMPT, max_tokens=num_tokens, **sampling)
    assert running.token_ids[:num_tokens] == undisturbed.wait_over().token_ids


def test_of_those_that_wait_the_most_urgent_is_next(narrow_server: TritonServer) -> None:
    """It came last; had the other one been next, it would have been displaced."""
    before = wait_idle(narrow_server)["charonia_preemptions_total"]
    url = narrow_server.grpc_url
    running = LiveStream(url, PROMPT, max_tokens=ENDLESS, ignore_eos=True)
    running.wait_tokens(1)
    patient = LiveStream(url, PROMPT, priority=5, max_tokens=ENDLESS, ignore_eos=True)
    waiting = "charonia_requests_waiting"
    assert wait_for(lambda: scrape(narrow_server)[waiting], lambda count: count == 1) == 1
    urgent = LiveStream(url, PROMPT, priority=4, max_tokens=4, ignore_eos=True)
    assert wait_for(lambda: scrape(narrow_server)[waiting], lambda count: count == 2) == 2
    running.leave()
    assert urgent.wait_over().error is None
    patient.wait_tokens(1)
    patient.leave()
    assert wait_idle(narrow_server)["charonia_preemptions_total"] == before
