"""What gRPC says of a model, on the real tritonserver, and what the watch makes of it."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from charonia.launch.background import in_background
from charonia.launch.model_control import ModelControl
from charonia.launch.patience import SupervisionLimits
from charonia.launch.server import TritonServer
from support.e2e import wait_for
from support.stand_ins import control_over_http
from support.supervised import Supervised


def test_whether_a_model_is_loaded_is_unknown_only_when_tritonserver_does_not_answer(
    make_server: Callable[..., TritonServer], repository: Path
) -> None:
    with make_server() as server:
        control = ModelControl(server, threading.Event())
        assert control.is_loaded("engine") is True
        control_over_http(server, "engine", "unload").raise_for_status()
        assert control.is_loaded("engine") is False
        (repository / "load-slowly").touch()
        loading = in_background(lambda: control_over_http(server, "engine", "load"))
        wait_for(lambda: server.pids("engine"), bool)
        assert control.is_loaded("engine") is False
        (repository / "load-slowly").unlink()
        loading.result(timeout=60).raise_for_status()
        assert control.is_loaded("engine") is True
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        assert control.is_loaded("engine") is None


def test_a_server_that_answers_nobody_over_http_is_restarted_though_grpc_answers(
    make_server: Callable[..., TritonServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_silent = threading.Event()
    send = httpx.Client.send

    def send_unless_silent(
        client: httpx.Client, request: httpx.Request, **options: object
    ) -> httpx.Response:
        if is_silent.is_set():
            raise httpx.ReadTimeout("no answer")
        return send(client, request, **options)

    monkeypatch.setattr(httpx.Client, "send", send_unless_silent)
    limits = SupervisionLimits(probe_interval_s=0.5, probe_timeout_s=1.0, hang_s=2.0)
    with Supervised(make_server(), limits) as supervised:
        supervised.wait_serving(60)
        is_silent.set()
        wait_for(lambda: supervised.lines, bool)
        is_silent.clear()
        supervised.wait_serving(60)
    assert "the scheduler has not answered for" in supervised.lines[0]
