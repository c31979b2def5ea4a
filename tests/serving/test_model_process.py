"""The log of a model's process."""

import signal
import subprocess
import sys
from pathlib import Path

from support.waiting import WAIT_S

LOGGING = """
import sys
from charonia.serving.hosts.model_process import start
log = start("scheduler")
for _ in range(2):
    log("a line")
print("goes on", flush=True)
"""

ORPHANED = """
import os, time
from charonia.serving.hosts.model_process import start
server = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == server:
    time.sleep(0.01)
start("scheduler")
print("goes on", flush=True)
"""

KILLED = """
import os, subprocess, sys
MODEL = '''
import ctypes, sys, time
from charonia.serving.hosts.model_process import start
start("scheduler")
print("started", flush=True)
if sys.argv[2] == "stuck":
    ctypes.PyDLL(None).pause()  # with the interpreter's lock
time.sleep(1)
'''
models = [
    subprocess.Popen([sys.executable, "-c", MODEL, str(os.getpid()), what], stdout=subprocess.PIPE)
    for what in ("stuck", "free")
]
for model in models:
    model.stdout.readline()
os.kill(os.getpid(), 9)
"""


def test_a_process_goes_on_without_its_lines_if_its_log_cannot_be_written() -> None:
    with Path("/dev/full").open("wb") as full_disk:
        process = subprocess.run(
            [sys.executable, "-c", LOGGING],
            stdout=subprocess.PIPE,
            stderr=full_disk,
            timeout=WAIT_S,
            check=False,
        )
    assert process.stdout == b"goes on\n"


def test_a_process_ends_if_tritonserver_was_killed_while_it_started() -> None:
    process = subprocess.run(
        [sys.executable, "-c", ORPHANED],
        stdout=subprocess.PIPE,
        timeout=WAIT_S,
        check=False,
        start_new_session=True,  # as a tritonserver has
    )
    assert process.stdout == b""


def test_a_process_that_no_thread_of_its_own_can_end_is_ended_after_tritonserver() -> None:
    process = subprocess.run(
        [sys.executable, "-c", KILLED],
        stderr=subprocess.PIPE,  # open until the last process has ended
        timeout=WAIT_S,
        check=False,
        start_new_session=True,
    )
    assert (process.returncode, process.stderr) == (-signal.SIGKILL, b"")
