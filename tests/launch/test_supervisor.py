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
from charonia.launch.patience import Silence, SupervisionLimits
from charonia.launch.server import TritonServer
from support.e2e import wait_for
from support.events import events
from support.leftovers import leftovers
from support.supervised import ALLOWED_S, Supervised

QUICK = SupervisionLimits(
    probe_interval_s=0.5,
    probe_timeout_s=1.0,
    hang_s=2.0,
    stopped_s=0.5,
    server_hang_s=1.0,
    backoff_s=0.1,
)
PATIENT = dataclasses.replace(QUICK, hang_s=5.0, server_hang_s=5.0)
"""For who must not be restarted, on a machine that may stand still for a second or two."""
UNPROBED = SupervisionLimits(probe_interval_s=3600, stopped_s=0.5)
KINDS = {signal.SIGKILL: "died", signal.SIGSTOP: "stopped"}
LONG = {"text_input": "x", "max_tokens": 60, "delay": 0.05}


class Target(Supervised):
    """A supervised server with the stand-ins, and how to use them."""

    def generate(self, **parameters: object) -> httpx.Response:
        return httpx.post(
            f"http://{self.server.http_url}/v2/models/scheduler/generate",
            json={"text_input": "x", **parameters},
            timeout=ALLOWED_S,
        )

    def ask_generate(self, text: str, timeout: float = ALLOWED_S) -> httpx.Response:
        """One call of the model beside the scheduler."""
        url = f"http://{self.server.http_url}/v2/models/generate/generate"
        return httpx.post(url, json={"text_input": text}, timeout=timeout)

    def lose_generate(self) -> None:
        """Kill it; it is back, and serves, when this returns."""
        num_back = len(events(self.lines, "model_back"))
        os.kill(self.server.pids("generate")[0], signal.SIGKILL)
        wait_for(lambda: events(self.lines, "model_back"), lambda back: len(back) > num_back)
        assert self.ask_generate("x").status_code == 200, "new calls wait for nobody"

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
def supervise(make_server: Callable[..., TritonServer]) -> Iterator[Callable[..., Target]]:
    """Starts a supervised server and waits until it serves."""
    with contextlib.ExitStack() as stack:

        def start(limits: SupervisionLimits = QUICK) -> Target:
            supervised = stack.enter_context(Target(make_server(), limits))
            supervised.wait_serving()
            return supervised

        yield start


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_scheduler_is_restarted_and_open_streams_end_with_an_error(
    supervise: Callable[..., Target], fault: signal.Signals
) -> None:
    # Without its regular probes: what changed in the process list must be noticed by itself.
    supervised = supervise(UNPROBED)
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
    noticed = (f"process_lost model=scheduler kind={KINDS[fault]}", "was ended by SIGABRT")
    assert any(reason in supervised.lines[0] for reason in noticed)


def test_a_dead_tritonserver_is_restarted(supervise: Callable[..., Target]) -> None:
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


def test_a_stopped_tritonserver_is_restarted(supervise: Callable[..., Target]) -> None:
    supervised = supervise(UNPROBED)
    assert supervised.server.pid is not None
    os.kill(supervised.server.pid, signal.SIGSTOP)
    supervised.wait_serving()
    assert supervised.generate().status_code == 200
    assert supervised.lines[0].endswith('reason="tritonserver was stopped"')


