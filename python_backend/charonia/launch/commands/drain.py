"""Draining: a server takes no more requests, finishes those that it has within a limit, and ends.

Owns asking the scheduler for it, how long that is waited for, and `charonia drain`. Must not know
how a scheduler refuses requests, nor how a server is stopped.

    SIGTERM, `charonia drain`        limit, nothing left, or SIGINT
      serves ──► refuses, finishes ──────────────────────────────────► stops

Only the server itself knows what it has finished when it stops: it writes down how many requests
are left, and `charonia drain` reads that. Its file is open by then, and so outlives the directory.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import msgspec
import psutil

from charonia.errors import LaunchError
from charonia.launch.commands.log_printer import LogPrinter
from charonia.launch.commands.reload import find_run
from charonia.launch.server.runtime_dir import owner_of
from charonia.serving.messages.reload import DrainOrder, DrainState
from charonia.sockets.channel import Channel
from charonia.sockets.local import connect
from charonia.supervision.process_table import process_state

POLL_S = 0.1
LEFT_FILE = "requests-left"
"""File in the runtime directory of a `charonia serve`: a line whenever the number has changed."""


def finish_requests(
    socket: Path,
    limit_s: float,
    stop: threading.Event,
    show: Callable[[int], None] = lambda num_left: None,
) -> int | None:
    """Have the scheduler take no more requests, and wait until it has none.

    Args:
        socket: the scheduler's. limit_s: how long to wait at most.
        stop: waits no longer once it is set.
        show: called with the number of requests that are left, whenever that has changed.

    Returns:
        How many are left, as far as it has said; None where it has not. Where no scheduler listens
        there are none.
    """
    until = time.monotonic() + limit_s
    num_left: int | None = None
    try:
        channel = connect(socket)
    except (FileNotFoundError, ConnectionRefusedError):
        show(0)
        return 0
    except OSError:
        return None
    with contextlib.closing(channel), contextlib.suppress(OSError, ValueError):
        while (reply := _ask(channel, until, stop)) is not None:
            before, num_left = num_left, msgspec.msgpack.decode(reply, type=DrainState).num_live
            if num_left != before:
                show(num_left)
            # One that was on its way to the scheduler is counted the second time.
            if num_left == before == 0 or time.monotonic() >= until or stop.wait(POLL_S):
                break
    return num_left


def _ask(channel: Channel, until: float, stop: threading.Event) -> bytes | None:
    """The scheduler's answer; None where it does not come in time, or never will.

    Raises:
        OSError: the scheduler has gone.
    """
    channel.send(msgspec.msgpack.encode(DrainOrder()))
    while True:
        try:
            return channel.receive(POLL_S)
        except TimeoutError:
            if time.monotonic() >= until or stop.is_set():
                return None


def note_left(run: Path, say: Callable[[str], None], num_left: int) -> None:
    """Write down, and say, how many requests are left in the server of a runtime directory."""
    say(words_of(num_left))
    with contextlib.suppress(OSError), (run / LEFT_FILE).open("a", encoding="ascii") as file:
        file.write(f"{num_left}\n")  # a full disk ends no requests


def drain(runtime_dir: Path | None, url: str | None) -> None:
    """Have a running `charonia serve` finish its requests and end, and wait until it has.

    One that is told already goes on with that, and is waited for.

    Args:
        runtime_dir, url: of the server, as for `reload`.

    Raises:
        LaunchError: there is no such server, or it belongs to no process, or to one of another
            user; or it has ended, and not all requests were finished.
    """
    run = find_run(runtime_dir, url)
    owner = owner_of(run)
    if owner is None:
        raise LaunchError(f"the server of {run} runs no more")
    try:
        file = (run / LEFT_FILE).open(encoding="ascii")
    except FileNotFoundError:
        raise LaunchError(f"{run} is not of a `charonia serve`, or it has just begun") from None
    with file:
        try:
            owner.send_signal(signal.SIGTERM)
        except psutil.AccessDenied:
            raise LaunchError(
                f"this user may not end process {owner.pid}, which is the server of {run};"
                " drain it as its own user, or as root"
            ) from None
        except psutil.NoSuchProcess:
            pass  # it has just ended, and may have written how
        num_left = _follow(file, owner.pid)
    if num_left is None:
        raise LaunchError(
            "the server has ended, and has not said whether its requests were finished: SIGINT and"
            " --drain-timeout 0 do not wait for them"
        )
    if num_left:
        raise LaunchError(f"the server has ended; requests that were not finished: {num_left}")
    print("drained; the server has ended")


def _follow(file: TextIO, pid: int) -> int | None:
    """Show how many requests are left until the process has ended; returns the last number."""
    num_left: int | None = None
    while True:
        has_ended = process_state(pid) is None
        if lines := file.readlines():
            num_left = int(lines[-1])
            LogPrinter("text").say(words_of(num_left))
        if has_ended:
            return num_left
        time.sleep(POLL_S)


def words_of(num_left: int) -> str:
    """Say how many requests are left."""
    requests = "request is" if num_left == 1 else "requests are"
    return f"draining: {num_left} {requests} left"
