"""Which server `charonia reload` means, and what it shows."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from charonia.errors import LaunchError
from charonia.launch.commands import reload
from charonia.launch.commands.reload import find_run
from charonia.launch.server import runtime_dir
from charonia.launch.server.runtime_dir import REPOSITORY, SERVER_FILE, RuntimeDir
from charonia.serving.messages.reload import ReloadState

MakeRun = Callable[[int], Path]


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRun]:
    """Runs of this process, by their port; no other is seen."""
    monkeypatch.setattr(runtime_dir.tempfile, "tempdir", str(tmp_path))
    runs = []

    def make(port: int) -> Path:
        runs.append(RuntimeDir())
        addresses = {"http_url": f"127.0.0.1:{port}", "grpc_url": f"127.0.0.1:{port + 1}"}
        (runs[-1].path / SERVER_FILE).write_text(json.dumps(addresses), encoding="utf-8")
        (runs[-1].path / REPOSITORY).mkdir()
        return runs[-1].path

    yield make
    for run in runs:
        run.close()


def test_the_only_server_needs_no_name(make_run: MakeRun) -> None:
    run = make_run(8000)
    assert find_run(None, None) == run


def test_one_of_several_is_named_by_an_address_or_by_its_directory(make_run: MakeRun) -> None:
    first, second = make_run(8000), make_run(9000)
    assert find_run(None, "127.0.0.1:8001") == first
    assert find_run(None, "127.0.0.1:9000") == second
    assert find_run(None, "localhost:9001") == second
    assert find_run(second, None) == second
    with pytest.raises(LaunchError, match="several servers run") as refusal:
        find_run(None, None)
    assert "127.0.0.1:8000" in str(refusal.value)
    assert "127.0.0.1:9001" in str(refusal.value)


@pytest.mark.parametrize("url", [None, "127.0.0.1:7000", "no-such-host.invalid:8000", "8000"])
def test_where_no_server_is_that_is_said(make_run: MakeRun, url: str | None) -> None:
    if url is not None:
        make_run(8000)
    with pytest.raises(LaunchError, match=f"no server of this user runs here.*{url or ''}"):
        find_run(None, url)


def test_a_directory_that_is_none_of_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="is not the runtime directory of a server"):
        find_run(tmp_path, None)


def test_a_run_whose_launcher_has_gone_is_none(make_run: MakeRun) -> None:
    run = make_run(8000)
    owner = json.loads((run / runtime_dir.OWNER_FILE).read_text("utf-8"))
    (run / runtime_dir.OWNER_FILE).write_text(json.dumps(owner | {"created": 1.0}), "utf-8")
    with pytest.raises(LaunchError, match="no server"):
        find_run(None, None)


def test_a_drain_is_shown_in_few_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draining = [ReloadState("draining", 1, num_live=16 - n, num_held=n) for n in range(16)]
    states = iter([*draining, ReloadState("loading", 1), ReloadState("done", 1)])
    monkeypatch.setattr(reload, "POLL_S", 0.0)
    monkeypatch.setattr(reload, "_ask", lambda channel, question: next(states))
    channel: Any = None
    assert reload._follow(channel, ReloadState("waiting", 1)).phase == "done"
    assert capsys.readouterr().err.splitlines() == [
        "charonia: waiting",
        "charonia: draining: 16 requests are running, 0 wait",
        "charonia: draining: 8 requests are running, 8 wait",
        "charonia: draining: 4 requests are running, 12 wait",
        "charonia: draining: 2 requests are running, 14 wait",
        "charonia: draining: 1 requests are running, 15 wait",
        "charonia: loading",
    ]
