"""A test that hangs ends at its timeout, and the tests after it are run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import WAIT_S

PROPERTY = """
import threading
import pytest
from hypothesis import given, strategies

@pytest.mark.timeout(1)
@given(strategies.integers())
def test_hangs(number):
    assert threading.Event().wait()
"""
TEARDOWN = """
import threading
import pytest

@pytest.fixture
def never_closed():
    yield
    threading.Event().wait()

@pytest.mark.timeout(1)
def test_hangs(never_closed):
    assert False
"""
END_OF_WITH = """
import contextlib
import threading
import pytest

@pytest.mark.timeout(1)
def test_hangs():
    with contextlib.ExitStack() as stack:
        stack.callback(threading.Event().wait)
        threading.Event().wait()
"""
PASSES = "\ndef test_passes():\n    pass\n"


@pytest.mark.parametrize(
    ("source", "ends"),
    [
        (PROPERTY, "1 failed, 1 passed"),
        (TEARDOWN, "1 failed, 1 passed, 1 error"),
        (END_OF_WITH, "1 failed, 1 passed"),
    ],
    ids=["property", "teardown", "end of with"],
)
def test_a_test_that_hangs_ends_at_its_timeout(tmp_path: Path, source: str, ends: str) -> None:
    (tmp_path / "test_some.py").write_text(source + PASSES, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "support.timeouts"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WAIT_S
    )
    assert ends in done.stdout, done.stdout + done.stderr
    assert "Timeout (>1.0s) from pytest-timeout" in done.stdout
