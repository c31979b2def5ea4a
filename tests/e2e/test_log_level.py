"""An operator changes how much a running server logs."""

import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.launch.commands.cli import main
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    ENDLESS,
    GrpcStream,
    error_of,
    generate,
    infer_grpc,
    infer_http,
    request_inputs,
    wait_for,
)
from support.events import events

PROMPT = "a text of a client"
LIFE = ("request_received", "request_started", "request_first_token", "request_ended")


def set_level(server: TritonServer, *level: str) -> int:
    return main(["log-level", *level, "--runtime-dir", str(server.runtime_dir)])


def ask(server: TritonServer, request_id: str) -> None:
    inputs = request_inputs(PROMPT, {"max_tokens": 3, "ignore_eos": True, "tenant": "t"})
    infer_grpc(server, inputs, request_id=request_id)


def lines_of(server_log: list[str], request_id: str) -> list[str]:
    return [line for line in list(server_log) if f"request_id={request_id} " in line]


def test_the_level_is_changed_for_all_processes_at_once(
    server: TritonServer, server_log: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert set_level(server) == 0
    assert capsys.readouterr().out == "info\n"
    ask(server, "quiet")
    try:
        assert set_level(server, "debug") == 0
        assert capsys.readouterr().out == "debug\n"
        ask(server, "followed")
        lines = wait_for(lambda: lines_of(server_log, "followed"), lambda found: len(found) == 4)
        for name, line in zip(LIFE, lines, strict=True):
            assert line.startswith(f"[scheduler] {name} level=debug key=")
            assert " request_id=followed tenant=t " in line
        (ended,) = events(lines, "request_ended")
        assert (ended["tokens"], ended["outcome"]) == ("3", "length")
        set_level(server, "info")
        ask(server, "silent")
        set_level(server, "debug")
        ask(server, "last")  # whatever was said before is there by its end
        assert wait_for(lambda: lines_of(server_log, "last")[3:], bool)
    finally:
        set_level(server, "info")
    assert lines_of(server_log, "quiet") == lines_of(server_log, "silent") == []
    assert not any(PROMPT in line for line in server_log)


ASKED = {"max_tokens": 3, "ignore_eos": True, "tenant": "t"}
OURS = request_inputs(PROMPT, ASKED)
FACADES: dict[str, Any] = {
    "text_input": np.array([[PROMPT.encode()]], dtype=object),
    "max_tokens": np.array([[3]], dtype=np.int32),
}


def stream(
    server: TritonServer, model: str, inputs: dict[str, Any], request_id: str, trace: dict[str, str]
) -> None:
    with GrpcStream(server, model, trace) as stream:
        list(stream.send(inputs, request_id=request_id, parameters={"tenant": "t"}))


def infer(server: TritonServer, request_id: str, trace: dict[str, str]) -> None:
    # As most libraries of HTTP write it.
    headers = {name.capitalize(): value for name, value in trace.items()}
    infer_http(server, OURS, request_id=request_id, headers=headers)


def post(server: TritonServer, request_id: str, trace: dict[str, str]) -> None:
    """Triton 2.51.0 forwards no headers of these; a parameter does the same."""
    body = {"text_input": PROMPT, "id": request_id, **ASKED, **trace}
    assert generate(server, body).is_success


WAYS: dict[str, Callable[[TritonServer, str, dict[str, str]], None]] = {
    "scheduler": lambda server, *names: stream(server, "scheduler", OURS, *names),
    "llm": lambda server, *names: stream(server, "llm", OURS, *names),
    "facade": lambda server, *names: stream(server, "ensemble", FACADES, *names),
    "generate over HTTP": infer,
    "HTTP's generate": post,
}


@pytest.mark.parametrize("way", WAYS)
def test_without_traces_a_line_has_the_trace_id_that_a_client_gives(
    server: TritonServer, server_log: list[str], way: str
) -> None:
    trace_id, request_id = secrets.token_hex(16), secrets.token_hex(4)
    set_level(server, "debug")
    try:
        WAYS[way](server, request_id, {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-00"})
        lines = wait_for(lambda: lines_of(server_log, request_id), lambda found: len(found) == 4)
    finally:
        set_level(server, "info")
    for name, line in zip(LIFE, lines, strict=True):
        assert line.startswith(f"[scheduler] {name} level=debug key=")
        assert f" request_id={request_id} tenant=t trace_id={trace_id} " in line


def test_a_request_that_fails_has_a_line_at_any_level(
    server: TritonServer, server_log: list[str]
) -> None:
    asked = {"max_tokens": ENDLESS, "ignore_eos": True, "tenant": "t", "deadline_ms": 300}
    inputs = request_inputs(PROMPT, asked)
    error = error_of(partial(infer_grpc, server, inputs, request_id="late"))
    assert "[charonia:timeout]" in error.message()
    (line,) = wait_for(lambda: lines_of(server_log, "late"), bool)
    assert line.startswith("[scheduler] request_ended key=")
    assert " request_id=late tenant=t outcome=timeout reason=" in line


def test_a_server_that_is_not_there_and_a_level_that_is_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["log-level", "debug", "--runtime-dir", str(tmp_path)]) == 1
    assert "is not the runtime directory of a server" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["log-level", "loud"])
    assert "choose from" in capsys.readouterr().err
