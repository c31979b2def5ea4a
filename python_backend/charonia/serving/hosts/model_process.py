"""The start of every model's process.

Owns the log of the process, and the closing of connections that it inherits from tritonserver. Must
not know models.
"""

import contextlib
import faulthandler
import locale
import os
import signal
import socket
import stat
import sys

from charonia.events import Log, level_of
from charonia.log_level import LevelFile

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a process write the stack of each thread to the log."""


def start(model_name: str) -> Log:
    """Set up the process; to be called first.

    Returns:
        What writes lines to tritonserver's log, with the model's name in front, if the run's
        present level shows them. Lines that cannot be written, because of a full disk say, are
        lost: whoever writes one must not fail with it.
    """
    # The stub's interpreter decodes files as ASCII otherwise, also inside libraries.
    locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    close_inherited_connections()
    faulthandler.register(STACKS_SIGNAL)

    def write(line: str) -> None:
        with contextlib.suppress(OSError):
            # In one piece: all models and tritonserver write to the same pipe.
            sys.stderr.write(headed(model_name, line))
            sys.stderr.flush()

    return Log(write, LevelFile.of_environment().read)


def headed(model_name: str, text: str) -> str:
    """A text for the log: each of its lines with the model's name and the level of the first."""
    level = level_of(text)
    first, *others = text.splitlines() or [""]
    head = f"[{model_name}] "
    further = head if level == "info" else f"{head}{level}: "
    return "".join([f"{head}{first}\n", *(f"{further}{line}\n" for line in others)])


def close_inherited_connections() -> None:
    """Close the clients' connections that tritonserver (2.51.0) gives to each process it starts.

    A connection ends only when no process has it open. Without this, a client would wait for the
    end of its connection as long as this process lives.
    """
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
        except OSError:  # the descriptor that listed the directory
            continue
        connection = socket.socket(fileno=descriptor)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.close()
        else:
            connection.detach()
