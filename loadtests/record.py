"""What is recorded of every run, and where: date, command, commit, machine; results/DATE-NAME.

Owns the circumstances of a run and the names of its files. Must not know what was measured.
"""

import datetime
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def circumstances(script: str) -> dict[str, Any]:
    """When, how, of what and where `script`, a file of this folder, runs."""
    fields = dict(line.split(":", 1) for line in _output("lscpu").splitlines() if ":" in line)
    names = ("Model name", "CPU(s)", "CPU family", "Model", "L2 cache", "L3 cache")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"loadtests/{script}", *sys.argv[1:]]),
        "commit": _output("git", "describe", "--always", "--dirty") or version("charonia"),
        "machine": {name: fields[name].strip() for name in names if name in fields},
        "python": platform.python_version(),
    }


def new_stem(name: str) -> Path:
    """Path of a run's files but for their endings; a recorded result stays as it is."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    stem, count = HERE / "results" / f"{today}-{name}", 1
    while stem.with_name(f"{stem.name}.json").exists():
        count += 1
        stem = HERE / "results" / f"{today}-{name}-{count}"
    return stem


def positive(text: str) -> int:
    """A whole number above 0, for a command line."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _output(*command: str) -> str:
    run = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    return run.stdout.strip()
