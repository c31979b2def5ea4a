"""Sockets that are files, between processes of one user on one machine.

Owns where they are and who may use them. Must not know what is said there.

A socket is a file in its model's directory, which belongs to the run. It is its owner's alone from
its first moment, and the kernel tells whose process is at the other end: a socket that was
handed to somebody else is of no use to them.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from charonia.sockets.channel import MAX_BYTES, Channel

SOCKET_SUFFIX = ".socket"
_ROOT = 0  # may do anything anyway
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def connect(path: Path, *, max_bytes: int = MAX_BYTES, waits: bool = True) -> Channel:
    """Connect to the socket at `path`.

    Args:
        max_bytes: of a message, see `Channel`.
        waits: for room where too many wait already, which a stopped process never makes.

    Raises:
        OSError: nobody listens there; or without `waits` there is no room (EAGAIN).
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(waits)
    try:
        with _short_path(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return Channel(connection, max_bytes=max_bytes)


def listen(path: Path) -> socket.socket:
    """Make a socket at `path` that its owner alone can connect to; an old one is replaced.

    Raises:
        OSError: it cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError):
        path.unlink()
    try:
        os.fchmod(listener.fileno(), 0o600)  # which the file is made with: at no time is it wider
        with _short_path(path) as address:
            listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def is_same_user(channel: Channel) -> bool:
    """Whether the process at the other end is one of this user, or of root."""
    _, uid = _credentials(channel)
    return uid in (os.geteuid(), _ROOT)


def peer_pid(channel: Channel) -> int:
    """The process that listens, or did, at the other end of a connection of `connect`."""
    pid, _ = _credentials(channel)
    return pid


def _credentials(channel: Channel) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    data = channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """`path` through its directory, opened: a socket's own has 107 characters at most."""
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
