"""What is recorded of a run, and which runs results/ takes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paths import LOADTESTS, ROOT
from record import (
    PACKAGES,
    RESULTS,
    circumstances,
    commit,
    is_in_history,
    output_stem,
    write_record,
)

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs Git")
RECORDS = sorted((LOADTESTS / RESULTS).glob("*.json"))


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=tester", "-c", "user.email=tester@example.com")
    run = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a checkout, with a commit."""
    made = tmp_path / "loadtests"
    (made / RESULTS).mkdir(parents=True)
    (made / "bench.py").write_text("pass\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "Begin")
    return made


def test_a_run_of_a_commit_is_recorded_under_a_name_of_its_own(folder: Path) -> None:
    assert commit(folder) == git(folder, "rev-parse", "HEAD")
    first = output_stem(None, "bench", folder)
    assert first.parent == folder / RESULTS
    first.with_name(f"{first.name}.json").write_text("{}")  # changes nothing that was measured
    assert output_stem(None, "bench", folder).name == f"{first.name}-2"
    assert not (commit(folder) or "").endswith("-dirty")


@pytest.mark.parametrize("name", ["bench.py", "unknown.py", "../engine.py"])
def test_what_no_commit_holds_is_not_recorded_and_said_to_be_dirty(folder: Path, name: str) -> None:
    (folder / name).write_text("changed\n")
    with pytest.raises(SystemExit, match=f"differ from it: .*{Path(name).name}; commit them, or"):
        output_stem(None, "bench", folder)
    assert commit(folder) == git(folder, "rev-parse", "HEAD") + "-dirty"
    assert output_stem(folder / "elsewhere", "bench", folder) == folder / "elsewhere"
    with pytest.raises(SystemExit, match="differ from it"):
        output_stem(folder / RESULTS / "mine", "bench", folder)


@pytest.mark.parametrize("call", ["output_stem(Path('run'), 'bench')", "circumstances('bench.py')"])
@pytest.mark.parametrize("package", [None, *PACKAGES])
def test_code_of_another_checkout_is_not_recorded_as_this_commit(
    package: str | None, call: str, tmp_path: Path
) -> None:
    if package is not None:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    own = [str(ROOT / folder) for folder in PACKAGES.values()]
    run = subprocess.run(
        [sys.executable, "-c", f"from pathlib import Path\nfrom record import *\n{call}"],
        cwd=LOADTESTS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *own])},
        capture_output=True,
        text=True,
    )
    if package is None:
        assert (run.returncode, run.stderr) == (0, "")
    else:
        assert run.returncode == 1
        assert f"{package} is imported from {tmp_path.resolve() / package}, but" in run.stderr
        assert f"commit of {ROOT} would be recorded" in run.stderr
        assert f"set PYTHONPATH={os.pathsep.join(own)}, or" in run.stderr


def test_a_command_is_recorded_without_paths_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traces = ROOT.parent / "shared" / "traces"
    arguments = ["--traces", str(traces), f"--output={traces}", "--rate", "0.5"]
    monkeypatch.setattr("sys.argv", ["bench.py", *arguments])
    command = circumstances("bench.py")["command"]
    expected = "--traces ../shared/traces --output=../shared/traces --rate 0.5"
    assert command == f"python loadtests/bench.py {expected}"


def test_a_record_is_not_written_over(folder: Path) -> None:
    mine = folder / RESULTS / "bench-Qwen2.5-0.5B"
    assert output_stem(mine, "bench", folder) == mine
    mine.with_name(f"{mine.name}.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"results/ has bench-Qwen2\.5-0\.5B\.json already"):
        output_stem(mine, "bench", folder)


def test_a_record_is_written_beside_its_picture_and_its_table(tmp_path: Path) -> None:
    stem = tmp_path / "new" / "bench-Qwen2.5-0.5B"
    found = {"commit": "0123456", "cases": [1.5]}
    assert write_record(stem, found) == f"written: {stem.name}.json"
    assert [path.name for path in stem.parent.iterdir()] == [f"{stem.name}.json"]
    assert json.loads((stem.parent / f"{stem.name}.json").read_text()) == found
    said = write_record(stem, {}, draw=lambda path: path.touch(), table="| a |\n")
    assert said == f"written: {stem.name}.json, {stem.name}.png, {stem.name}.md"
    assert (stem.parent / f"{stem.name}.png").exists()
    assert (stem.parent / f"{stem.name}.md").read_text() == "| a |\n"


def test_without_git_nothing_is_recorded(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    with pytest.raises(SystemExit, match="not known; name another place with --output"):
        output_stem(None, "bench", tmp_path)


def test_a_commit_that_was_rewritten_is_not_in_the_history(folder: Path) -> None:
    before = git(folder, "rev-parse", "HEAD")
    assert is_in_history(before, folder)
    git(folder, "commit", "--quiet", "--amend", "--allow-empty", "--message", "Begin anew")
    assert not is_in_history(before, folder)
    assert not is_in_history("0123456", folder)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_record_names_a_commit_of_the_history_or_says_that_it_is_lost(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    about = record.get("about", record)
    assert "commit" in about
    if about["commit"] is None:
        assert about["commit_lost"]
    elif commit() is None or git(LOADTESTS, "rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("the history is not here")
    else:
        assert is_in_history(about["commit"])
