"""Supervision of the real tritonserver with stand-in models: what breaks, how soon it is back."""

import dataclasses
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from charonia.errors import LaunchError
from charonia.launch.server.tritonserver import TritonServer
from charonia.supervision.server.judge import ResponseTimeout, SupervisionLimits
from support.e2e import wait_for
from support.leftovers import leftovers
from support.long import long
from support.stand_ins import KINDS, PROBED, UNPROBED, Target
from support.stopping import stop_process
from support.supervised import ALLOWED_S
from support.watching import Clock, Questions


@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=long)])
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
    supervised.wait_serving()
    assert supervised.ask("scheduler").status_code == 200
    (new,) = supervised.server.pids("scheduler")
    assert new != old
    assert not psutil.pid_exists(old) or psutil.Process(old).status() == psutil.STATUS_ZOMBIE
    # Triton's core may itself abort when a model's process dies in the middle of a response.
    noticed = (
        f"process_lost level=error model=scheduler kind={KINDS[fault]}",
        "was ended by SIGABRT",
    )
    assert any(reason in supervised.lines[0] for reason in noticed)


def test_a_dead_tritonserver_is_restarted(supervise: Callable[..., Target]) -> None:
    supervised = supervise(PROBED)
    assert supervised.server.pid is not None
    os.kill(supervised.server.pid, signal.SIGKILL)
    supervised.wait_serving()
    assert supervised.ask("scheduler").status_code == 200
    supervised.wait_events("server_back")
    restarting, back = supervised.lines
    reason = '"tritonserver was ended by SIGKILL"'
    assert restarting == f"server_restarting level=error restarts=0 reason={reason}"
    assert re.fullmatch(r"server_back seconds=\d[\d.]*", back)


@long
def test_a_stopped_tritonserver_is_restarted(supervise: Callable[..., Target]) -> None:
    supervised = supervise(UNPROBED)
    assert supervised.server.pid is not None
    stop_process(supervised.server.pid)
    supervised.wait_serving()
    assert supervised.ask("scheduler").status_code == 200
    assert supervised.lines[0].endswith('reason="tritonserver was stopped"')


