"""The number of a process's open calls, as another one reads it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from charonia.supervision.open_calls import OpenCalls, OpenCallsOf

NOTES = """
import sys
from charonia.supervision.open_calls import OpenCalls
calls = OpenCalls()
for line in sys.stdin:
    calls.note(int(line))
    print(flush=True)
"""


def test_the_number_outlives_its_process() -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", NOTES]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def note(count: int) -> None:
            print(count, file=process.stdin, flush=True)
            process.stdout.readline()

        note(0)
        calls = OpenCallsOf(process.pid)
        assert calls.count == 0
        note(3)
        assert calls.count == 3
        note(2)
        os.kill(process.pid, signal.SIGKILL)
    assert calls.count == 2
    calls.close()


def test_the_number_is_found_among_files_that_are_closed_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = OpenCalls()
    own.note(5)
    closed = iter([True])
    readlink = os.readlink

    def read(link: Path) -> str:
        if next(closed, False):
            raise FileNotFoundError(link)
        return readlink(link)

    monkeypatch.setattr(os, "readlink", read)
    calls = OpenCallsOf(os.getpid())
    assert calls.count == 5
    calls.close()


def test_a_process_that_notes_none_or_has_gone_has_none_open() -> None:
    for pid in (os.getppid(), 2**22 + 1):
        calls = OpenCallsOf(pid)
        assert calls.count == 0
        calls.close()
