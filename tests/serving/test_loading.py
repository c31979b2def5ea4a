"""Orders to load a model, through the socket of the one that carries them out."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from charonia.errors import ConfigError
from charonia.serving import loading
from charonia.serving.loading import LOADER_SOCKET, Loader, LoadError, LoadOrder, order_control
from charonia.sockets.local import connect, listen


class FakeTriton:
    """Notes which process would have been held up: the one whose `pb_utils` this is."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.refusal: str | None = None

    def load_model(self, name: str) -> None:
        self._call("load", name)

    def unload_model(self, name: str) -> None:
        self._call("unload", name)

    def _call(self, action: str, name: str) -> None:
        self.calls.append((action, name))
        if self.refusal is not None:
            raise RuntimeError(self.refusal)


@pytest.fixture
def theirs() -> FakeTriton:
    return FakeTriton()


@pytest.fixture
def path(tmp_path: Path, theirs: FakeTriton) -> Iterator[Path]:
    path = tmp_path / LOADER_SOCKET
    loader = Loader(theirs, path, log=print)
    yield path
    loader.close()


def test_an_order_is_carried_out_by_the_loader(path: Path, theirs: FakeTriton) -> None:
    ours = FakeTriton()
    order_control(ours, path, LoadOrder("engine", "unload"))
    order_control(ours, path, LoadOrder("engine", "load"))
    assert (ours.calls, theirs.calls) == ([], [("unload", "engine"), ("load", "engine")])


def test_what_triton_says_reaches_who_ordered(path: Path, theirs: FakeTriton) -> None:
    theirs.refusal = "no such model"
    with pytest.raises(LoadError, match="no such model"):
        order_control(FakeTriton(), path, LoadOrder("engine", "load"))
    theirs.refusal = None
    order_control(FakeTriton(), path, LoadOrder("engine", "load"))


def test_without_a_loader_the_call_is_made_here(tmp_path: Path) -> None:
    ours = FakeTriton()
    order_control(ours, tmp_path / LOADER_SOCKET, LoadOrder("engine", "load"))
    assert ours.calls == [("load", "engine")]
    ours.refusal = "no such model"
    with pytest.raises(LoadError, match="no such model"):
        order_control(ours, tmp_path / LOADER_SOCKET, LoadOrder("engine", "load"))


def test_a_directory_that_takes_no_socket_is_named_in_plain_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the loader's directory .*, loader.socket: No such"):
        Loader(FakeTriton(), tmp_path / "none" / LOADER_SOCKET, log=print)


@pytest.mark.parametrize("message", [b"", b"\xc1", b"\x92\xa1x\xa4burn", b"\x80"])
def test_what_is_no_order_ends_its_connection_alone(
    path: Path, theirs: FakeTriton, message: bytes
) -> None:
    channel = connect(path)
    channel.send(message)
    assert channel.receive(10) is None
    channel.close()
    order_control(FakeTriton(), path, LoadOrder("engine", "load"))
    assert theirs.calls == [("load", "engine")]


def test_a_loader_that_ends_in_the_middle_leaves_an_error(tmp_path: Path) -> None:
    path = tmp_path / LOADER_SOCKET
    listener = listen(path)

    def take_and_end() -> None:
        accepted, _ = listener.accept()
        accepted.recv(100)
        accepted.close()

    thread = threading.Thread(target=take_and_end)
    thread.start()
    with pytest.raises(LoadError, match="the loader has ended"):
        order_control(FakeTriton(), path, LoadOrder("engine", "load"))
    thread.join()
    listener.close()


LOADER = """
import sys, threading
from pathlib import Path
from charonia.serving.loading import Loader
class Triton:
    load_model = unload_model = staticmethod(lambda name: print(name, flush=True))
loader = Loader(Triton, Path(sys.argv[1]), log=print)
print("ready", flush=True)
threading.Event().wait()
"""


def test_a_loader_that_is_stopped_is_given_up_and_carries_out_no_order_of_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_LOOK_AFTER_S", 0.05)
    path = tmp_path / LOADER_SOCKET
    with subprocess.Popen(
        [sys.executable, "-c", LOADER, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(LoadError, match="the loader's process is stopped"):
                order_control(FakeTriton(), path, LoadOrder("given up", "unload"))
            process.send_signal(signal.SIGCONT)
            order_control(FakeTriton(), path, LoadOrder("engine", "load"))
        finally:
            process.kill()
        assert process.stdout.read() == "engine\n"
