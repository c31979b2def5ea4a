"""Around BLS: processes and messages. The calls need the real server."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from charonia.core.replica.opening import EngineOpening
from charonia.errors import (
    EngineDiedError,
    EngineUnloadedError,
    ServerStoppingError,
    StepFailedError,
)
from charonia.protocol import (
    Hello,
    ShutdownNotice,
    StepFailure,
    StepPlan,
    StepResult,
    decode_request,
    encode,
)
from charonia.serving.messages import executor as bls
from charonia.serving.messages.executor import STEPS_SOCKET, SocketExecutor, _last_notice
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from charonia.sockets.local import is_same_user, listen
from charonia.sockets.server import Server
from charonia.supervision.models import judge
from charonia.supervision.models.probes import Readiness, clean
from charonia.supervision.models.repairs import kill_processes
from charonia.supervision.process_table import start_time
from support.model_control import FakeControl
from support.sockets import INFO
from support.waiting import WAIT_S, eventually

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_process_is_killed_and_waited_for() -> None:
    process = subprocess.Popen(SLEEP)
    started = start_time(process.pid)
    assert started is not None
    kill_processes({process.pid: started})
    assert start_time(process.pid) is None  # a zombie has ended, too
    assert process.wait() == -9


def test_a_pid_that_belongs_to_another_process_is_left_alone() -> None:
    process = subprocess.Popen(SLEEP)
    started = start_time(process.pid)
    assert started is not None
    kill_processes({process.pid: started - 1, 2**22 + 1: 5})
    assert process.poll() is None
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("message", "cleaned"),
    [
        ("Stub process 'engine_0_0' is not healthy.", "Stub process 'engine_0_0' is not healthy."),
        ("no weights\n\nAt:\n  /srv/x/model.py(24): initialize\n", "no weights"),
        ("boom\nTraceback (most recent call last):\n  File", "boom"),
        ("cannot read /srv/models/a-b/1/model.json: denied", "cannot read …: denied"),
        ("3/4 of the blocks, 1.5 / 2 GiB", "3/4 of the blocks, 1.5 / 2 GiB"),
    ],
)
def test_a_message_has_no_traceback_and_no_path(message: str, cleaned: str) -> None:
    assert clean(message) == cleaned


@pytest.mark.parametrize(
    ("messages", "is_unloaded"),
    [
        ([ShutdownNotice()], True),
        ([StepResult(epoch=1, step_id=0, rows=[], seconds=0.1), ShutdownNotice()], True),
        ([StepFailure("x")], False),
        ([], False),
    ],
)
def test_an_engine_that_takes_nothing_any_more_may_have_given_notice(
    messages: list[Any], is_unloaded: bool
) -> None:
    near, far = socket.socketpair()
    engine, channel = Channel(far), Channel(near)
    for message in messages:
        engine.send(encode(message))
    engine.close()
    assert (_last_notice(channel) is not None) == is_unloaded
    channel.close()


RESULT = StepResult(epoch=1, step_id=0, rows=[], seconds=0.1)
LONG_PLAN = StepPlan(epoch=1, step_id=0, reset=True, leaves=list(range(10**6, 2 * 10**6)))


class SlowEngine:
    """The engine's end: answers hellos at once, and reads plans when `reads` is set."""

    def __init__(self, directory: Path) -> None:
        self.reads = threading.Event()
        self.plans: list[StepPlan] = []
        self.server = Server(listen(directory / STEPS_SOCKET), is_same_user, self._serve, log=print)
        self.server.start()

    def _serve(self, connection: Connection) -> None:
        for message in connection.messages():
            request = decode_request(message)
            if isinstance(request, Hello):
                is_for_steps = len(self.server._served) == 1  # the first connection
                connection.send(encode(INFO))
                if is_for_steps:
                    self.reads.wait(WAIT_S)
            else:
                self.plans.append(request)
                connection.send(encode(RESULT))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SlowEngine]:
    engine = SlowEngine(tmp_path)
    yield engine
    engine.reads.set()
    engine.server.close()


class Triton:
    """Says the same to each question by BLS: here, that it is not ready.

    Attributes:
        num_asked: how often it was asked. has_requests: whether it waits for requests of who asks.
    """

    class TritonModelException(Exception):
        pass

    def __init__(self) -> None:
        self.says = "Server not ready"
        self.num_asked = 0
        self.has_requests = False

    def InferenceRequest(self, **values: object) -> Any:
        self.num_asked += 1
        raise self.TritonModelException(self.says)


