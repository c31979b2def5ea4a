"""What is learned of a drain: from the scheduler, and from the server that ends."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import msgspec
import psutil
import pytest

from charonia.errors import LaunchError
from charonia.launch.commands.drain import LEFT_FILE, drain, finish_requests
from charonia.launch.commands.serve import stop_on_signals
from charonia.launch.server.runtime_dir import OWNER_FILE, REPOSITORY
from charonia.serving.messages.reload import DrainState
from charonia.sockets.channel import Channel
from charonia.sockets.local import listen
from support.waiting import WAIT_S, eventually

Scheduler = Callable[..., tuple[Path, threading.Event]]


@pytest.fixture
def make_scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    """A scheduler's socket that answers one drain, and an event that has it hang up.

    It says these numbers, one at a time, a given time after each question, and then no more.
    """
    hang_up = threading.Event()
    threads = []

    def make(*numbers: int, after_s: float = 0.0) -> tuple[Path, threading.Event]:
        path = tmp_path / "reload.socket"
        listener = listen(path)

        def answer() -> None:
            with listener, contextlib.closing(Channel(listener.accept()[0])) as channel:
                for number in numbers:
                    channel.receive(WAIT_S)
                    time.sleep(after_s)
                    channel.send(msgspec.msgpack.encode(DrainState(number)))
                hang_up.wait(WAIT_S)

        threads.append(threading.Thread(target=answer))
        threads[-1].start()
        return path, hang_up

    yield make
    hang_up.set()
    for thread in threads:
        thread.join()


def test_it_waits_until_no_request_is_left_however_long_an_answer_takes(
    make_scheduler: Scheduler,
) -> None:
    socket, _ = make_scheduler(2, 2, 0, 0, after_s=0.3)
    shown: list[int] = []
    assert finish_requests(socket, inf, threading.Event(), shown.append) == 0
    assert shown == [2, 0]


def test_one_that_was_on_its_way_when_there_was_none_is_waited_for(
    make_scheduler: Scheduler,
) -> None:
    socket, _ = make_scheduler(0, 1, 0, 0)
    shown: list[int] = []
    assert finish_requests(socket, inf, threading.Event(), shown.append) == 0
    assert shown == [0, 1, 0]


def test_of_a_scheduler_that_hangs_up_what_it_had_last_is_left(make_scheduler: Scheduler) -> None:
    socket, hang_up = make_scheduler(3, 2)
    hang_up.set()
    assert finish_requests(socket, inf, threading.Event()) == 2


def test_a_silent_scheduler_is_waited_for_within_the_limit_and_no_longer(
    make_scheduler: Scheduler,
) -> None:
    socket, _ = make_scheduler(3)
    begin = time.monotonic()
    assert finish_requests(socket, 0.5, threading.Event()) == 3
    assert time.monotonic() - begin >= 0.5


def test_of_a_scheduler_that_never_answers_nothing_is_known(make_scheduler: Scheduler) -> None:
    socket, _ = make_scheduler()
    stop = threading.Event()
    stop.set()
    assert finish_requests(socket, inf, stop) is None


def test_where_no_scheduler_listens_no_request_is_left(tmp_path: Path) -> None:
    shown: list[int] = []
    assert finish_requests(tmp_path / "none", inf, threading.Event(), shown.append) == 0
    listen(tmp_path / "killed").close()
    assert finish_requests(tmp_path / "killed", inf, threading.Event(), shown.append) == 0
    assert shown == [0, 0]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The runtime directory of a server that ends on SIGTERM."""
    (tmp_path / REPOSITORY).mkdir()
    (tmp_path / LEFT_FILE).touch()
    with subprocess.Popen(["sleep", "600"]) as process:
        owner = {"pid": process.pid, "created": psutil.Process(process.pid).create_time()}
        (tmp_path / OWNER_FILE).write_text(json.dumps(owner), encoding="utf-8")
        yield tmp_path
        process.kill()


def test_the_command_succeeds_where_the_server_finished_all(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / LEFT_FILE).write_text("2\n0\n")
    drain(run, None)
    assert capsys.readouterr().out == "drained; the server has ended\n"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("3\n2\n", "the server has ended; requests that were not finished: 2"),
        ("", "the server has ended, and has not said whether its requests were finished"),
    ],
)
def test_the_command_fails_where_requests_were_lost_or_may_have_been(
    run: Path, written: str, message: str
) -> None:
    (run / LEFT_FILE).write_text(written)
    with pytest.raises(LaunchError, match=message):
        drain(run, None)


def test_the_command_says_that_the_server_is_another_users(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: psutil.Process, signum: int) -> None:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "send_signal", refuse)
    with pytest.raises(LaunchError, match=r"this user may not end process .* as root"):
        drain(run, None)


def test_the_command_ends_no_server_that_cannot_drain(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / LEFT_FILE).unlink()
    monkeypatch.delattr(psutil.Process, "send_signal")
    with pytest.raises(LaunchError, match="is not of a `charonia serve`, or it has just begun"):
        drain(run, None)


def test_sigterm_drains_however_often_it_comes_and_sigint_ends_at_once() -> None:
    begin_drain = threading.Event()
    with stop_on_signals(begin_drain) as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        eventually(begin_drain.is_set)
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        eventually(stop.is_set)


@pytest.mark.timeout(60)
def test_a_signal_may_come_while_an_event_is_being_set() -> None:
    """The thread that it interrupts holds the event's lock, which nobody can take twice."""
    begin_drain = threading.Event()
    with stop_on_signals(begin_drain) as stop:
        for event, signum in ((begin_drain, signal.SIGTERM), (stop, signal.SIGINT)):
            with event._cond:
                os.kill(os.getpid(), signum)
                time.sleep(0.01)  # its handler runs
            eventually(event.is_set)
