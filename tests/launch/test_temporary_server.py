"""A temporary server's start, with stand-ins for the server and its probe."""

import sys
from typing import Any
from unittest.mock import Mock

import pytest

from charonia.errors import CrashError
from charonia.launch.server import run


def test_a_server_is_started_once_more_also_where_that_cannot_be_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wait(server: Any, probe: Any, timeout: float) -> None:
        if server.start.call_count == 1:
            raise CrashError("it crashed")

    monkeypatch.setattr(run, "wait_serving", wait)
    monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=BrokenPipeError)))
    server = Mock()
    run._start(server, Mock(), 1.0)
    assert [name for name, *_ in server.method_calls] == ["start", "kill", "start"]
