"""What is asked of Triton about the engine, and a server that is shutting down."""

import threading
from types import SimpleNamespace
from typing import cast

import pytest

from charonia.errors import (
    EngineDiedError,
    EngineUnloadedError,
    ServerStartingError,
    ServerStoppingError,
)
from charonia.supervision.models import judge
from charonia.supervision.models.judge import ServerWatch
from charonia.supervision.models.model_control import ControlError
from charonia.supervision.models.probes import Readiness
from charonia.supervision.models.repairs import EngineModel, is_loaded_by_scheduler
from support.model_control import FakeControl
from support.sockets import refuse_threads
from support.waiting import WAIT_S

IS_LOADED = "unexpected inference output 'readiness' for model 'engine'"


class FakeTriton:
    """What it says to a request for the engine's model."""

    class TritonModelException(Exception):
        pass

    def __init__(self, says: str) -> None:
        self.says = says

    def InferenceRequest(self, **values: object) -> "FakeTriton":
        return self

    def exec(self) -> None:
        raise self.TritonModelException(self.says)


def readiness(says: str) -> Readiness:
    """Of a server that has taken a call before it says this."""
    triton = FakeTriton(IS_LOADED)
    asked = Readiness(triton, "engine")
    asked.check_server()
    triton.says = says
    return asked


def model(says: str, tmp_path, control: FakeControl) -> EngineModel:
    return EngineModel(readiness(says), tmp_path, control)


@pytest.mark.parametrize(
    ("says", "error"),
    [
        (IS_LOADED, None),
        ("Failed for execute the inference request. Model 'engine' is not ready.", "unloaded"),
        ("Server not ready", "stopping"),
        ("BLS is only supported during the 'execute' function.", "stopping"),
        ("something else in /srv/models/x", "died"),
    ],
)
def test_what_triton_says_of_the_engines_model_is_understood(says, error):
    errors = {
        "unloaded": EngineUnloadedError,
        "stopping": ServerStoppingError,
        "died": EngineDiedError,
    }
    asked = readiness(says)
    if error is None:
        asked.check_loaded()
    else:
        with pytest.raises(errors[error]) as raised:
            asked.check_loaded()
        assert type(raised.value) is errors[error]
        assert "/srv" not in str(raised.value)
    if error == "stopping":
        with pytest.raises(ServerStoppingError):
            asked.check_server()
    else:
        asked.check_server()


def test_an_engine_is_not_loaded_by_a_server_that_is_shutting_down(tmp_path):
    control = FakeControl()
    asked = model("Server not ready", tmp_path, control)
    with pytest.raises(ServerStoppingError):
        asked.replace({}, lambda: pytest.fail("it was loaded"))
    assert control.done == []


def test_an_engine_is_replaced_under_the_mark_of_who_has_it_loaded(tmp_path):
    control = FakeControl()

    def reach() -> str:
        assert is_loaded_by_scheduler(tmp_path)
        control.done.append("reach")
        return "the engine"

    assert model(IS_LOADED, tmp_path, control).replace({}, reach) == "the engine"
    assert control.done == ["unload engine", "load engine", "reach"]
    assert not is_loaded_by_scheduler(tmp_path)


def test_a_lost_engine_is_loaded_again_on_a_full_disk(tmp_path):
    """Its files may not grow, and there may be no further ones."""

    def sizes() -> dict[str, int]:
        return {path.name: path.stat().st_size for path in tmp_path.iterdir()}

    replaced = model(IS_LOADED, tmp_path, FakeControl())
    before = sizes()
    assert replaced.replace({}, sizes) == before
    assert sizes() == before
    replaced.close()
    assert sizes() == {}


def test_an_engine_that_cannot_be_loaded_says_why_without_a_path(tmp_path):
    control = FakeControl(ControlError("no weights in /srv/models/x"))
    with pytest.raises(EngineDiedError, match=r"^no weights in …$"):
        model(IS_LOADED, tmp_path, control).replace({}, lambda: pytest.fail("it is there"))
    assert control.done == ["unload engine", "load engine"]
    assert not is_loaded_by_scheduler(tmp_path)


def test_an_engine_that_is_loaded_and_cannot_be_reached_is_unloaded(tmp_path):
    control = FakeControl()

    def reach() -> None:
        raise EngineDiedError("nobody is there")

    with pytest.raises(EngineDiedError, match="nobody is there"):
        model(IS_LOADED, tmp_path, control).replace({}, reach)
    assert control.done == ["unload engine", "load engine", "unload engine"]


