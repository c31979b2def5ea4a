"""Whether an engine lives is known without waiting for it, and told in the right words."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from charonia.errors import EngineDiedError, EngineHungError, EngineUnloadedError
from charonia.protocol import ShutdownNotice, StepFailure, encode
from charonia.sockets.channel import Channel
from charonia.supervision.models import judge, probes
from charonia.supervision.models.judge import EngineWatch
from charonia.supervision.process_table import process_state, start_time
from support.waiting import WAIT_S, eventually

ANSWER = encode(StepFailure("any"))


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_ASK_ENGINE_EVERY_S", 0.01)
    monkeypatch.setattr(probes, "_LOOK_AFTER_S", 0.05)
    monkeypatch.setattr(probes, "_NUM_LOOKS", 1000)


@pytest.fixture
def impatiently(monkeypatch: pytest.MonkeyPatch, quickly: None) -> None:
    monkeypatch.setattr(probes, "_NUM_LOOKS", 10)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """What the kernel is asked about."""
    one = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield one
    one.kill()
    one.wait()


@pytest.fixture
def pair(process: subprocess.Popen[bytes]) -> Iterator[tuple[EngineWatch, Channel]]:
    """A watch, and the engine's end of its connection."""
    near, far = socket.socketpair()
    watch, engine = EngineWatch(Channel(near), process.pid), Channel(far)
    yield watch, engine
    watch.close()
    engine.close()


def failure(watch: EngineWatch) -> EngineDiedError:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            watch.check()
        except EngineDiedError as error:
            return error
        time.sleep(0.005)
    raise AssertionError("nothing was noticed")


def test_an_engine_that_answers_lives(pair: tuple[EngineWatch, Channel]) -> None:
    watch, engine = pair
    for _ in range(20):
        assert engine.receive(WAIT_S) is not None
        watch.check()
        engine.send(ANSWER)


def kinds() -> list[tuple[Callable[[Channel], None], type[EngineDiedError], str]]:
    return [
        (Channel.close, EngineDiedError, "hung up"),
        (lambda engine: engine.send(encode(ShutdownNotice())), EngineUnloadedError, "unloaded"),
        (lambda engine: engine.send(b"\xc1"), EngineDiedError, "cannot be read"),
    ]


@pytest.mark.parametrize(("does", "kind", "says"), kinds())
def test_what_became_of_an_engine_is_told_apart(
    pair: tuple[EngineWatch, Channel],
    does: Callable[[Channel], None],
    kind: type[EngineDiedError],
    says: str,
) -> None:
    watch, engine = pair
    does(engine)
    with pytest.raises(kind, match=says) as raised:
        raise failure(watch)
    assert type(raised.value) is kind


@pytest.mark.usefixtures("impatiently")
def test_an_engine_that_does_not_answer_hangs(pair: tuple[EngineWatch, Channel]) -> None:
    watch, _ = pair
    with pytest.raises(EngineHungError, match=r"no answer of the engine within 0\.5 s"):
        raise failure(watch)


def test_a_stopped_process_is_told_from_a_slow_one(
    pair: tuple[EngineWatch, Channel], process: subprocess.Popen[bytes]
) -> None:
    watch, _ = pair
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineHungError, match="the engine's process is stopped"):
        raise failure(watch)


def test_an_end_of_the_watch_waits_for_no_engine(pair: tuple[EngineWatch, Channel]) -> None:
    watch, engine = pair
    assert engine.receive(WAIT_S) is not None
    watch.close()
    assert engine.receive(WAIT_S) is None


def test_a_process_that_has_ended_has_no_state_be_it_a_zombie(
    process: subprocess.Popen[bytes],
) -> None:
    assert process_state(process.pid) in ("R", "S", "D")
    assert start_time(process.pid) is not None
    process.kill()
    eventually(lambda: process_state(process.pid) is None)
    assert process.returncode is None
    assert start_time(process.pid) is None