def opened(executor: SocketExecutor) -> EngineOpening:
    """The engine was looked for, and there or not."""
    is_done = threading.Event()
    opening = executor.open(replace=False, on_done=is_done.set)
    assert is_done.wait(WAIT_S)
    return opening


@pytest.fixture
def triton() -> Triton:
    return Triton()


@pytest.fixture
def executor(tmp_path: Path, triton: Triton, engine: SlowEngine) -> Iterator[SocketExecutor]:
    executor = SocketExecutor(
        Readiness(triton, "engine"),
        tmp_path,
        FakeControl(),
        has_requests=lambda: triton.has_requests,
        log=lambda line: None,
    )
    assert opened(executor).result() == INFO
    yield executor
    engine.reads.set()
    executor.close()


def test_a_plan_waits_for_no_engine_that_does_not_read_and_reaches_it_later(
    executor: SocketExecutor, engine: SlowEngine
) -> None:
    pending = executor.submit(LONG_PLAN)  # longer than what a socket holds
    for _ in range(3):
        with pytest.raises(TimeoutError):
            pending.result(0.01)
    engine.reads.set()
    assert pending.result(WAIT_S) == RESULT
    assert engine.plans == [LONG_PLAN]


def test_an_engine_that_goes_amid_a_plan_is_lost_or_unloaded_as_it_says(
    executor: SocketExecutor, engine: SlowEngine
) -> None:
    pending = executor.submit(LONG_PLAN)
    connection = next(iter(engine.server._served))
    connection.send(encode(ShutdownNotice()))
    connection.hang_up()
    with pytest.raises(EngineUnloadedError):
        pending.result(WAIT_S)
    with pytest.raises(EngineDiedError, match="hung up") as raised:
        executor.submit(LONG_PLAN).result(WAIT_S)
    assert type(raised.value) is EngineDiedError


def test_a_plan_that_is_too_long_fails_alone(
    executor: SocketExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert executor._channel is not None
    monkeypatch.setattr(executor._channel, "max_bytes", 1000)
    with pytest.raises(StepFailedError, match="too long; the most is 1000"):
        executor.submit(LONG_PLAN).result(WAIT_S)


def test_a_server_that_refuses_calls_is_shutting_down_once_it_has_had_requests(
    executor: SocketExecutor, engine: SlowEngine, triton: Triton
) -> None:
    """Also where it took no call before it was stopped: its first requests show that it served."""
    engine.reads.set()
    triton.has_requests = True
    eventually(lambda: triton.num_asked >= 2)
    executor.check()
    assert executor.submit(StepPlan(epoch=1, step_id=0, reset=True)).result(WAIT_S) == RESULT
    assert executor._server._thread is not None
    executor._server._thread.join(WAIT_S)
    with pytest.raises(ServerStoppingError):
        executor.check()


def test_what_a_proxy_was_told_ends_steps(executor: SocketExecutor, triton: Triton) -> None:
    pending = executor.submit(LONG_PLAN)
    executor.note_server_stopping()
    with pytest.raises(ServerStoppingError):
        pending.result(0.0)
    assert triton.num_asked == 0


@pytest.fixture
def quiet_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor's watch of the server asks nothing as long as a test runs."""
    monkeypatch.setattr(judge, "_ASK_SERVER_EVERY_S", 3600.0)


@pytest.mark.usefixtures("quiet_watch")
def test_an_idle_scheduler_does_not_ask_triton_at_once_when_its_engine_goes(
    executor: SocketExecutor, engine: SlowEngine, triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton may be finalizing both of them, and answers no question of a model that it ends."""
    triton.says = "Model 'engine' is not ready"
    connection = next(iter(engine.server._served))
    connection.send(encode(ShutdownNotice()))
    engine.reads.set()
    engine.server.close()
    with pytest.raises(EngineUnloadedError):
        executor.check()
    for _ in range(3):
        with pytest.raises(EngineUnloadedError):
            opened(executor).result()
    assert triton.num_asked == 0
    triton.has_requests = True  # Triton finalizes none with requests
    triton.says = "no such model"
    for num_asked in (1, 2):
        with pytest.raises(EngineDiedError, match="no such model"):
            opened(executor).result()
        assert triton.num_asked == num_asked
    triton.has_requests = False
    monkeypatch.setattr(bls, "_VERDICT_S", 0.0)
    with pytest.raises(EngineDiedError, match="no such model"):
        opened(executor).result()
    assert triton.num_asked == 3