@long
def test_a_tritonserver_that_answers_nobody_is_restarted(
    supervise: Callable[..., Target],
    clock: Clock,
    questions: Questions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The process table cannot tell; the scheduler would be given longer.
    monkeypatch.setattr("charonia.supervision.server.judge.Watchdog.look", lambda *_: [])
    monkeypatch.setattr("charonia.supervision.server.model_control._ANSWER_S", 1.0)
    supervised = supervise(dataclasses.replace(PROBED, server_hang_s=600))
    assert supervised.server.pid is not None
    stop_process(supervised.server.pid)
    questions.wait_asked("scheduler")
    assert supervised.lines == []
    clock.set_forward(601)
    supervised.wait_serving()
    assert "tritonserver has not answered for" in supervised.lines[0]


def test_a_scheduler_that_hangs_is_restarted(
    supervise: Callable[..., Target], clock: Clock, questions: Questions
) -> None:
    supervised = supervise(dataclasses.replace(PROBED, hang_s=600))
    supervised.hang("scheduler")
    questions.wait_asked("scheduler")
    assert supervised.lines == []
    clock.set_forward(601)
    supervised.wait_serving()
    assert supervised.ask("scheduler").status_code == 200
    assert "has not answered for" in supervised.lines[0]


def test_a_scheduler_that_refuses_is_left_alone(
    supervise: Callable[..., Target], clock: Clock, questions: Questions, repository: Path
) -> None:
    supervised = supervise(dataclasses.replace(PROBED, hang_s=600, probe_timeout_s=ALLOWED_S))
    (pid,) = supervised.server.pids("scheduler")
    (repository / "refuse-to-serve").touch()
    assert supervised.ask("scheduler").json()["error"] == "the queue is full"
    clock.set_forward(601)
    questions.wait_asked("scheduler", times=2)
    assert supervised.lines == []
    assert supervised.server.pids("scheduler") == [pid]
    assert supervised.supervisor.num_restarts == 0


@long
def test_a_scheduler_without_its_engine_is_given_time_to_reload_it(
    supervise: Callable[..., Target], clock: Clock, questions: Questions
) -> None:
    supervised = supervise(dataclasses.replace(PROBED, hang_s=600))
    supervised.control("engine", "unload")
    supervised.hang("scheduler")
    questions.wait_asked("scheduler")
    clock.set_forward(601)
    questions.wait_asked("scheduler", times=2)
    assert supervised.lines == []
    supervised.control("engine", "load")
    questions.wait_asked("scheduler")
    clock.set_forward(601)
    supervised.wait_serving()
    assert "the scheduler has not answered for" in supervised.lines[0]


@long
def test_a_server_that_keeps_failing_is_given_up(
    supervise: Callable[..., Target], repository: Path
) -> None:
    supervised = supervise(dataclasses.replace(UNPROBED, max_failed_starts=2))
    (repository / "refuse-to-load").touch()
    os.kill(supervised.server.pids("scheduler")[0], signal.SIGKILL)
    supervised.thread.join(ALLOWED_S)
    assert str(supervised.error).startswith("gave up after 2 failed starts in a row; last: ")
    assert "the stand-in refuses to load" in str(supervised.error)
    assert supervised.lines[-1].startswith("server_given_up level=error starts=2 reason=")
    assert supervised.server.pid is None


@long
def test_a_server_that_is_ended_time_and_again_is_restarted_each_time(
    supervise: Callable[..., Target],
) -> None:
    supervised = supervise(dataclasses.replace(UNPROBED, max_failed_starts=1))
    for num_restarts in range(1, 4):
        assert supervised.server.pid is not None
        os.kill(supervised.server.pid, signal.SIGKILL)
        supervised.wait_serving()
        assert supervised.supervisor.num_restarts == num_restarts


def test_a_first_start_that_fails_is_not_repeated(
    make_server: Callable[..., TritonServer], repository: Path
) -> None:
    (repository / "refuse-to-load").touch()
    supervised = Target(make_server(), UNPROBED)
    with pytest.raises(LaunchError, match="the stand-in refuses to load"):
        supervised.supervisor.run()
    assert supervised.supervisor.num_restarts == 0


def test_a_stop_waits_for_no_probes_answer(
    supervise: Callable[..., Target],
    clock: Clock,
    questions: Questions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("charonia.launch.server.tritonserver.EXIT_TIMEOUT_S", 1)
    limits = dataclasses.replace(PROBED, probe_interval_s=600, probe_timeout_s=3600)
    supervised = supervise(limits)
    supervised.hang("scheduler")
    before = questions.num_asked["scheduler"]
    clock.set_forward(601)
    assert wait_for(lambda: questions.num_asked["scheduler"] > before, bool)
    supervised.stop.set()
    supervised.thread.join(ALLOWED_S)
    assert not supervised.thread.is_alive()
    supervised.server.close()
    assert leftovers(supervised.server.runtime_dir) == []


def test_the_time_in_which_the_engine_was_not_loaded_does_not_count_against_the_scheduler() -> None:
    timeout = ResponseTimeout(SupervisionLimits(hang_s=45, reload_s=900), now=0.0)
    timeout.note_answer(10.0)
    for now in range(20, 900, 10):
        assert timeout.note_no_answer(float(now), is_loaded=False) is None
    assert timeout.note_no_answer(930.0, is_loaded=True) is None
    assert timeout.note_no_answer(936.0, is_loaded=True) == "has not answered for 46 s"
    timeout.note_answer(937.0)
    assert timeout.note_no_answer(980.0, is_loaded=True) is None
    assert timeout.note_no_answer(983.0, is_loaded=True) == "has not answered for 46 s"
    assert timeout.note_no_answer(1840.0, is_loaded=False) == "has not answered for 903 s"
