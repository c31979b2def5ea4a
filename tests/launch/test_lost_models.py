"""Models beside the scheduler, of the real tritonserver with stand-ins: each comes back alone."""

import dataclasses
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from support.e2e import wait_for
from support.events import events
from support.long import long
from support.stand_ins import KINDS, PATIENT, UNPROBED, Target, add_pair
from support.supervised import ALLOWED_S

LONG = {"text_input": "x", "max_tokens": 60, "delay": 0.05}


@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=long)])
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


@long
def test_a_late_answer_about_a_lost_process_costs_no_other(
    supervise: Callable[..., Target],
) -> None:
    # A question that it cannot answer is under way when it is found to be stopped.
    supervised = supervise(dataclasses.replace(PATIENT, probe_interval_s=0.1))
    os.kill(supervised.server.pids("generate")[0], signal.SIGSTOP)
    wait_for(lambda: events(supervised.lines, "model_back"), bool)
    time.sleep(2 * PATIENT.probe_timeout_s)
    assert len(events(supervised.lines, "process_lost")) == 1
    assert supervised.ask_generate("x").status_code == 200


def test_a_model_that_nobody_saw_die_is_brought_back(
    supervise: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As when it dies between its loading and the first look.
    monkeypatch.setattr("charonia.launch.lookout.Lookout.look", lambda *_: [])
    supervised = supervise(PATIENT)
    supervised.lose_generate()
    assert supervised.lines[0].startswith("process_lost model=generate kind=died")


@long
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


@long
def test_the_other_of_two_processes_finishes_its_call_and_ends(
    supervise: Callable[..., Target], repository: Path
) -> None:
    add_pair(repository)
    supervised = supervise(dataclasses.replace(UNPROBED, drain_s=4.0))
    old = set(supervised.server.pids("pair"))
    codes: list[int] = []

    def call() -> None:
        codes.append(supervised.ask_generate("slow", model="pair").status_code)

    callers = [threading.Thread(target=call) for _ in old]
    for caller in callers:
        caller.start()
    in_hand = wait_for(lambda: list(repository.glob("slow-*")), lambda found: len(found) == 2)
    assert len(in_hand) == 2, "each of the two has one"
    os.kill(min(old), signal.SIGKILL)
    for caller in callers:
        caller.join(timeout=ALLOWED_S)
    assert sorted(codes) == [200, 400]
    new = wait_for(
        lambda: set(supervised.server.pids("pair")), lambda pids: len(pids) == 2 and not pids & old
    )
    assert len(new) == 2
    assert not new & old, "Triton ends none of a model that lost a request; the launcher does"
    os.kill(min(new), signal.SIGKILL)  # as many are needed as before: this loss is seen, too
    back = wait_for(lambda: events(supervised.lines, "model_back"), lambda back: len(back) == 2)
    assert len(back) == 2
    assert supervised.supervisor.num_restarts == 0


@long
def test_other_losses_are_seen_while_a_model_is_loaded_again(
    supervise: Callable[..., Target], repository: Path
) -> None:
    supervised = supervise(UNPROBED)
    (repository / "load-slowly").touch()
    os.kill(supervised.server.pids("generate")[0], signal.SIGKILL)
    wait_for(lambda: events(supervised.lines, "process_lost"), bool)
    os.kill(supervised.server.pids("scheduler")[0], signal.SIGKILL)
    restarting = wait_for(lambda: events(supervised.lines, "server_restarting"), bool)
    (repository / "load-slowly").unlink()
    assert [event["reason"] for event in restarting] == ["the scheduler process died"]
    supervised.wait_serving(timeout=3 * ALLOWED_S)
    assert supervised.ask_generate("x").status_code == 200


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
    supervised = supervise(dataclasses.replace(PATIENT, probe_interval_s=1.0))
    for operation in ("unload", "load"):
        supervised.control("generate", operation)
        time.sleep(1.0)
        assert supervised.lines == []
    (pid,) = supervised.server.pids("generate")
    os.kill(pid, signal.SIGKILL)  # the one that is looked after now
    wait_for(lambda: len(supervised.lines), lambda num_lines: num_lines == 2)
    assert supervised.lines[0] == f"process_lost model=generate kind=died pid={pid}"
