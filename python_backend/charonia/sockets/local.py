"""Unix sockets between processes of one user on one machine.

Owns where they are and who may use them. Knows nothing about the messages.

A socket is a file in its model's directory, which belongs to the run. Only its owner may use it,
from the moment it exists. The kernel tells which user's process is at the other end, so a socket is
of no use to another user's process that was handed it.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from charonia.sockets.channel import MAX_BYTES, Channel

SOCKET_SUFFIX = ".socket"
_ROOT = 0  # root may do anything anyway
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def connect(path: Path, *, max_bytes: int = MAX_BYTES, waits: bool = True) -> Channel:
    """Connect to the socket at `path`.

    Args:
        max_bytes: longest message, see `Channel`.
        waits: wait while the listener's backlog is full; a stopped process never empties it.

    Raises:
        OSError: nothing listens there; or, without `waits`, the backlog is full (EAGAIN).
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
    """Create a socket at `path` that only its owner can connect to; an old one is replaced.

    Raises:
        OSError: it cannot be created.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError):
        path.unlink()
    try:
        os.fchmod(listener.fileno(), 0o600)  # the file is created with this mode, never a wider one
        with _short_path(path) as address:
            listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def is_same_user(channel: Channel) -> bool:
    """Return whether the process at the other end belongs to this user, or to root."""
    _, uid = _credentials(channel)
    return uid in (os.geteuid(), _ROOT)


def peer_pid(channel: Channel) -> int:
    """The process that listens, or listened, at the other end of a connection from `connect`."""
    pid, _ = _credentials(channel)
    return pid


def _credentials(channel: Channel) -> tuple[int, int]:
    """Process and user at the other end, from the kernel."""
    data = channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """`path` by way of a descriptor of its directory: a socket's path is limited to 107 bytes."""
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