def test_nothing_is_asked_of_a_server_that_loads_nothing(tmp_path):
    control = FakeControl()
    control.refusal = "recovery is off"
    with pytest.raises(EngineDiedError, match="recovery is off"):
        model(IS_LOADED, tmp_path, control).replace({}, lambda: pytest.fail("it is there"))
    assert control.done == []


def test_a_server_that_has_not_loaded_all_its_models_is_not_shutting_down(tmp_path):
    triton = FakeTriton("Server not ready")
    asked = Readiness(triton, "engine")
    replaced = EngineModel(asked, tmp_path, FakeControl())
    for ask in (
        asked.check_loaded,
        asked.check_server,
        lambda: replaced.replace({}, asked.check_server),
    ):
        with pytest.raises(ServerStartingError):
            ask()
    triton.says = IS_LOADED
    asked.check_server()
    triton.says = "Server not ready"
    with pytest.raises(ServerStoppingError):
        asked.check_server()


@pytest.fixture
def watched(monkeypatch):
    """Makes watches that ask often, and closes them."""
    monkeypatch.setattr(judge, "_ASK_SERVER_EVERY_S", 0.01)
    made: list[ServerWatch] = []

    def make(ask, *, has_requests=lambda: True, **options) -> ServerWatch:
        options = {"log": print} | options
        readiness = cast(Readiness, SimpleNamespace(check_server=ask))
        made.append(ServerWatch(readiness, has_requests=has_requests, **options))
        return made[-1]

    yield make
    for watch in made:
        watch.close()


def test_a_watch_goes_on_whatever_a_question_raises_until_the_server_shuts_down(watched):
    errors = [
        ServerStartingError("not yet"),
        AttributeError("a bug"),
        ServerStartingError("not yet"),
        AttributeError("a bug"),
        ServerStoppingError("now"),
    ]

    def ask() -> None:
        raise errors.pop(0)

    log: list[str] = []
    watch = watched(ask, log=log.append)
    watch.start()
    watch._thread.join(WAIT_S)
    with pytest.raises(ServerStoppingError):
        watch.check()
    assert log == ['server_watch_failed level=error reason="AttributeError: a bug"']


def test_a_watch_says_once_when_the_server_shuts_down_and_ends_by_itself(watched):
    is_asked, is_stopping = threading.Event(), threading.Event()
    told: list[str] = []

    def ask() -> None:
        is_asked.set()
        if is_stopping.is_set():
            raise ServerStoppingError

    watch = watched(ask, on_stopping=lambda: told.append("stopping"))
    watch.check()
    watch.start()
    watch.start()
    assert is_asked.wait(WAIT_S)
    watch.check()
    assert told == []
    is_stopping.set()
    watch._thread.join(WAIT_S)
    with pytest.raises(ServerStoppingError):
        watch.check()
    assert told == ["stopping"]


def test_a_server_is_asked_only_by_a_model_with_requests(watched):
    # Triton neither answers nor survives what it is asked while it finalizes who asks.
    has_requests = [False] * 5
    looked, asked = threading.Semaphore(0), threading.Semaphore(0)

    def look() -> bool:
        looked.release()
        return bool(has_requests) and has_requests.pop()

    watch = watched(asked.release, has_requests=look)
    watch.start()
    for _ in range(6):
        assert looked.acquire(timeout=WAIT_S)
    assert not asked.acquire(blocking=False)
    has_requests.append(True)
    assert asked.acquire(timeout=WAIT_S)
    while looked.acquire(blocking=False):
        pass
    for _ in range(3):
        assert looked.acquire(timeout=WAIT_S)
    assert not asked.acquire(blocking=False)


def test_a_watch_need_not_ask_what_another_model_was_told(watched):
    watch = watched(lambda: pytest.fail("it was asked"))
    watch.note_stopping()
    watch.start()
    watch._thread.join(WAIT_S)
    with pytest.raises(ServerStoppingError):
        watch.check()


def test_a_watch_that_never_started_can_be_closed(watched):
    watched(lambda: None)


def test_a_watch_without_a_thread_harms_nobody_and_is_started_by_the_next_request(
    watched, monkeypatch
):
    is_asked = threading.Event()
    without, watch = watched(lambda: None), watched(is_asked.set)
    with monkeypatch.context() as patch:
        refuse_threads(patch, "charonia-server")
        without.start()
        without.close()
        watch.start()
    watch.start()
    assert is_asked.wait(WAIT_S)
