"""Real tritonservers: a scripted one, for what a healthy server never shows, and charonia's own."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia_client import Client, MetricsSnapshot, Unavailable
from charonia_client.values import Protocol

REPOSITORY = Path(__file__).parent / "repository"


def script(**steps: Any) -> str:
    """A prompt for the scripted model; see its model.py."""
    return json.dumps(steps)


LATE_S = 30.0
"""When an answer comes that nobody waits for, however slow the machine is."""


def endless(delay_s: float = 0.02) -> str:
    """A prompt whose answer never ends."""
    return script(chunks=["a"], forever=True, delay_s=delay_s)


def settings(server: TritonServer, protocol: Protocol) -> dict[str, Any]:
    """What a client of the scripted model is made with."""
    return {
        "url": server.grpc_url if protocol == "grpc" else server.http_url,
        "protocol": protocol,
        "model": "scripted",
        "metrics_url": server.metrics_url,
    }


def metrics_of(client: Client) -> MetricsSnapshot:
    """All metrics; a slow machine may answer too late at first."""
    while True:
        try:
            return client.metrics()
        except Unavailable:
            time.sleep(0.1)


@pytest.fixture(scope="session")
def scripted() -> Iterator[TritonServer]:
    """The server."""
    with TritonServer(REPOSITORY) as server:
        server.wait_ready()
        yield server


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> Protocol:
    """Each of the two ways in."""
    way: Protocol = request.param
    return way


@pytest.fixture
def client(scripted: TritonServer, protocol: Protocol) -> Iterator[Client]:
    """A synchronous client of the scripted model."""
    with Client(**settings(scripted, protocol)) as client:
        yield client


@pytest.fixture
def outcome(scripted: TritonServer) -> Iterator[Callable[[str], str]]:
    """How the server saw a request end; waits until it is not running any more."""
    with Client(**settings(scripted, "grpc")) as observer:

        def ask(request_id: str) -> str:
            deadline = time.monotonic() + 30
            while True:
                state = observer.generate(script(report=request_id)).text
                if state not in ("running", "unknown") or time.monotonic() > deadline:
                    return state
                time.sleep(0.02)

        yield ask


@pytest.fixture(scope="session")
def real(checkpoint: Callable[..., Path]) -> Iterator[TritonServer]:
    """The project's own model repository over a small random checkpoint."""
    model = checkpoint("LlamaForCausalLM", max_position_embeddings=65536)
    with running_server(model=model, settings=("num_gpu_blocks_override=4097",)) as server:
        yield server
