"""How one scheduler takes the place of another; two of them on one engine are tested end to end."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from charonia.serving.messages.handover import Handover
from charonia.sockets.local import connect
from support.waiting import WAIT_S


class Scheduler:
    """Remembers whether it had to end; it takes until `may_end` is set."""

    def __init__(self, path: Path) -> None:
        self.has_ended = False
        self.may_end = threading.Event()
        self.may_end.set()
        self.handover = Handover(path, self._end, log=print)

    def _end(self) -> None:
        self.may_end.wait(WAIT_S)
        self.has_ended = True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "handover.socket"


@pytest.fixture
def older(path: Path) -> Iterator[Scheduler]:
    scheduler = Scheduler(path)
    yield scheduler
    scheduler.handover.close()


@pytest.fixture
def younger(path: Path, older: Scheduler) -> Iterator[Scheduler]:
    scheduler = Scheduler(path)
    yield scheduler
    scheduler.handover.close()


def test_the_first_one_has_nobody_to_wait_for(older: Scheduler) -> None:
    assert not older.handover.has_older
    assert older.handover.take_over(0.0)


def test_an_older_one_ends_when_the_younger_takes_over_and_no_sooner(
    older: Scheduler, younger: Scheduler
) -> None:
    assert not older.has_ended
    assert younger.handover.has_older
    assert younger.handover.take_over(WAIT_S)
    assert older.has_ended
    assert not younger.has_ended


def test_the_younger_one_waits_until_the_older_has_ended(
    older: Scheduler, younger: Scheduler
) -> None:
    older.may_end.clear()
    timer = threading.Timer(0.2, older.may_end.set)
    timer.start()
    assert younger.handover.take_over(WAIT_S)
    assert older.has_ended
    timer.join()


def test_an_older_one_that_hangs_is_not_waited_for_without_end(
    older: Scheduler, younger: Scheduler
) -> None:
    older.may_end.clear()
    assert not younger.handover.take_over(0.1)
    older.may_end.set()


def test_an_older_one_that_has_gone_is_no_obstacle(older: Scheduler, younger: Scheduler) -> None:
    older.handover.close()
    assert younger.handover.take_over(WAIT_S)
    assert not older.has_ended


def test_the_third_one_asks_the_second_alone(
    path: Path, older: Scheduler, younger: Scheduler
) -> None:
    youngest = Scheduler(path)
    assert youngest.handover.take_over(WAIT_S)
    assert (older.has_ended, younger.has_ended) == (False, True)
    youngest.handover.close()


@pytest.mark.parametrize("message", [b"", b"\0", b"charonia: step downs", b"charonia: step dow"])
def test_another_message_ends_nobody(path: Path, older: Scheduler, message: bytes) -> None:
    with contextlib.closing(connect(path)) as stranger:
        stranger.send(message)
        assert stranger.receive(WAIT_S) is None, "it was not hung up on"
    assert not older.has_ended


def test_a_socket_of_a_process_that_has_ended_is_replaced(path: Path) -> None:
    path.touch()
    scheduler = Scheduler(path)
    assert scheduler.handover.take_over(WAIT_S)
    scheduler.handover.close()
