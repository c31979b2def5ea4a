"""The command line of a rank on another machine."""

import os
import socket
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest

from charonia.parallel.handshake import SECRET_VARIABLE
from charonia.parallel.worker import _connect, main
from support.waiting import WAIT_S


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "pssst")


@pytest.mark.parametrize("value", [None, ""], ids=["unset", "empty"])
def test_without_a_secret_it_says_what_to_set(
    value: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(SECRET_VARIABLE, value)
    assert main(["--join", "10.0.0.1:29400"]) == 2
    assert f"set {SECRET_VARIABLE} to the same text as for the engine" in capsys.readouterr().err


@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize(
    "address", ["10.0.0.1", "29400", ":29400", "10.0.0.1:", "10.0.0.1:65536", "a:-1", "a:1.5", ""]
)
def test_an_address_that_is_none_is_refused(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--join", address])
    assert caught.value.code == 2
    assert f"{address!r} is not HOST:PORT" in capsys.readouterr().err


@pytest.mark.usefixtures("secret")
def test_an_address_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--join" in capsys.readouterr().err


def test_the_help_names_the_secret_and_not_what_is_ours_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert not caught.value.code
    text = capsys.readouterr().out
    assert SECRET_VARIABLE in text
    assert "--parent" not in text


def test_a_rank_whose_parent_has_gone_meanwhile_ends_at_once() -> None:
    command = [sys.executable, "-m", "charonia.parallel.worker", "--join", "127.0.0.1:1"]
    env = os.environ | {SECRET_VARIABLE: "pssst", "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([*command, "--parent", "1"], env=env, timeout=WAIT_S).returncode == 1


def test_a_rank_waits_for_its_engine_also_where_it_cannot_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=BrokenPipeError)))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        threading.Timer(0.2, listener.listen).start()
        _connect(*listener.getsockname()).close()
