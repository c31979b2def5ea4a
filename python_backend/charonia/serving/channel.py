"""The way of steps: a socket from the scheduler's process to the engine's.

Owns the messages' framing and both ends' lives. Must not know what is in a message.

Over BLS a step crosses tritonserver, which costs five or six wake-ups of sleeping threads each way
and some 0.4 ms of its processor time. Both processes are on one machine, so steps go directly
from one to the other, and BLS is left with what is not done for every token::

    scheduler ── BLS: hello ──► tritonserver ──► engine        who is there, is it alive
              ── socket: step ─────────────────► engine        one message each way per step

The socket is a file beside the secret, in a directory that belongs to the run. The end of either
process ends the other's wait at once.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SOCKET_NAME = "steps.socket"
_HEADER_BYTES = 4


class Channel:
    """One end of a connection: whole messages in order. Used by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    def send(self, message: bytes, timeout: float | None = None) -> None:
        """Send a message.

        Raises:
            OSError: the other end has gone, or takes nothing for `timeout` seconds.
        """
        self._connection.settimeout(timeout)
        self._connection.sendall(len(message).to_bytes(_HEADER_BYTES, "little") + message)

    def receive(self, timeout: float | None = None) -> bytes | None:
        """Wait for a message, at most `timeout` seconds; None when the other end has gone.

        Raises:
            TimeoutError: nothing came, or not all of it; the next call goes on from there.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._connection.settimeout(timeout)
        while (message := self._take_message()) is None:
            if deadline is not None:
                self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                received = self._connection.recv(2**16)
            except TimeoutError:
                raise
            except OSError:
                return None
            if not received:
                return None
            self._received += received
        return message

    def close(self) -> None:
        """Let go; the other end sees it at once."""
        with contextlib.suppress(OSError):  # it may never have been connected
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _take_message(self) -> bytes | None:
        end = _HEADER_BYTES + int.from_bytes(self._received[:_HEADER_BYTES], "little")
        if len(self._received) < max(end, _HEADER_BYTES):
            return None
        message = bytes(self._received[_HEADER_BYTES:end])
        del self._received[:end]
        return message


def connect(directory: Path) -> Channel:
    """Connect to the engine whose socket lies in `directory`.

    Raises:
        OSError: nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_path(directory) as path:
            connection.connect(path)
    except OSError:
        connection.close()
        raise
    return Channel(connection)


class ChannelServer:
    """Answers the messages of one connection after the other, in a thread of its own.

    Args:
        directory: where the socket is made; an old one is replaced.
        answer: message to reply, or None to hang up. Called in the thread.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(self, directory: Path, answer: Callable[[bytes], bytes | None]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._is_closing = False
        self._channel: Channel | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):
            (directory / SOCKET_NAME).unlink()
        try:
            with _short_path(directory) as path:
                self._listener.bind(path)
            (directory / SOCKET_NAME).chmod(0o600)
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._run, name="charonia-steps", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Hang up and stop listening; waits for a message that is being answered."""
        with self._lock:
            self._is_closing = True
            if self._channel is not None:
                self._channel.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._thread.join(timeout)
        self._listener.close()

    def _run(self) -> None:
        while not self._is_closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._serve(Channel(connection))

    def _serve(self, channel: Channel) -> None:
        with self._lock:
            self._channel = channel
            if self._is_closing:
                channel.close()
        with contextlib.suppress(OSError):  # the other end has gone
            while (message := channel.receive()) is not None:
                reply = self._answer(message)
                if reply is None:
                    break
                channel.send(reply)
        with self._lock:
            self._channel = None
        channel.close()


@contextlib.contextmanager
def _short_path(directory: Path) -> Iterator[str]:
    """The socket's path through an open directory: a socket's own has 107 characters at most."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)
