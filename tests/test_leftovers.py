"""What a killed run of the tests left behind is removed by the next one, and nothing else."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from charonia.launch.server.processes import SHARED_MEMORY
from charonia.launch.server.runtime_dir import OWNER_FILE
from support.leftovers import PREFIX, temporary_directory


def dead_pid() -> int:
    """Of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_next_run_removes_what_a_killed_one_left_also_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = dead_pid()
    server = tmp_path / f"{PREFIX}{dead}-abcdefgh" / f"charonia-of-{dead}"
    server.mkdir(parents=True)
    (server / OWNER_FILE).write_text(json.dumps({"pid": dead, "created": 0.0}))
    shared = SHARED_MEMORY / f"{server.name}_1"
    shared.touch()
    names = [f"{os.getpid()}-abcdefgh", "kernels", "20240101-results", "99999999999999999999-a"]
    kept = [tmp_path / "c", *(tmp_path / f"{PREFIX}{name}" for name in names)]
    for path in kept:
        path.mkdir()
    with temporary_directory(os.getpid()) as directory:
        assert sorted(tmp_path.iterdir()) == sorted([*kept, Path(directory)])
    assert not shared.exists()
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_server_that_outlived_its_test_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = tmp_path / f"{PREFIX}{dead_pid()}-abcdefgh" / "charonia-abcdefgh"
    server.mkdir(parents=True)
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    created = psutil.Process(launcher.pid).create_time()
    (server / OWNER_FILE).write_text(json.dumps({"pid": launcher.pid, "created": created}))
    with temporary_directory(os.getpid()):
        assert not psutil.pid_exists(launcher.pid)
        assert not server.exists()
    launcher.wait()
