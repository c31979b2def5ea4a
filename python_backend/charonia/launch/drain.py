"""Draining: a server takes no more requests, finishes those that it has within a limit, and ends.

Owns asking the scheduler for it, how long that is waited for, and `charonia drain`. Must not know
how a scheduler refuses requests, nor how a server is stopped.

    SIGTERM, `charonia drain`        limit, nothing left, or another signal
      serves ──► refuses, finishes ──────────────────────────────────────► stops
"""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

import msgspec
import psutil

from charonia.launch import processes
from charonia.launch.errors import LaunchError
from charonia.launch.reload import find_run
from charonia.launch.runtime_dir import REPOSITORY, owner_of
from charonia.serving.reload import RELOAD_SOCKET, DrainOrder, DrainState
from charonia.sockets.local import connect

POLL_S = 0.1
ANSWER_TIMEOUT_S = 5.0


def finish_requests(
    socket: Path,
    limit_s: float,
    stop: threading.Event,
    show: Callable[[int], None] = lambda num_left: None,
) -> int:
    """Have the scheduler take no more requests, and wait until it has none.

    Args:
        socket: the scheduler's. limit_s: how long to wait at most.
        stop: waits no longer once it is set.
        show: called with the number of requests that are left, whenever that has changed.

    Returns:
        How many are left. Those of a scheduler that does not answer are none that could finish.
    """
    until = time.monotonic() + limit_s
    shown: int | None = None
    try:
        with contextlib.closing(connect(socket)) as channel:
            while True:
                channel.send(msgspec.msgpack.encode(DrainOrder()), ANSWER_TIMEOUT_S)
                reply = channel.receive(ANSWER_TIMEOUT_S)
                if reply is None:
                    return 0
                num_left = msgspec.msgpack.decode(reply, type=DrainState).num_live
                if num_left != shown:
                    shown = num_left
                    show(num_left)
                if not num_left or time.monotonic() >= until or stop.wait(POLL_S):
                    return num_left
    except (OSError, ValueError):
        return 0


def drain(runtime_dir: Path | None, url: str | None) -> None:
    """Have a running `charonia serve` finish its requests and end, and wait until it has.

    Args:
        runtime_dir, url: of the server, as for `reload`.

    Raises:
        LaunchError: there is no such server, or it belongs to no process.
    """
    run = find_run(runtime_dir, url)
    owner = owner_of(run)
    if owner is None:
        raise LaunchError(f"the server of {run} runs no more")
    with contextlib.suppress(psutil.NoSuchProcess):
        owner.send_signal(signal.SIGTERM)
    for socket in (run / REPOSITORY).glob(f"*/*/{RELOAD_SOCKET}"):
        finish_requests(socket, inf, threading.Event(), show_left)
    while processes.status(owner.pid) not in (None, psutil.STATUS_ZOMBIE):
        time.sleep(POLL_S)
    print("drained; the server has ended")


def show_left(num_left: int) -> None:
    """Say how many requests are left."""
    requests = "request is" if num_left == 1 else "requests are"
    print(f"charonia: draining: {num_left} {requests} left", file=sys.stderr, flush=True)
