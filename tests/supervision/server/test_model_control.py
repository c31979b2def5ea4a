"""What gRPC says of a model, on the real tritonserver, and what the watch makes of it."""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from charonia.launch.server.tritonserver import TritonServer
from charonia.supervision.server.background import in_background
from charonia.supervision.server.model_control import ModelControl
from support.e2e import wait_for
from support.stand_ins import PROBED, Target, control_over_http
from support.stopping import stop_process
from support.supervised import ALLOWED_S
from support.watching import Clock, Questions


def test_whether_a_model_is_loaded_is_unknown_only_when_tritonserver_does_not_answer(
    make_server: Callable[..., TritonServer], repository: Path, monkeypatch: pytest.MonkeyPatch
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
        loading.result(timeout=ALLOWED_S).raise_for_status()
        assert control.is_loaded("engine") is True
        assert server.pid is not None
        stop_process(server.pid)
        monkeypatch.setattr("charonia.supervision.server.model_control._ANSWER_S", 0.3)
        assert control.is_loaded("engine") is None
        server.kill()  # politely, it would not end


def test_a_server_that_answers_nobody_over_http_is_restarted_though_grpc_answers(
    supervise: Callable[..., Target],
    clock: Clock,
    questions: Questions,
    monkeypatch: pytest.MonkeyPatch,
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
    supervised = supervise(dataclasses.replace(PROBED, hang_s=600))
    is_silent.set()
    questions.wait_asked("scheduler")
    assert supervised.lines == []
    clock.set_forward(601)
    supervised.wait_events("server_restarting")
    is_silent.clear()
    supervised.wait_serving()
    assert "the scheduler has not answered for" in supervised.lines[0]
