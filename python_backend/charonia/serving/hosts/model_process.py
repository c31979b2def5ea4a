"""The start of every model's process.

Owns the log of the process, the closing of connections that it inherits from tritonserver, and its
end after tritonserver's. Must not know models.
"""

import contextlib
import faulthandler
import locale
import os
import select
import signal
import socket
import stat
import sys
import threading
import time

from charonia.events import Log, level_of
from charonia.log_level import LevelFile

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a process write the stack of each thread to the log."""
OUTLIVES_S = 5.0
"""For so long a process may outlive tritonserver, which Triton's own code has it notice."""


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
    end_with(os.getppid())
    faulthandler.register(STACKS_SIGNAL)

    def write(line: str) -> None:
        with contextlib.suppress(OSError):
            # In one piece: all models and tritonserver write to the same pipe.
            sys.stderr.write(headed(model_name, line))
            sys.stderr.flush()

    return Log(write, LevelFile.of_environment().read)


def end_with(server: int) -> None:
    """End this process at most `OUTLIVES_S` after a tritonserver that was killed.

    Triton's stub (2.51.0) notices that, and then waits for each thread that sends something. One
    that waits for tritonserver to read a metric waits for ever.
    """
    try:
        end = os.pidfd_open(server)
    except OSError:  # it has ended already, or Linux is older than 5.3
        return

    def follow() -> None:
        select.select([end], [], [])
        time.sleep(OUTLIVES_S)
        os._exit(1)

    threading.Thread(target=follow, name="charonia-end", daemon=True).start()


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
