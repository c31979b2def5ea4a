"""Models beside the scheduler, of the real tritonserver with stand-ins: each comes back alone."""

import dataclasses
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from httpx_sse import EventSource

from charonia.supervision.server.judge import Watchdog
from charonia.supervision.server.repairs import OrphanedCalls
from support.e2e import wait_for
from support.events import events
from support.long import long
from support.stand_ins import KINDS, PROBED, UNPROBED, Target, add_pair
from support.stopping import stop_process
from support.supervised import ALLOWED_S
from support.watching import Clock, Questions

ENDLESS = {"text_input": "x", "max_tokens": 100_000, "delay": 0.05}


@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=long)])
def test_another_lost_model_is_brought_back_alone_and_streams_go_on(
    supervise: Callable[..., Target], repository: Path, fault: signal.Signals
) -> None:
    supervised = supervise(UNPROBED)
    (old,) = supervised.server.pids("generate")
    pid = supervised.server.pid
    url = f"http://{supervised.server.http_url}/v2/models/scheduler/generate_stream"
    with httpx.stream("POST", url, json=ENDLESS, timeout=ALLOWED_S) as stream:
        chunks = (event.json() for event in EventSource(stream).iter_sse())
        first = next(chunks)
        os.kill(old, fault)
        supervised.wait_events("model_back")
        (repository / "end-streams").touch()
        words = [chunk["text_output"] for chunk in (first, *chunks)]
    lost, back = supervised.lines
    assert lost == f"process_lost level=error model=generate kind={KINDS[fault]} pid={old}"
    assert re.fullmatch(r"model_back model=generate seconds=\d[\d.]*", back)
    assert words == [f"word{index} " for index in range(len(words))], "to the end, without a gap"
    assert supervised.ask("generate").json()["text_output"] == "x"
    assert (supervised.server.pid, supervised.supervisor.num_restarts) == (pid, 0)
    assert old not in supervised.server.pids("generate")
    assert events(supervised.lines, "calls_stranded") == []


def test_another_model_that_hangs_is_brought_back(
    supervise: Callable[..., Target], clock: Clock, questions: Questions
) -> None:
    supervised = supervise(dataclasses.replace(PROBED, model_hang_s=600))
    (old,) = supervised.server.pids("generate")
    supervised.hang("generate")
    questions.wait_asked("generate")
    assert supervised.lines == []
    clock.set_forward(601)
    supervised.wait_events("model_back")
    assert supervised.lines[0] == f"process_lost level=error model=generate kind=hung pid={old}"
    assert supervised.ask("generate").status_code == 200


@long
def test_a_late_answer_about_a_lost_process_costs_no_other(
    supervise: Callable[..., Target], questions: Questions
) -> None:
    # A question that it cannot answer is under way when it is found to be stopped.
    supervised = supervise(PROBED)
    stop_process(supervised.server.pids("generate")[0])
    supervised.wait_events("model_back")
    questions.wait_asked("generate", times=2)
    assert len(events(supervised.lines, "process_lost")) == 1
    assert supervised.ask("generate").status_code == 200


