"""A server that is shutting down, as who asks it time and again sees it."""

import threading

import pytest

from charonia.errors import EngineDiedError, EngineUnloadedError, ServerStoppingError
from charonia.serving.engine_model import EngineModel
from charonia.serving.server_watch import ServerWatch

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
    return EngineModel(FakeTriton(says), "engine", tmp_path, tmp_path / "loader.socket")


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
    asked.can_be_replaced = True
    with pytest.raises(ServerStoppingError):
        asked.replace({}, lambda: pytest.fail("it was loaded"))


def test_a_watch_says_when_the_server_shuts_down_and_ends_by_itself():
    is_asked, is_stopping = threading.Event(), threading.Event()

    def ask() -> None:
        is_asked.set()
        if is_stopping.is_set():
            raise ServerStoppingError

    watch = ServerWatch(ask)
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
    ServerWatch(lambda: None).close()
