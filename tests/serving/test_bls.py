"""Around BLS: processes, messages, Triton's command line. The calls need the real server."""

import socket
import subprocess
import sys
from typing import Any

import pytest

from charonia.protocol import Farewell, StepFailure, StepResult, encode
from charonia.serving.bls import _last_words
from charonia.serving.engine_model import clean, has_explicit_control, kill_processes
from charonia.serving.liveness import start_time
from charonia.sockets.channel import Channel

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_process_is_killed_and_waited_for() -> None:
    process = subprocess.Popen(SLEEP)
    started = start_time(process.pid)
    assert started is not None
    kill_processes({process.pid: started})
    assert start_time(process.pid) is None  # a zombie has ended, too
    assert process.wait() == -9


def test_a_pid_that_belongs_to_another_process_is_left_alone() -> None:
    process = subprocess.Popen(SLEEP)
    started = start_time(process.pid)
    assert started is not None
    kill_processes({process.pid: started - 1, 2**22 + 1: 5})
    assert process.poll() is None
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("message", "cleaned"),
    [
        ("Stub process 'engine_0_0' is not healthy.", "Stub process 'engine_0_0' is not healthy."),
        ("no weights\n\nAt:\n  /srv/x/model.py(24): initialize\n", "no weights"),
        ("boom\nTraceback (most recent call last):\n  File", "boom"),
        ("cannot read /srv/models/a-b/1/model.json: denied", "cannot read …: denied"),
        ("3/4 of the blocks, 1.5 / 2 GiB", "3/4 of the blocks, 1.5 / 2 GiB"),
    ],
)
def test_a_message_has_no_traceback_and_no_path(message: str, cleaned: str) -> None:
    assert clean(message) == cleaned


@pytest.mark.parametrize(
    ("command_line", "is_explicit"),
    [
        ([], False),
        (["tritonserver", "--model-repository=/m"], False),
        (["tritonserver", "--model-control-mode=explicit"], True),
        (["tritonserver", "--model-control-mode", "explicit", "--load-model=*"], True),
        (["tritonserver", "--model-control-mode=poll"], False),
        (["tritonserver", "--model-control-mode=none", "--model-control-mode=explicit"], True),
        (["tritonserver", "--model-control-mode"], False),
    ],
)
def test_the_control_mode_is_read_from_the_command_line(
    command_line: list[str], is_explicit: bool
) -> None:
    assert has_explicit_control(command_line) == is_explicit


@pytest.mark.parametrize(
    ("messages", "is_unloaded"),
    [
        ([Farewell()], True),
        ([StepResult(epoch=1, step_id=0, rows=[], seconds=0.1), Farewell()], True),
        ([StepFailure("x")], False),
        ([], False),
    ],
)
def test_an_engine_that_takes_nothing_any_more_may_have_said_farewell(
    messages: list[Any], is_unloaded: bool
) -> None:
    near, far = socket.socketpair()
    engine, channel = Channel(far), Channel(near)
    for message in messages:
        engine.send(encode(message))
    engine.close()
    assert (_last_words(channel) is not None) == is_unloaded
    channel.close()
