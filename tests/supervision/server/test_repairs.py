"""What is done about lost models, with processes of our own in the place of Triton's."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from charonia.supervision.server.judge import Loss, SupervisionLimits, Watchdog
from charonia.supervision.server.model_control import ModelControl
from charonia.supervision.server.protocols import RunningServer
from charonia.supervision.server.repairs import OrphanedCalls, Repairs
from support.e2e import wait_for
from support.events import events

LIMITS = SupervisionLimits()
STAND_IN = """
import sys
from charonia.supervision.open_calls import OpenCalls
calls = OpenCalls()
print("ready", flush=True)
for line in sys.stdin:
    calls.note(int(line))
    print("noted", flush=True)
"""


class StandIn:
    """A process that notes as many open calls as it is told to."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-c", STAND_IN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.process = psutil.Process(self._popen.pid)
        assert self._popen.stdout is not None
        assert self._popen.stdout.readline() == "ready\n"

    def note_calls(self, num_calls: int) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        print(num_calls, file=self._popen.stdin, flush=True)
        assert self._popen.stdout.readline() == "noted\n"

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for stream in (self._popen.stdin, self._popen.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Table:
    """The server as the process table shows it, and its model control."""

    pid = None

    def __init__(self, repository: Path, members: list[StandIn]) -> None:
        self.repository = repository
        self.members = members
        self.loaded: list[StandIn] = []
        self.is_served_now = True
        self.may_answer = threading.Event()
        self.may_answer.set()

    def stubs(self) -> dict[str, list[psutil.Process]]:
        return {"pair": [member.process for member in self.members]}

    def metrics(self) -> dict[str, float] | None:
        return None

    def is_served(self, model: str) -> bool:
        assert self.may_answer.wait(30)
        return self.is_served_now

    def reload(self, model: str, *, timeout_s: float) -> list[psutil.Process]:
        self.members = [*self.members, *self.loaded]
        return [member.process for member in self.loaded]


class Scene:
    """Repairs over a `Table`, at a time that the test sets."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.lines: list[str] = []
        self.changed: list[str] = []
        server = cast(RunningServer, table)
        self.watchdog = Watchdog(server, leave=("engine",), stopped_s=2.0)
        self.repairs = Repairs(
            cast(ModelControl, table),
            self.watchdog,
            OrphanedCalls(server, LIMITS.orphaned_calls_s, self.lines.append),
            scheduler="scheduler",
            limits=LIMITS,
            on_change=self.changed.append,
            log=self.lines.append,
        )

    def repair(self, loss: Loss, now: float) -> str | None:
        """See to a loss until nothing is to be done about it; why not, where that is so."""
        self.repairs.begin(loss, now)
        return self.go_on(now)

    def go_on(self, now: float) -> str | None:
        def is_over(reason: str | None) -> bool:
            return reason is not None or not self.repairs.is_seen_to("pair", now + 3600)

        return wait_for(lambda: self.repairs.look(now), is_over)


@pytest.fixture
def start() -> Iterator[Callable[[], StandIn]]:
    """Starts a process of a model; it is ended with the test."""
    with contextlib.ExitStack() as stack:

        def start() -> StandIn:
            stand_in = StandIn()
            stack.callback(stand_in.end)
            return stand_in

        yield start


@pytest.fixture
def scene(tmp_path: Path, start: Callable[[], StandIn]) -> Iterator[Scene]:
    """One model of two processes, watched."""
    (tmp_path / "pair" / "1").mkdir(parents=True)
    (tmp_path / "pair" / "1" / "model.py").touch()
    scene = Scene(Table(tmp_path, [start(), start()]))
    with contextlib.closing(scene.watchdog):
        yield scene


def lost(scene: Scene, now: float = 0.0) -> list[Any]:
    return [loss.pid for loss in scene.watchdog.look(now)]


def test_processes_on_their_way_out_are_no_loss_when_they_have_gone(
    scene: Scene, start: Callable[[], StandIn]
) -> None:
    first, second = scene.table.members
    third, fourth = start(), start()  # somebody loads the model over itself
    scene.table.members = [second, third, fourth]
    first.end()
    assert lost(scene) == [first.process.pid]
    assert scene.watchdog.has_successors("pair")
    scene.repairs.adopt("pair", 0.0)
    scene.table.members = [third, fourth]
    second.end()
    assert lost(scene) == [second.process.pid]
    assert scene.watchdog.has_successors("pair"), "two were needed, and two are there"
    scene.repairs.adopt("pair", 0.0)
    assert lost(scene) == []
    assert scene.changed == ["pair", "pair"]
    third.end()
    assert not scene.watchdog.has_successors("pair")


def test_the_lost_process_alone_is_killed_and_what_was_replaced_counts_no_more(
    scene: Scene, start: Callable[[], StandIn]
) -> None:
    first, second = scene.table.members
    third, fourth = scene.table.loaded = [start(), start()]
    first.end()
    assert scene.repair(Loss("pair", first.process.pid, "died"), 0.0) is None
    assert second.process.is_running()
    assert scene.changed == ["pair"]
    scene.table.members = [second, third]
    fourth.end()
    assert lost(scene) == [fourth.process.pid]
    assert not scene.watchdog.has_successors("pair"), "the second is not one of them any more"
    assert scene.watchdog.lingering(LIMITS.drain_s, LIMITS.drain_s) == []
    second.note_calls(1)
    assert scene.watchdog.lingering(LIMITS.drain_s + 1, LIMITS.drain_s) == []
    second.note_calls(0)
    assert scene.watchdog.lingering(LIMITS.drain_s + 1, LIMITS.drain_s) == [second.process]


def test_calls_that_came_until_a_process_was_killed_are_orphaned(
    scene: Scene, start: Callable[[], StandIn]
) -> None:
    first, second = scene.table.members
    scene.table.loaded = [start(), start()]
    scene.table.may_answer.clear()
    scene.repairs.begin(Loss("pair", None, "hung"), 0.0)
    first.note_calls(2)
    second.note_calls(1)
    scene.table.may_answer.set()
    assert scene.go_on(0.0) is None
    assert events(scene.lines, "calls_stranded") == [{"model": "pair", "calls": "3"}]


def test_a_model_that_is_lost_time_and_again_costs_the_server(
    scene: Scene, start: Callable[[], StandIn]
) -> None:
    scene.table.loaded = [start()]
    loss = Loss("pair", None, "died")
    for now in range(LIMITS.max_reloads):
        assert scene.repair(loss, float(now)) is None
    assert len(events(scene.lines, "model_back")) == LIMITS.max_reloads
    reason = scene.repair(loss, LIMITS.max_reloads)
    assert reason == "the pair process was lost 6 times in a short time"


def test_a_model_that_is_lost_now_and_then_is_brought_back_each_time(
    scene: Scene, start: Callable[[], StandIn]
) -> None:
    scene.table.loaded = [start()]
    for turn in range(2 * LIMITS.max_reloads):
        assert scene.repair(Loss("pair", None, "died"), turn * LIMITS.stable_s) is None


def test_a_model_that_has_no_process_after_it_was_loaded_is_left_alone(scene: Scene) -> None:
    for member in scene.table.members:
        member.end()
    scene.table.members = []
    assert len(lost(scene)) == 2
    assert scene.repair(Loss("pair", None, "died"), 0.0) is None
    assert lost(scene) == []
    assert events(scene.lines, "model_unwatched") == [{"model": "pair"}]


def test_a_model_that_nobody_means_to_be_served_is_asked_for_now_and_then(scene: Scene) -> None:
    first, second = scene.table.members
    scene.table.is_served_now = False
    scene.repairs.begin(Loss("pair", first.process.pid, "died"), 0.0)
    assert scene.go_on(0.0) is None
    assert scene.repairs.is_seen_to("pair", LIMITS.probe_interval_s - 0.1)
    assert not scene.repairs.is_seen_to("pair", LIMITS.probe_interval_s)
    assert scene.lines == []
    assert second.process.is_running()
