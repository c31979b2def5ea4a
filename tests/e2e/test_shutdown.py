"""A server that is stopped, whatever it is doing: everybody is told, and it ends in order."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tritonclient.grpc as grpc

from charonia.launch.commands.cli import main
from charonia.launch.server import tritonserver as launch_server
from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import ONE_THREAD, wait_for, wait_running
from support.events import events
from support.faults import order_fault
from support.leftovers import leftovers
from support.live_stream import LiveStream
from support.long import long

SETTINGS = (
    ONE_THREAD,
    "max_num_seqs=16",
    "max_num_batched_tokens=256",
    "num_gpu_blocks_override=900",
)
CRASHES = ("Signal (6)", "Signal (11)", "terminate called", "malloc", "core dumped", "Traceback")
WAYS_IN = ("scheduler", "llm", "scheduler", "llm")
SLOW_LOAD_S = 3
PATIENCE_S = 60  # of a test on a slow machine, with unloading the models


@dataclass
class Target:
    """A server that is about to be stopped.

    Attributes:
        streams: under way. threads: of whoever is busy with it.
    """

    server: TritonServer
    log: list[str]
    streams: list[LiveStream] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def start_streams(self) -> None:
        self.streams = [
            LiveStream(
                self.server.grpc_url, [1, 2, index], model=model, max_tokens=3900, ignore_eos=True
            )
            for index, model in enumerate(WAYS_IN)
        ]
        for stream in self.streams:
            stream.wait_tokens(3)

    def wait_logged(self, name: str) -> None:
        assert wait_for(lambda: events(self.log, name), bool), f"no {name}"

    def stop(self) -> int:
        """Stop it as the launcher does; returns tritonserver's exit code."""
        process = self.server._process
        assert isinstance(process, subprocess.Popen)
        self.server.stop()
        for thread in self.threads:
            thread.join()
        assert process.returncode is not None
        return process.returncode


@pytest.fixture
def target(
    small_checkpoint: Path, faulty_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Target]:
    for name in ("EXIT_TIMEOUT_S", "END_REQUESTS_S", "INDEX_S"):
        monkeypatch.setattr(launch_server, name, PATIENCE_S)
    log: list[str] = []
    with running_server(
        model=small_checkpoint, settings=SETTINGS, source=faulty_repository, on_log=log.append
    ) as server:
        yield Target(server, log)
    assert leftovers(server.runtime_dir) == []


def nothing(target: Target) -> None:
    """It is idle."""


def streams(target: Target) -> None:
    """Streams are under way."""
    target.start_streams()


def recovery(target: Target) -> None:
    """The engine was lost, and another one is being loaded."""
    target.start_streams()
    order_fault(target.server.repository, "load-seconds", SLOW_LOAD_S)
    (pid,) = target.server.pids("engine")
    os.kill(pid, signal.SIGKILL)
    target.wait_logged("engine_died")


def reload(target: Target) -> None:
    """An operator has ordered another engine, which is being loaded."""
    target.start_streams()
    order_fault(target.server.repository, "load-seconds", SLOW_LOAD_S)
    command = ["reload", "--url", target.server.grpc_url, "--set", "seed=7"]
    target.threads.append(threading.Thread(target=main, args=(command,)))
    target.threads[0].start()
    target.wait_logged("engine_reloading")


def unloaded(target: Target) -> None:
    """An operator has unloaded the engine, for which streams wait."""
    target.start_streams()
    with grpc.InferenceServerClient(target.server.grpc_url) as client:
        client.unload_model(target.server.control_name("engine"), headers=target.server.api_headers)
    target.wait_logged("engine_unloaded")


@pytest.mark.parametrize(
    "prepare",
    [streams, *(pytest.param(one, marks=long) for one in (nothing, reload, recovery, unloaded))],
)
def test_a_server_that_is_stopped_tells_everybody_and_ends_in_order(target, prepare) -> None:
    prepare(target)
    before = len(target.log)
    assert target.stop() == 0
    for stream in target.streams:
        assert "the server is shutting down" in (stream.wait_over().error or ""), stream.error
    after = target.log[before:]
    assert events(after, "engine_died") == events(after, "engine_load_failed") == []
    assert [line for line in after if any(crash in line for crash in CRASHES)] == []


@long
def test_requests_of_a_proxy_alone_are_told_when_others_stop_the_server(target) -> None:
    """Triton waits for those, and counts none of the scheduler's."""
    url, sampling = target.server.grpc_url, {"max_tokens": 3900, "ignore_eos": True}
    requests = [
        LiveStream(url, [1, 2, index], protocol="unary", model="generate", **sampling)
        for index in range(3)
    ]
    wait_running(target.server, len(requests))
    process = target.server._process
    process.terminate()
    for request in requests:
        assert "the server is shutting down" in (request.wait_over().error or ""), request.error
    assert process.wait(PATIENCE_S) == 0
    assert events(target.log, "engine_died") == []


@long
def test_a_server_that_others_stop_tells_those_whom_it_still_can(target) -> None:
    """Triton carries no stream of an ensemble to its end, but those of the scheduler."""
    streams = [
        LiveStream(target.server.grpc_url, [1, 2, index], max_tokens=3900, ignore_eos=True)
        for index in range(3)
    ]
    for stream in streams:
        stream.wait_tokens(3)
    process = target.server._process
    process.terminate()
    for stream in streams:
        assert "the server is shutting down" in (stream.wait_over().error or ""), stream.error
    assert process.wait(PATIENCE_S) == 0
    assert events(target.log, "engine_died") == []
