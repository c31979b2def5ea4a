"""Starts that go wrong, on the real tritonserver with stand-in models: what counts as failed."""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from charonia.errors import LaunchError, LostError
from charonia.launch.server import processes
from charonia.launch.server.tritonserver import TritonServer
from charonia.supervision.server.probes import Probe
from charonia.supervision.server.supervisor import wait_serving
from support.e2e import wait_for
from support.events import events
from support.long import long
from support.stand_ins import UNPROBED
from support.stopping import stop_process
from support.supervised import ALLOWED_S, Supervised

ONE_FAILURE = dataclasses.replace(UNPROBED, max_failed_starts=1)
TWO_FAILURES = dataclasses.replace(UNPROBED, max_failed_starts=2)
SILENT_S = 3.0


@pytest.mark.parametrize("victim", ["tritonserver", pytest.param("scheduler", marks=long)])
def test_a_server_that_clients_end_before_it_serves_is_started_again_each_time(
    make_server: Callable[..., TritonServer], monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    num_ends = 0
    wait_ready = TritonServer.wait_ready

    def wait_ready_and_end(server: TritonServer, *args: object) -> None:
        nonlocal num_ends
        wait_ready(server, *args)
        if num_ends < 2:
            num_ends += 1
            pid = server.pid if victim == "tritonserver" else server.pids(victim)[0]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(TritonServer, "wait_ready", wait_ready_and_end)
    with Supervised(make_server(), ONE_FAILURE) as supervised:
        supervised.wait_serving()
        assert supervised.supervisor.num_restarts == num_ends == 2


def test_a_server_that_ends_as_soon_as_it_is_open_is_started_again(
    make_server: Callable[..., TritonServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before the launcher could see that it was ready.
    num_left = 1
    says_ready = TritonServer._says_ready

    def end_when_open(line: str) -> None:
        nonlocal num_left
        if "Started GRPCInferenceService" in line and num_left:
            num_left -= 1
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)

    server = make_server(on_log=end_when_open)
    monkeypatch.setattr(
        TritonServer, "_says_ready", lambda server: num_left == 0 and says_ready(server)
    )
    with Supervised(server, ONE_FAILURE) as supervised:
        supervised.wait_serving()
        assert supervised.supervisor.num_restarts == 1


@long
def test_a_server_that_stands_still_on_its_way_is_started_again(
    make_server: Callable[..., TritonServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts, wait_ready = [0.0], TritonServer.wait_ready

    def wait_less_at_first(server: TritonServer, timeout: float, *rest: Any) -> None:
        wait_ready(server, timeouts.pop() if timeouts else timeout, *rest)

    monkeypatch.setattr(TritonServer, "wait_ready", wait_less_at_first)
    with Supervised(make_server(), ONE_FAILURE) as supervised:
        supervised.wait_serving()
        (restart,) = events(supervised.lines, "server_restarting")
        assert restart["reason"].startswith("tritonserver was not ready within 0 s")


@pytest.mark.parametrize(("num_crashes", "num_restarts"), [(1, 1), pytest.param(9, 2, marks=long)])
def test_a_server_that_crashes_on_its_way_is_started_again_but_not_for_ever(
    make_server: Callable[..., TritonServer],
    repository: Path,
    num_crashes: int,
    num_restarts: int,
) -> None:
    num_left = num_crashes

    def crash(line: str) -> None:
        nonlocal num_left
        if "the stand-in scheduler loads" in line and num_left:
            num_left -= 1
            assert server.pid is not None
            os.kill(server.pid, signal.SIGABRT)

    server = make_server(on_log=crash)
    if num_crashes > num_restarts:
        (repository / "load-slowly").touch()  # it never opens, however late it crashes
    with Supervised(server, TWO_FAILURES) as supervised:
        if num_crashes == 1:
            supervised.wait_serving()
        else:
            supervised.wait_events("server_given_up")
        assert supervised.supervisor.num_restarts == num_restarts
    reasons = [one["reason"] for one in events(supervised.lines, "server_restarting")]
    assert all(reason.startswith("tritonserver was ended by SIGABRT") for reason in reasons)


@long
def test_processes_that_do_not_end_at_once_are_killed_again_later(
    make_server: Callable[..., TritonServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_session = processes.kill_session
    num_left = 1

    def kill_later(leader: int) -> None:
        nonlocal num_left
        if num_left:
            num_left -= 1
            raise LaunchError("processes 1, 2 do not end")
        kill_session(leader)

    with Supervised(make_server(), TWO_FAILURES) as supervised:
        supervised.wait_serving()
        monkeypatch.setattr(processes, "kill_session", kill_later)
        assert supervised.server.pid is not None
        os.kill(supervised.server.pid, signal.SIGKILL)
        supervised.wait_serving()
    reasons = [one["reason"] for one in events(supervised.lines, "server_restarting")]
    assert reasons == ["tritonserver was ended by SIGKILL", "processes 1, 2 do not end"]


@pytest.mark.parametrize(("is_ready", "error"), [(False, LaunchError), (True, LostError)])
def test_a_tritonserver_that_is_stopped_during_its_start_is_not_waited_for(
    make_server: Callable[..., TritonServer],
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_ready: bool,
    error: type[LaunchError],
) -> None:
    server = make_server()
    if is_ready:
        server.start()
        server.wait_ready()
        monkeypatch.setattr(server, "wait_ready", lambda *_: None)
    else:
        (repository / "load-slowly").touch()
        server.start()
        wait_for(lambda: server.pids("engine"), bool)
    assert server.pid is not None
    stop_process(server.pid)
    with (
        contextlib.closing(Probe(server.http_url, "scheduler")) as probe,
        pytest.raises(LaunchError, match=r"^tritonserver was stopped$") as caught,
    ):
        wait_serving(server, probe, ALLOWED_S, stopped_s=0.5)
    assert caught.type is error


@long
def test_a_model_that_is_silent_for_a_while_as_it_loads_is_waited_for(
    make_server: Callable[..., TritonServer], repository: Path
) -> None:
    # As on a busy machine. Triton itself gives it up after a second, and never gets ready.
    (repository / "load-slowly").touch()
    log: list[str] = []
    server = make_server(on_log=log.append)
    server.start()
    assert wait_for(lambda: any("loads slowly" in line for line in log), bool)
    (pid,) = server.pids("engine")
    stop_process(pid)
    time.sleep(SILENT_S)
    os.kill(pid, signal.SIGCONT)
    (repository / "load-slowly").unlink()
    server.wait_ready()
    assert server.pids("engine") == [pid]
