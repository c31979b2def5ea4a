"""tests/run.py: what fails once may pass on a second run, and what may not."""

import subprocess
import sys
from pathlib import Path

import pytest

import run

ONCE = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("case", range({num_cases}))
def test_once(case):
    marker = Path(f"marker-{{case}}")
    is_first = not marker.exists()
    marker.touch()
    assert not is_first, "the first run"
"""
SKIPS = """
from pathlib import Path
import pytest

def test_once():
    if Path("marker").exists():
        pytest.skip("it cannot be run any more")
    Path("marker").touch()
    assert False
"""
LEAKS = """
from pathlib import Path
import pytest

@pytest.fixture(scope="module")
def shared():
    yield
    is_first = not Path("marker").exists()
    Path("marker").touch()
    assert not is_first, "something was left behind"

def test_leaks(shared):
    pass
"""
CRASHES = """
import os

def test_crashes():
    if os.environ.get("PYTEST_XDIST_WORKER"):
        os._exit(1)

def test_fails():
    assert False
"""
ALWAYS = "def test_always():\n    assert False, 'every run'\n"
PASSES = "def test_passes():\n    pass\n"
BROKEN = "import missing\n"


@pytest.mark.parametrize(
    ("folder", "source", "code", "num_runs"),
    [
        ("e2e", ONCE.format(num_cases=run.MAX_SECOND_RUNS), 0, 2),
        ("e2e", ONCE.format(num_cases=run.MAX_SECOND_RUNS + 1), 1, 1),
        ("e2e", ALWAYS, 1, 2),
        ("e2e", "# cut off\n" + ONCE.format(num_cases=2), 1, 1),
        ("control", ONCE.format(num_cases=1), 1, 1),
        ("e2e", BROKEN, 2, 1),
        ("e2e", SKIPS, 1, 2),
        ("e2e", LEAKS, 1, 1),
        ("e2e", CRASHES, 3, 1),
    ],
    ids=[
        "as many as may",
        "one too many",
        "always",
        "cut off",
        "unit",
        "broken",
        "skipped",
        "left behind",
        "a process dies",
    ],
)
def test_only_tests_of_real_servers_are_run_twice_and_only_a_few(
    tmp_path: Path, folder: str, source: str, code: int, num_runs: int
) -> None:
    path = tmp_path / "tests" / folder / "test_some.py"
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")
    (tmp_path / "tests" / "test_others.py").write_text(PASSES, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n", encoding="utf-8")
    options = ["--exitfirst"] if "cut off" in source else []
    if source == CRASHES:
        options = ["-n", "2", "--max-worker-restart", "0", "--dist", "loadfile"]
    command = [sys.executable, run.__file__, *options, "tests"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.count("test session starts") == num_runs
    heading, _, said = done.stdout.partition("passed on the second run:")
    if num_runs == 2 and code == 0:
        assert f"tests/{folder}/test_some.py::test_once[0]" in said
        assert "AssertionError: the first run" in said
        assert "test_others" not in heading.rpartition("test session starts")[2]
    else:
        assert not said
