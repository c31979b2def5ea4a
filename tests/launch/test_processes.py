import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from charonia.errors import LaunchError
from charonia.launch.server import processes
from charonia.supervision.process_table import Stops, is_stopped
from support.e2e import wait_for

# A leader whose child is stopped, and orphaned as soon as the leader is gone.
FAMILY = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
os.kill(child.pid, signal.SIGSTOP)
print(child.pid, flush=True)
time.sleep(600)
"""


def start_family() -> tuple[subprocess.Popen[bytes], int]:
    leader = processes.start_leader([sys.executable, "-c", FAMILY], dict(os.environ))
    assert leader.stdout is not None
    with leader.stdout:
        return leader, int(leader.stdout.readline())


def test_killing_a_session_reaches_stopped_orphans() -> None:
    leader, child = start_family()
    leader.kill()
    leader.wait()
    assert [process.pid for process in processes.session_members(leader.pid)] == [child]
    processes.kill_session(leader.pid)
    assert processes.session_members(leader.pid) == []


def test_a_leader_dies_with_the_process_that_started_it() -> None:
    script = (
        "import os, sys, time; from charonia.launch.server.processes import start_leader\n"
        "print(start_leader(['sleep', '600'], dict(os.environ)).pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        leader = int(parent.stdout.readline())
        assert psutil.pid_exists(leader)
        parent.send_signal(signal.SIGKILL)
    assert not wait_for(lambda: psutil.pid_exists(leader), lambda is_there: not is_there)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"gRPC port {port} on 127.0.0.1 .*in use"):
            processes.check_port("127.0.0.1", port, "gRPC")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"192\.0\.2\.1"):
        processes.ReservedPorts("192.0.2.1", 1)


def test_reserved_ports_differ_and_whoever_names_one_can_listen_there() -> None:
    with contextlib.closing(processes.ReservedPorts("127.0.0.1", 3)) as reserved:
        assert len(set(reserved.ports)) == 3
        for port in reserved.ports:
            processes.check_port("127.0.0.1", port, "HTTP")


def test_a_reserved_port_is_given_to_nobody_else() -> None:
    with contextlib.closing(processes.ReservedPorts("127.0.0.1", 1)) as reserved:
        (port,) = reserved.ports
        with socket.socket() as another:
            with pytest.raises(OSError, match="Address already in use"):
                another.bind(("127.0.0.1", port))
            reserved.close()
            another.bind(("127.0.0.1", port))


def test_only_shared_memory_with_the_prefix_is_removed() -> None:
    name = f"charonia-test{os.getpid()}"
    mine, other = (processes.SHARED_MEMORY / f"{name}{end}" for end in ("a_1", "b_1"))
    mine.touch()
    other.touch()
    try:
        processes.remove_shared_memory(f"{name}a_")
        assert (mine.exists(), other.exists()) == (False, True)
    finally:
        other.unlink()


def test_removing_all_shared_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prefix"):
        processes.remove_shared_memory("")


def test_only_tritons_processes_are_found_by_an_argument(tmp_path: Path) -> None:
    stub = tmp_path / "triton_python_backend_stub"
    stub.symlink_to("/bin/sleep")
    argument = f"{os.getpid()}.5"
    sleepers = [subprocess.Popen([program, argument]) for program in (stub, "/bin/sleep")]
    try:
        found = processes.find_by_argument(psutil.process_iter(), argument)
        assert [process.pid for process in found] == [sleepers[0].pid]
        processes.kill_by_argument(argument)
        assert sleepers[0].wait(timeout=60) == -signal.SIGKILL
        assert sleepers[1].poll() is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_a_process_counts_as_stopped_from_when_that_was_first_seen() -> None:
    stops = Stops()
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            assert stops.seconds(sleeper.pid, 1.0) == 0
            sleeper.send_signal(signal.SIGSTOP)
            wait_for(lambda: is_stopped(sleeper.pid), bool)
            assert [stops.seconds(sleeper.pid, now) for now in (2.0, 3.5)] == [0, 1.5]
            sleeper.send_signal(signal.SIGCONT)
            wait_for(lambda: is_stopped(sleeper.pid), lambda is_stopped: not is_stopped)
            assert stops.seconds(sleeper.pid, 4.0) == 0
        finally:
            sleeper.kill()
    assert stops.seconds(sleeper.pid, 5.0) == 0


def test_a_process_says_which_signals_it_catches() -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert processes.catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not processes.catches(os.getpid(), signal.SIGUSR2)
    with pytest.raises(OSError, match="No such file"):
        processes.catches(2**22 + 1, signal.SIGUSR2)
