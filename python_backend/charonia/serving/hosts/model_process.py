"""The start of every model's process.

Owns the log of the process, the closing of connections that it inherits from tritonserver, and its
end, and that of tritonserver's other processes, after tritonserver's. Must not know models.
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
from pathlib import Path

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
    """End this process, and others of its tritonserver, soon after a tritonserver that was killed.

    Triton's stub (2.51.0) notices the end, and then waits for each thread that sends something. One
    that waits for tritonserver to read a metric waits for ever. So does a stub that has just been
    started. One that waits for a lock which tritonserver had may hold the interpreter's lock, so
    that no thread of its process can end it. Another process of that tritonserver does, then.

    Args:
        server: the parent, which is another process if tritonserver has ended already.
    """
    try:
        end = os.pidfd_open(server)
    except ProcessLookupError:
        _end_others()
        os._exit(1)
    except OSError:  # Linux is older than 5.3
        return
    if _has_adopted(server):
        _end_others()
        os._exit(1)

    def follow() -> None:
        select.select([end], [], [])
        _end_others()
        time.sleep(OUTLIVES_S)
        os._exit(1)

    threading.Thread(target=follow, name="charonia-end", daemon=True).start()


def _has_adopted(parent: int) -> bool:
    """Return whether a parent got this process from a tritonserver that has ended.

    A process has the session of the tritonserver that started it. `charonia serve` gives each
    tritonserver a session of its own, so whoever adopts its processes has another one.
    """
    try:
        return os.getsid(parent) != os.getsid(0)
    except ProcessLookupError:
        return True


def _end_others() -> None:
    """Start a process that kills this group in `OUTLIVES_S`, if only tritonserver's are in it.

    This process may end sooner. The new one belongs to the group, whose number cannot be
    another group's by then.
    """
    # Triton's stub has the pid of tritonserver among its arguments.
    arguments = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    if str(os.getpgrp()).encode() not in arguments:
        return
    command = ["sh", "-c", f"sleep {OUTLIVES_S:g}; kill -s KILL 0"]
    with contextlib.suppress(OSError):  # it cannot be started: each ends alone
        os.posix_spawn("/bin/sh", command, os.environ)


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
