"""What a killed run of the tests left behind is removed by the next one, and nothing else."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from charonia.launch.processes import SHARED_MEMORY
from charonia.launch.runtime_dir import OWNER_FILE
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
    server = tmp_path / f"{PREFIX}{dead}-a" / f"charonia-of-{dead}"
    server.mkdir(parents=True)
    (server / OWNER_FILE).write_text(json.dumps({"pid": dead, "created": 0.0}))
    shared = SHARED_MEMORY / f"{server.name}_1"
    shared.touch()
    kept = [tmp_path / f"{PREFIX}{os.getpid()}-b", tmp_path / f"{PREFIX}kernels", tmp_path / "c"]
    for path in kept:
        path.mkdir()
    with temporary_directory(os.getpid()) as directory:
        assert sorted(tmp_path.iterdir()) == sorted([*kept, Path(directory)])
    assert not shared.exists()
    assert sorted(tmp_path.iterdir()) == sorted(kept)
