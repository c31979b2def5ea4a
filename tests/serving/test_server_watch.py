"""A server that is shutting down, as who asks it time and again sees it."""

import threading

import pytest

from charonia.errors import (
    EngineDiedError,
    EngineUnloadedError,
    ServerStartingError,
    ServerStoppingError,
)
from charonia.serving.engine_model import EngineModel
from charonia.serving.server_watch import ServerWatch
from support.model_control import NoControl

MISSING_INPUT = "expected 1 inputs but got 0 inputs, but missing required input(s) ['question']"


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


def model(says: str, tmp_path) -> EngineModel:
    """Of a server that has taken a call before it says this."""
    triton = FakeTriton(MISSING_INPUT)
    model = EngineModel(triton, "engine", tmp_path, NoControl())
    model.check_server()
    triton.says = says
    return model


@pytest.mark.parametrize(
    ("says", "error"),
    [
        (MISSING_INPUT, None),
        ("Failed for execute the inference request. Model 'engine' is not ready.", "unloaded"),
        ("Server not ready", "stopping"),
        ("BLS is only supported during the 'execute' function.", "stopping"),
        ("something else in /srv/models/x", "died"),
    ],
)
def test_what_triton_says_of_the_engines_model_is_understood(says, error, tmp_path):
    errors = {
        "unloaded": EngineUnloadedError,
        "stopping": ServerStoppingError,
        "died": EngineDiedError,
    }
    asked = model(says, tmp_path)
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
    asked = model("Server not ready", tmp_path)
    with pytest.raises(ServerStoppingError):
        asked.replace({}, lambda: pytest.fail("it was loaded"))


def test_a_server_that_has_not_loaded_all_its_models_is_not_shutting_down(tmp_path):
    triton = FakeTriton("Server not ready")
    asked = EngineModel(triton, "engine", tmp_path, NoControl())
    for ask in (
        asked.check_loaded,
        asked.check_server,
        lambda: asked.replace({}, asked.check_server),
    ):
        with pytest.raises(ServerStartingError):
            ask()
    triton.says = MISSING_INPUT
    asked.check_server()
    triton.says = "Server not ready"
    with pytest.raises(ServerStoppingError):
        asked.check_server()


def test_a_watch_goes_on_whatever_a_question_raises_until_the_server_shuts_down():
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
    watch = ServerWatch(ask, log=log.append)
    watch.start()
    assert watch._thread is not None
    watch._thread.join(20)
    with pytest.raises(ServerStoppingError):
        watch.check()
    watch.close()
    assert log == ['server_watch_failed reason="AttributeError: a bug"']


def test_a_watch_says_when_the_server_shuts_down_and_ends_by_itself():
    is_asked, is_stopping = threading.Event(), threading.Event()

    def ask() -> None:
        is_asked.set()
        if is_stopping.is_set():
            raise ServerStoppingError

    watch = ServerWatch(ask, log=print)
    watch.check()
    watch.start()
    watch.start()
    assert is_asked.wait(20)
    watch.check()
    is_stopping.set()
    watch._thread.join(20)
    with pytest.raises(ServerStoppingError):
        watch.check()
    watch.close()


def test_a_watch_that_never_started_can_be_closed():
    ServerWatch(lambda: None, log=print).close()
