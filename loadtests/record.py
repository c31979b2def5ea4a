"""Records of all runs: date, command, commit, machine; in results/DATE-NAME.

Owns the circumstances of a run, the names and the writing of its files, and that results/ takes
only runs of a commit that others can check out. A run of code from another checkout is refused.
Must not know what was measured.
"""

import datetime
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paths import LOADTESTS, ROOT

RESULTS = "results"
PACKAGES = {"charonia": "python_backend", "charonia_client": "client"}
"""Packages that are measured, and in which folders of a checkout they are."""


def circumstances(script: str) -> dict[str, Any]:
    """Describe the run of `script`, a file of this folder: date, command, commit and machine.

    Raises:
        SystemExit: see `check_code`.
    """
    check_code()
    fields = dict(line.split(":", 1) for line in _output("lscpu").splitlines() if ":" in line)
    names = ("Model name", "CPU(s)", "CPU family", "Model", "L2 cache", "L3 cache")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"loadtests/{script}", *map(_from_here, sys.argv[1:])]),
        "commit": commit(),
        "machine": {name: fields[name].strip() for name in names if name in fields},
        "python": platform.python_version(),
    }


def commit(folder: Path = LOADTESTS) -> str | None:
    """The commit that is checked out, with "-dirty" where files differ; None without Git."""
    found = _output("git", "rev-parse", "HEAD", folder=folder)
    if not found:
        return None
    return f"{found}-dirty" if _changed(folder) else found


def check_code() -> None:
    """Check that what is measured is the code of this checkout, whose commit is recorded.

    An environment may have another checkout installed. Servers and workers that a benchmark starts
    import what it would import itself.

    Raises:
        SystemExit: a package would be imported from elsewhere.
    """
    for package, folder in PACKAGES.items():
        spec = importlib.util.find_spec(package)
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent
        if found is not None and found != (ROOT / folder / package).resolve():
            paths = os.pathsep.join(str(ROOT / one) for one in PACKAGES.values())
            raise SystemExit(
                f"{package} is imported from {found}, but the commit of {ROOT} would be recorded;"
                f" set PYTHONPATH={paths}, or install that checkout with make setup"
            )


def output_stem(asked: Path | None, name: str, folder: Path = LOADTESTS) -> Path:
    """Path of a run's files but for their endings; to be asked for before anything is measured.

    Args:
        asked: what the command line says; taken as it is, whatever is checked out, but within
            `folder`/results.
        name: of the run otherwise, whose files go to `folder`/results. A recorded result stays as
            it is.

    Raises:
        SystemExit: what would be recorded is not what the commit holds; or see `check_code`.
    """
    check_code()
    if asked is not None and asked.resolve().parent != folder / RESULTS:
        return asked
    if commit(folder) is None:
        raise SystemExit(f"{RESULTS}/ takes only runs of a commit, which is not known; {_ELSE}")
    if changed := _changed(folder):
        listed = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
        raise SystemExit(
            f"{RESULTS}/ takes only runs of a commit, and these files differ from it: {listed};"
            f" commit them, or {_ELSE}"
        )
    if asked is not None:
        if _file(asked, "json").exists():
            raise SystemExit(f"{RESULTS}/ has {asked.name}.json already; {_ELSE}")
        return asked
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    stem, count = folder / RESULTS / f"{today}-{name}", 1
    while _file(stem, "json").exists():
        count += 1
        stem = folder / RESULTS / f"{today}-{name}-{count}"
    return stem


_ELSE = "name another place with --output"


def write_record(
    stem: Path,
    found: Mapping[str, Any],
    *,
    draw: Callable[[Path], None] | None = None,
    table: str | None = None,
) -> str:
    """Write what a run found to STEM.json, its picture to STEM.png and its table to STEM.md.

    Args:
        stem: see `output_stem`. found: with the circumstances of the run.
        draw: writes the picture to a path; there is none without it. table: in Markdown, likewise.

    Returns:
        A line that says which files these are.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    names = [_file(stem, "json").name]
    _file(stem, "json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if draw is not None:
        draw(_file(stem, "png"))
        names.append(_file(stem, "png").name)
    if table is not None:
        _file(stem, "md").write_text(table, encoding="utf-8")
        names.append(_file(stem, "md").name)
    return f"written: {', '.join(names)}"


def _file(stem: Path, ending: str) -> Path:
    """A path with this ending; a stem may have dots, which `with_suffix` would cut."""
    return stem.with_name(f"{stem.name}.{ending}")


def is_in_history(found: str, folder: Path = LOADTESTS) -> bool:
    """Return whether the checked out commit descends from this one, so that others have it, too."""
    command = ("git", "merge-base", "--is-ancestor", found, "HEAD")
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0


def _changed(folder: Path) -> list[str]:
    """Files that the commit does not hold as they are, but for results."""
    top = _output("git", "rev-parse", "--show-toplevel", folder=folder)
    results = (folder / RESULTS).relative_to(top)
    lines = _output(
        "git", "status", "--porcelain", "--", ":(top)", f":(top,exclude){results}", folder=folder
    )
    return [line[2:].strip() for line in lines.splitlines()]


def _from_here(argument: str) -> str:
    """An argument with a path of this machine as seen from the project, whose users have others."""
    option, sign, path = argument.rpartition("=")
    return f"{option}{sign}{os.path.relpath(path, ROOT)}" if Path(path).is_absolute() else argument


def _output(*command: str, folder: Path = LOADTESTS) -> str:
    if shutil.which(command[0]) is None:
        return ""
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return run.stdout.rstrip()
