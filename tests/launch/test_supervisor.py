"""Supervision of the real tritonserver with stand-in models: what breaks, how soon it is back."""

import contextlib
import dataclasses
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from charonia.launch.errors import LaunchError
from charonia.launch.server import TritonServer
from charonia.launch.supervisor import Silence, SupervisionLimits, Supervisor
from support.e2e import wait_for
from support.leftovers import leftovers

QUICK = SupervisionLimits(probe_interval_s=0.5, probe_timeout_s=1.0, hang_s=2.0, backoff_s=0.1)
ALLOWED_S = 15.0  # from the fault until the server answers again


class Supervised:
    """A supervisor at work in a thread, and what it reported."""

    def __init__(self, server: TritonServer, limits: SupervisionLimits = QUICK) -> None:
        self.server = server
        self.stop = threading.Event()
        self.serving = threading.Semaphore(0)
        self.lines: list[str] = []
        self.error: LaunchError | None = None
        self.supervisor = Supervisor(
            server,
            stop=self.stop,
            log=self.lines.append,
            on_serving=self.serving.release,
            limits=limits,
        )
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.supervisor.run()
        except LaunchError as error:
            self.error = error

    def wait_serving(self) -> float:
        """Seconds until the server serves (again)."""
        started = time.monotonic()
        assert self.serving.acquire(timeout=ALLOWED_S), self.error or self.lines
        return time.monotonic() - started

    def generate(self, **parameters: object) -> httpx.Response:
        return httpx.post(
            f"http://{self.server.http_url}/v2/models/scheduler/generate",
            json={"text_input": "x", **parameters},
            timeout=ALLOWED_S,
        )

    def hang(self) -> None:
        """Make the scheduler deaf to whatever comes later."""
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"http://{self.server.http_url}/v2/models/scheduler/generate",
                json={"text_input": "x", "hang": True},
                timeout=0.5,
            )

    def control(self, operation: str) -> None:
        """Load or unload a model, as the operator."""
        httpx.post(
            f"http://{self.server.http_url}/v2/repository/models/{operation}",
            headers=self.server.api_headers,
        ).raise_for_status()


@pytest.fixture
def supervise(make_server: Callable[..., TritonServer]) -> Iterator[Callable[..., Supervised]]:
    """Starts a supervised server and waits until it serves."""
    with contextlib.ExitStack() as stack:

        def start(limits: SupervisionLimits = QUICK) -> Supervised:
            supervised = Supervised(make_server(), limits)
            supervised.thread.start()
            stack.callback(supervised.thread.join)
            stack.callback(supervised.stop.set)
            supervised.wait_serving()
            return supervised

        yield start


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_scheduler_is_restarted_and_open_streams_end_with_an_error(
    supervise: Callable[..., Supervised], fault: signal.Signals
) -> None:
    # Without its regular probes: what changed in the process list must be noticed by itself.
    supervised = supervise(SupervisionLimits(probe_interval_s=3600))
    url = f"http://{supervised.server.http_url}/v2/models/scheduler/generate_stream"
    endless = {"text_input": "x", "max_tokens": 10_000, "delay": 0.05}
    (old,) = supervised.server.pids("scheduler")
    with httpx.stream("POST", url, json=endless, timeout=ALLOWED_S) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(old, fault)
        with pytest.raises(httpx.HTTPError):
            for _ in lines:
                pass
    assert supervised.wait_serving() < ALLOWED_S
    assert supervised.generate().status_code == 200
    (new,) = supervised.server.pids("scheduler")
    assert new != old
    assert not psutil.pid_exists(old) or psutil.Process(old).status() == psutil.STATUS_ZOMBIE
    # Triton's core may itself abort when a model's process dies in the middle of a response.
    noticed = ("the scheduler process died or was stopped", "tritonserver was ended by SIGABRT")
    assert any(reason in supervised.lines[0] for reason in noticed)


def test_a_dead_tritonserver_is_restarted(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise()
    assert supervised.server.pid is not None
    os.kill(supervised.server.pid, signal.SIGKILL)
    supervised.wait_serving()
    assert supervised.generate().status_code == 200
    wait_for(lambda: len(supervised.lines), lambda num_lines: num_lines == 2)
    restarting, back = supervised.lines
    reason = '"tritonserver was ended by SIGKILL"'
    assert restarting == f"server_restarting restarts=0 reason={reason}"
    assert re.fullmatch(r"server_back seconds=\d[\d.]*", back)


def test_a_scheduler_that_hangs_is_restarted(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise()
    supervised.hang()
    supervised.wait_serving()
    assert supervised.generate().status_code == 200
    assert "has not answered for" in supervised.lines[0]


def test_a_scheduler_that_refuses_or_is_slow_is_left_alone(
    supervise: Callable[..., Supervised], repository: Path
) -> None:
    supervised = supervise()
    (pid,) = supervised.server.pids("scheduler")
    (repository / "refuse-to-serve").touch()
    assert supervised.generate().json()["error"] == "the queue is full"
    time.sleep(QUICK.hang_s * 2)
    assert supervised.server.pids("scheduler") == [pid]
    assert supervised.supervisor.num_restarts == 0


def test_a_scheduler_without_its_engine_is_given_time_to_reload_it(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise()
    supervised.control("engine/unload")
    supervised.hang()
    time.sleep(QUICK.hang_s * 2)
    assert supervised.supervisor.num_restarts == 0
    supervised.control("engine/load")
    supervised.wait_serving()


def test_a_server_that_keeps_failing_is_given_up(
    supervise: Callable[..., Supervised], repository: Path
) -> None:
    supervised = supervise(dataclasses.replace(QUICK, max_quick_failures=1))
    (repository / "refuse-to-load").touch()
    os.kill(supervised.server.pids("scheduler")[0], signal.SIGKILL)
    supervised.thread.join(timeout=60)
    assert str(supervised.error).startswith("gave up after 2 failures in a row; last: ")
    assert "the stand-in refuses to load" in str(supervised.error)
    assert supervised.lines[-1].startswith("server_given_up failures=2 reason=")
    assert supervised.server.pid is None


def test_a_first_start_that_fails_is_not_repeated(
    make_server: Callable[..., TritonServer], repository: Path
) -> None:
    (repository / "refuse-to-load").touch()
    supervised = Supervised(make_server())
    with pytest.raises(LaunchError, match="the stand-in refuses to load"):
        supervised.supervisor.run()
    assert supervised.supervisor.num_restarts == 0


def test_a_stop_while_a_probe_waits_for_an_answer_is_quick(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise(SupervisionLimits(probe_interval_s=0.1))
    supervised.hang()
    started = time.monotonic()
    supervised.stop.set()
    supervised.thread.join()
    supervised.server.close()
    assert time.monotonic() - started < 10
    assert leftovers(supervised.server.runtime_dir) == []


def test_the_time_in_which_the_engine_was_not_loaded_is_no_silence_of_the_scheduler() -> None:
    silence = Silence(SupervisionLimits(hang_s=45, reload_s=900), now=0.0)
    silence.note_answer(10.0)
    for now in range(20, 900, 10):
        assert silence.note_silence(float(now), is_loaded=False) is None
    assert silence.note_silence(930.0, is_loaded=True) is None
    assert silence.note_silence(936.0, is_loaded=True) == "has not answered for 46 s"
    silence.note_answer(937.0)
    assert silence.note_silence(980.0, is_loaded=True) is None
    assert silence.note_silence(983.0, is_loaded=True) == "has not answered for 46 s"
    assert silence.note_silence(1840.0, is_loaded=False) == "has not answered for 903 s"
