"""The scheduler's model control, on the real tritonserver, with a model that loads as ordered."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.grpc

from charonia.launch.server.tritonserver import TritonServer
from charonia.server_options import ServerOptions
from charonia.supervision.models import model_control
from charonia.supervision.models.model_control import ControlError, GrpcControl
from charonia.supervision.server.background import in_background
from support.e2e import wait_for
from support.long import long
from support.stand_ins import SLOW_LINE
from support.supervised import ALLOWED_S


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def server(make_server: Callable[..., TritonServer], log: list[str]) -> Iterator[TritonServer]:
    with make_server(on_log=log.append) as server:
        yield server


@pytest.fixture
def control(server: TritonServer) -> Iterator[GrpcControl]:
    assert server.pid is not None
    control = GrpcControl(ServerOptions.of_process(server.pid))
    assert control.refusal is None
    yield control
    control.close()


def is_ready(server: TritonServer, model: str) -> bool:
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        return bool(client.is_model_ready(model, client_timeout=ALLOWED_S))


def test_a_model_is_unloaded_and_loaded(server: TritonServer, control: GrpcControl) -> None:
    (pid,) = server.pids("engine")
    control.unload("engine")
    assert not is_ready(server, "engine")
    control.load("engine")
    assert is_ready(server, "engine")
    pids = wait_for(lambda: server.pids("engine"), lambda pids: pid not in pids)
    assert len(pids) == 1
    assert pid not in pids


def test_where_no_guard_stands_the_header_opens_model_control(
    make_server: Callable[..., TritonServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with make_server() as server:
        assert server.pid is not None
        control = GrpcControl(ServerOptions.of_process(server.pid))
        control.unload("engine")
        assert not is_ready(server, "engine")
        control.load("engine")
        assert is_ready(server, "engine")
        control.close()


@pytest.mark.parametrize("num_failures", [2, pytest.param(12, marks=long)])
def test_a_load_that_fails_is_an_error_and_harms_nobody(
    log: list[str], server: TritonServer, control: GrpcControl, repository: Path, num_failures: int
) -> None:
    with pytest.raises(ControlError, match="no-such-model"):
        control.load("no-such-model")
    for _ in range(num_failures):
        log.clear()
        control.unload("engine")
        wait_for(lambda: server.pids("engine"), lambda pids: not pids)
        (repository / "load-slowly").touch()
        loading = in_background(lambda: control.load("engine"))
        # Killed before that, it may leave tritonserver waiting for ever.
        wait_for(lambda: SLOW_LINE in "".join(log), bool)
        (pid,) = server.pids("engine")
        assert is_ready(server, "scheduler")  # others are answered meanwhile
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ControlError, match=r"^Stub process 'engine_0_0' is not healthy\.$"):
            loading.result(timeout=ALLOWED_S)
        (repository / "load-slowly").unlink()
    control.load("engine")
    assert is_ready(server, "engine")
    assert server.is_running


@long
def test_closing_ends_the_call_under_way_and_takes_no_more(
    server: TritonServer, control: GrpcControl, repository: Path
) -> None:
    control.unload("engine")
    (repository / "load-slowly").touch()
    loading = in_background(lambda: control.load("engine"))
    wait_for(lambda: server.pids("engine"), bool)
    control.close()
    with pytest.raises(ControlError):
        loading.result(timeout=ALLOWED_S)
    with pytest.raises(ControlError, match="closed"):
        control.load("engine")
    (repository / "load-slowly").unlink()


def test_without_its_key_or_a_server_nothing_is_loaded(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = GrpcControl(ServerOptions([f"--grpc-port={server.grpc_port}"]))
    with pytest.raises(ControlError, match="restricted"):
        stranger.unload("engine")
    assert is_ready(server, "engine")
    monkeypatch.setattr(model_control, "CONNECT_S", 0.5)
    server.stop()
    with pytest.raises(ControlError, match="nobody answers"):
        stranger.unload("engine")
    stranger.close()


def test_a_call_waits_for_a_server_that_does_not_listen_yet(
    make_server: Callable[..., TritonServer],
) -> None:
    server = make_server()
    control = GrpcControl(ServerOptions([f"--grpc-port={server.grpc_port}"], server.api_key))
    is_calling = threading.Event()

    def unload() -> None:
        is_calling.set()
        control.unload("engine")

    unloading = in_background(unload)
    assert is_calling.wait(20)
    with server:
        unloading.result(timeout=ALLOWED_S)
        assert not is_ready(server, "engine")
    control.close()
