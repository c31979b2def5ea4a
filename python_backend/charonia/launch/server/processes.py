"""Processes, ports and shared memory of one tritonserver.

Owns starting a process that dies with its parent, killing its whole session, and removing its files
in /dev/shm. Must not know Triton's options or models.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import psutil

from charonia.errors import LaunchError

PR_SET_PDEATHSIG = 1
SHARED_MEMORY = Path("/dev/shm")
_libc = ctypes.CDLL(None, use_errno=True)


def start_leader(
    command: list[str],
    env: dict[str, str],
    cores: Collection[int] | None = None,
    directory: Path | None = None,
    stack_bytes: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of a new session, with stdout and stderr in one pipe.

    If given, it runs only on `cores`, in `directory`, and its threads' stacks may grow to
    `stack_bytes`.

    The kernel kills the process when the calling *thread* ends for any reason. So call this from a
    thread that lives as long as the server should, usually the main thread.
    """
    parent = os.getpid()

    def die_with_parent() -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        if stack_bytes is not None:
            hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
            resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, hard))
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl took effect
            os._exit(1)

    return subprocess.Popen(
        command,
        env=env,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def session_members(leader: int) -> list[psutil.Process]:
    """All processes of the session, including orphans of a killed parent."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getsid(pid) == leader:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
    return members


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal.

    Raises:
        OSError: the process does not exist.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def kill_session(leader: int, timeout: float = 5.0) -> None:
    """SIGKILL all processes of a session until none is left. This also ends stopped processes.

    Raises:
        LaunchError: a process is still there after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while members := session_members(leader):
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in members)
            raise LaunchError(f"processes {pids} do not end")
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(members, timeout=0.5)


def remove_shared_memory(prefix: str) -> None:
    """Remove the files of /dev/shm whose names start with `prefix`."""
    if not prefix:
        raise ValueError("an empty prefix would remove everybody's shared memory")
    for path in SHARED_MEMORY.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def listen(address: str, port: int, what: str) -> socket.socket:
    """Return a listening socket. The caller closes it.

    Raises:
        LaunchError: the port is in use, or the address is not one of this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"{what} port {port} on {address} cannot be used: {error.strerror}"
        ) from None
    return listener


def check_port(address: str, port: int, what: str) -> None:
    """Check that a server could listen there; raises as `listen`."""
    listen(address, port, what).close()


def check_distinct(ports: Mapping[str, int]) -> None:
    """Check that no two servers are to listen on the same port; 0 is none.

    Args:
        ports: by what they are for.

    Raises:
        LaunchError: two are equal.
    """
    of: dict[int, str] = {}
    for what, port in ports.items():
        if port and of.setdefault(port, what) != what:
            raise LaunchError(f"{of[port]} and {what} cannot both have port {port}")


class ReservedPorts:
    """Reserves ports for servers that will listen later. The reservation lasts until `close`.

    Each port has a socket that is bound but does not listen. Linux does not choose such a port for
    a socket that asks for any. A socket that names it and sets SO_REUSEADDR, as servers do, gets
    it.

    Args:
        address: an address of this machine. count: the number of different ports.

    Raises:
        LaunchError: the address is not one of this machine.

    Attributes:
        ports: the port numbers.
    """

    def __init__(self, address: str, count: int) -> None:
        self.ports: list[int] = []
        self._sockets: list[socket.socket] = []
        weakref.finalize(self, _close_all, self._sockets)
        for _ in range(count):
            one = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            self._sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind((address, 0))
            except OSError as error:
                self.close()
                raise LaunchError(f"cannot listen on {address}: {error.strerror}") from None
            self.ports.append(int(one.getsockname()[1]))

    def close(self) -> None:
        """Release the ports."""
        _close_all(self._sockets)


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        one.close()


def find_by_argument(processes: Iterable[psutil.Process], fragment: str) -> list[psutil.Process]:
    """Find those of Triton's processes among these whose command line contains `fragment`."""
    return [process for process, _ in find_arguments(processes, fragment)]


def find_arguments(
    processes: Iterable[psutil.Process], fragment: str
) -> list[tuple[psutil.Process, str]]:
    """Triton's processes among these, each with its first argument that contains `fragment`.

    Each command line is read only once, because a process that ends meanwhile has none.
    """
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            program, *arguments = process.cmdline() or [""]
            argument = next((one for one in arguments if fragment in one), None)
            if Path(program).name.startswith("triton") and argument is not None:
                found.append((process, argument))
    return found


def kill_by_argument(fragment: str) -> None:
    """SIGKILL all of Triton's processes whose command line contains `fragment`."""
    for process in find_by_argument(psutil.process_iter(), fragment):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