def test_a_tritonserver_that_answers_nobody_is_restarted(
    supervise: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process table cannot tell; the scheduler would be given longer.
    monkeypatch.setattr("charonia.launch.lookout.Lookout.look", lambda *_: [])
    supervised = supervise(dataclasses.replace(QUICK, hang_s=3600))
    assert supervised.server.pid is not None
    os.kill(supervised.server.pid, signal.SIGSTOP)
    supervised.wait_serving(timeout=3 * ALLOWED_S)
    assert "tritonserver has not answered for" in supervised.lines[0]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_another_lost_model_is_brought_back_alone_and_streams_go_on(
    supervise: Callable[..., Target], fault: signal.Signals
) -> None:
    supervised = supervise(UNPROBED)
    (old,) = supervised.server.pids("generate")
    pid = supervised.server.pid
    url = f"http://{supervised.server.http_url}/v2/models/scheduler/generate_stream"
    with httpx.stream("POST", url, json=LONG, timeout=ALLOWED_S) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(old, fault)
        wait_for(lambda: len(supervised.lines), lambda num_lines: num_lines == 2)
        words = [line for line in lines if line]
    lost, back = supervised.lines
    assert lost == f"process_lost model=generate kind={KINDS[fault]} pid={old}"
    assert re.fullmatch(r"model_back model=generate seconds=\d[\d.]*", back)
    assert len(words) == LONG["max_tokens"] - 1
    assert supervised.ask_generate("x").json()["text_output"] == "x"
    assert (supervised.server.pid, supervised.supervisor.num_restarts) == (pid, 0)
    assert old not in supervised.server.pids("generate")
    assert events(supervised.lines, "calls_stranded") == []


def test_another_model_that_hangs_is_brought_back(supervise: Callable[..., Target]) -> None:
    supervised = supervise(dataclasses.replace(PATIENT, model_hang_s=2.0))
    (old,) = supervised.server.pids("generate")
    with pytest.raises(httpx.ReadTimeout):
        supervised.ask_generate("hang", timeout=0.5)
    wait_for(lambda: len(supervised.lines), lambda num_lines: num_lines >= 2)
    assert supervised.lines[0] == f"process_lost model=generate kind=hung pid={old}"
    assert supervised.ask_generate("x").status_code == 200


def test_a_model_that_nobody_saw_die_is_brought_back(
    supervise: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As when it dies between its loading and the first look.
    monkeypatch.setattr("charonia.launch.lookout.Lookout.look", lambda *_: [])
    supervised = supervise(PATIENT)
    supervised.lose_generate()
    assert supervised.lines[0].startswith("process_lost model=generate kind=died")


def test_calls_that_a_lost_model_leaves_open_end_with_the_server(
    supervise: Callable[..., Target],
) -> None:
    supervised = supervise(dataclasses.replace(PATIENT, stranded_s=15.0))
    errors: list[Exception] = []

    def call() -> None:
        try:
            supervised.ask_generate("hold", timeout=3 * ALLOWED_S)
        except httpx.HTTPError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    time.sleep(0.5)
    supervised.lose_generate()
    supervised.lose_generate()  # this one leaves no call open, which must not hide the first's
    supervised.wait_serving(timeout=3 * ALLOWED_S)
    caller.join(timeout=ALLOWED_S)
    assert [type(error) for error in errors] == [httpx.RemoteProtocolError]
    assert events(supervised.lines, "calls_stranded") == [{"model": "generate", "calls": "1"}]
    (restarting,) = events(supervised.lines, "server_restarting")
    assert restarting["reason"] == "calls of the lost generate process can end in no other way"


def test_a_model_that_cannot_be_loaded_again_costs_the_server(
    supervise: Callable[..., Target], repository: Path
) -> None:
    supervised = supervise(dataclasses.replace(UNPROBED, max_failed_starts=1))
    (repository / "refuse-to-load-again").touch()
    os.kill(supervised.server.pids("generate")[0], signal.SIGKILL)
    supervised.thread.join(timeout=60)
    assert "the stand-in refuses to load again" in str(supervised.error)


def test_a_model_that_an_operator_unloads_or_loads_again_is_no_loss(
    supervise: Callable[..., Target],
) -> None:
    supervised = supervise(UNPROBED)
    for operation in ("unload", "load"):
        supervised.control(f"generate/{operation}")
        time.sleep(1.0)
        assert supervised.lines == []
    (pid,) = supervised.server.pids("generate")
    os.kill(pid, signal.SIGKILL)  # the one that is looked after now
    wait_for(lambda: len(supervised.lines), lambda num_lines: num_lines == 2)
    assert supervised.lines[0] == f"process_lost model=generate kind=died pid={pid}"


def test_a_scheduler_that_hangs_is_restarted(supervise: Callable[..., Target]) -> None:
    supervised = supervise()
    supervised.hang()
    supervised.wait_serving()
    assert supervised.generate().status_code == 200
    assert "has not answered for" in supervised.lines[0]


def test_a_scheduler_that_refuses_or_is_slow_is_left_alone(
    supervise: Callable[..., Target], repository: Path
) -> None:
    supervised = supervise(PATIENT)
    (pid,) = supervised.server.pids("scheduler")
    (repository / "refuse-to-serve").touch()
    assert supervised.generate().json()["error"] == "the queue is full"
    time.sleep(PATIENT.hang_s + 1)
    assert supervised.server.pids("scheduler") == [pid]
    assert supervised.supervisor.num_restarts == 0


def test_a_scheduler_without_its_engine_is_given_time_to_reload_it(
    supervise: Callable[..., Target],
) -> None:
    supervised = supervise(PATIENT)
    supervised.control("engine/unload")
    supervised.hang()
    time.sleep(PATIENT.hang_s + 1)
    assert supervised.supervisor.num_restarts == 0
    supervised.control("engine/load")
    supervised.wait_serving()


def test_a_server_that_keeps_failing_is_given_up(
    supervise: Callable[..., Target], repository: Path
) -> None:
    supervised = supervise(dataclasses.replace(QUICK, max_failed_starts=2))
    (repository / "refuse-to-load").touch()
    os.kill(supervised.server.pids("scheduler")[0], signal.SIGKILL)
    supervised.thread.join(timeout=60)
    assert str(supervised.error).startswith("gave up after 2 failed starts in a row; last: ")
    assert "the stand-in refuses to load" in str(supervised.error)
    assert supervised.lines[-1].startswith("server_given_up starts=2 reason=")
    assert supervised.server.pid is None


def test_a_server_that_is_ended_time_and_again_is_restarted_each_time(
    supervise: Callable[..., Target],
) -> None:
    limits = dataclasses.replace(UNPROBED, backoff_s=0.1, max_failed_starts=1)
    supervised = supervise(limits)
    for num_restarts in range(1, 4):
        assert supervised.server.pid is not None
        os.kill(supervised.server.pid, signal.SIGKILL)
        supervised.wait_serving()
        assert supervised.supervisor.num_restarts == num_restarts


def test_a_first_start_that_fails_is_not_repeated(
    make_server: Callable[..., TritonServer], repository: Path
) -> None:
    (repository / "refuse-to-load").touch()
    supervised = Target(make_server(), QUICK)
    with pytest.raises(LaunchError, match="the stand-in refuses to load"):
        supervised.supervisor.run()
    assert supervised.supervisor.num_restarts == 0


def test_a_stop_while_a_probe_waits_for_an_answer_is_quick(
    supervise: Callable[..., Target],
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