def test_a_model_that_nobody_saw_die_is_brought_back(
    supervise: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As when it dies between its loading and the first look.
    monkeypatch.setattr("charonia.supervision.server.judge.Watchdog.look", lambda *_: [])
    supervised = supervise(PROBED)
    supervised.lose_generate()
    assert supervised.lines[0].startswith("process_lost level=error model=generate kind=died")


def test_a_model_that_is_killed_while_it_holds_locks_costs_the_server_nothing(
    supervise: Callable[..., Target],
) -> None:
    supervised = supervise(UNPROBED)
    pid = supervised.server.pid
    assert supervised.ask("generate", "die").status_code != 200, "the server goes on and says so"
    supervised.wait_events("model_back")
    assert supervised.ask("generate").status_code == 200
    assert (supervised.server.pid, supervised.supervisor.num_restarts) == (pid, 0)


@long
def test_calls_that_a_lost_model_leaves_open_end_with_the_server(
    supervise: Callable[..., Target], clock: Clock
) -> None:
    supervised = supervise(dataclasses.replace(UNPROBED, orphaned_calls_s=600))
    errors: list[Exception] = []

    def call() -> None:
        try:
            supervised.ask("generate", "hold")
        except httpx.HTTPError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    supervised.wait_taken("hold")
    assert supervised.ask("generate").status_code == 200, "so it has returned from the other one"
    supervised.lose_generate()
    supervised.lose_generate()  # this one leaves no call open, which must not hide the first's
    assert events(supervised.lines, "server_restarting") == []
    clock.set_forward(601)
    supervised.wait_serving()
    caller.join(ALLOWED_S)
    assert [type(error) for error in errors] == [httpx.RemoteProtocolError]
    assert events(supervised.lines, "calls_stranded") == [{"model": "generate", "calls": "1"}]
    (restarting,) = events(supervised.lines, "server_restarting")
    assert restarting["reason"] == "calls of the lost generate process can end in no other way"


@long
def test_the_other_of_two_processes_finishes_its_call_and_ends(
    supervise: Callable[..., Target], clock: Clock, repository: Path
) -> None:
    add_pair(repository)
    supervised = supervise(dataclasses.replace(UNPROBED, drain_s=600))
    old = set(supervised.server.pids("pair"))
    codes: list[int] = []

    def call() -> None:
        codes.append(supervised.ask("pair", "slow").status_code)

    callers = [threading.Thread(target=call) for _ in old]
    for caller in callers:
        caller.start()
    supervised.wait_taken("slow", count=2)  # each of the two has one
    os.kill(min(old), signal.SIGKILL)
    supervised.wait_events("model_back")
    (repository / "answer-slow").touch()
    for caller in callers:
        caller.join(ALLOWED_S)
    assert sorted(codes) == [200, 400]
    clock.set_forward(601)
    new = wait_for(
        lambda: set(supervised.server.pids("pair")), lambda pids: len(pids) == 2 and not pids & old
    )
    assert len(new) == 2
    assert not new & old, "Triton ends none of a model that lost a request; the launcher does"
    os.kill(min(new), signal.SIGKILL)  # as many are needed as before: this loss is seen, too
    assert len(supervised.wait_events("model_back", count=2)) == 2
    assert supervised.supervisor.num_restarts == 0


@long
def test_other_losses_are_seen_while_a_model_is_loaded_again(
    supervise: Callable[..., Target], repository: Path
) -> None:
    supervised = supervise(UNPROBED)
    (repository / "load-slowly").touch()
    os.kill(supervised.server.pids("generate")[0], signal.SIGKILL)
    supervised.wait_events("process_lost")
    os.kill(supervised.server.pids("scheduler")[0], signal.SIGKILL)
    restarting = supervised.wait_events("server_restarting")
    (repository / "load-slowly").unlink()
    assert [event["reason"] for event in restarting] == ["the scheduler process died"]
    supervised.wait_serving()
    assert supervised.ask("generate").status_code == 200


@long
def test_a_model_that_cannot_be_loaded_again_costs_the_server(
    supervise: Callable[..., Target], repository: Path
) -> None:
    supervised = supervise(dataclasses.replace(UNPROBED, max_failed_starts=1))
    (repository / "refuse-to-load-again").touch()
    os.kill(supervised.server.pids("generate")[0], signal.SIGKILL)
    supervised.thread.join(ALLOWED_S)
    assert "the stand-in refuses to load again" in str(supervised.error)


def test_a_model_that_an_operator_unloads_or_loads_again_is_no_loss(
    supervise: Callable[..., Target], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = returns_of(monkeypatch, OrphanedCalls, "note")  # of what a loss was found to be
    adopted = returns_of(monkeypatch, Watchdog, "adopt")
    supervised = supervise(dataclasses.replace(UNPROBED, probe_interval_s=600))
    supervised.control("generate", "unload")
    assert wait_for(lambda: judged, bool, ALLOWED_S)
    supervised.control("generate", "load")
    assert (supervised.lines, adopted) == ([], [])
    clock.set_forward(601)  # when it is asked again whether the model is to be served
    assert wait_for(lambda: adopted, bool, ALLOWED_S)
    (pid,) = supervised.server.pids("generate")
    assert supervised.lines == []
    os.kill(pid, signal.SIGKILL)  # the one that is looked after now
    supervised.wait_events("model_back")
    assert supervised.lines[0] == f"process_lost level=error model=generate kind=died pid={pid}"
    assert len(supervised.lines) == 2


def returns_of(patch: pytest.MonkeyPatch, owner: type, method: str) -> list[object]:
    """What all calls of a method returned, from now on."""
    call = getattr(owner, method)
    returned: list[object] = []

    def call_and_note(*args: object) -> object:
        returned.append(call(*args))
        return returned[-1]

    patch.setattr(owner, method, call_and_note)
    return returned
