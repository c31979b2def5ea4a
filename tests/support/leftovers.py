"""Finds what a run of the server left behind."""

from pathlib import Path

import psutil

from charonia.launch.processes import SHARED_MEMORY


def leftovers(runtime_dir: Path) -> list[str]:
    """Whatever of a run is still there: processes, shared memory, its directory."""
    files = [*SHARED_MEMORY.glob(f"{runtime_dir.name}*")]
    command_lines = (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
    processes = [
        " ".join(line) for line in command_lines if str(runtime_dir) in " ".join(line or [])
    ]
    directory = [str(runtime_dir)] if runtime_dir.exists() else []
    return [*map(str, files), *processes, *directory]
