"""An operator changes how much a running server logs."""

from pathlib import Path

import pytest

from charonia.launch.commands.cli import main
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import infer_grpc, request_inputs, wait_for
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


def test_a_server_that_is_not_there_and_a_level_that_is_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["log-level", "debug", "--runtime-dir", str(tmp_path)]) == 1
    assert "is not the runtime directory of a server" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["log-level", "loud"])
    assert "choose from" in capsys.readouterr().err
