"""Sockets between models of one Triton: whole messages from process to process.

Owns the messages' framing and both ends' lives. Must not know what is in a message.

A message over BLS crosses tritonserver, which costs five or six wake-ups of sleeping threads each
way and some 0.4 ms of its processor time. All these processes are on one machine, so what is
said often goes directly from one to the other::

    scheduler ── BLS: hello ──► tritonserver ──► engine        is it alive
              ── socket: step ─────────────────► engine        one message each way per step
    generate, postprocessor ── socket ─────────► scheduler     see `relay`

There is a second reason. A BLS call makes the tensors of its answer without holding Python's lock
(2.51.0), so in a process with threads every such answer may corrupt the heap; measured, a process
with three threads dies after some thousand calls. Answers over BLS therefore carry no tensors here.

A socket is a file in its model's directory, which belongs to the run. The end of either process
ends the other's wait at once.
"""

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SOCKET_SUFFIX = ".socket"
MAX_BYTES = 2**28
_HEADER_BYTES = 4
_TRY_AGAIN_S = 0.1


class Channel:
    """One end of a connection: whole messages in order.

    For one thread at a time; or for one that sends and one that receives, without time limits.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    def send(self, message: bytes, timeout: float | None = None) -> None:
        """Send a message.

        Raises:
            OSError: the other end has gone, or takes nothing for `timeout` seconds; or the message
                has more than `MAX_BYTES`.
        """
        if len(message) > MAX_BYTES:
            raise OSError(errno.EMSGSIZE, f"a message of {len(message)} bytes is too long")
        self._connection.settimeout(timeout)
        self._connection.sendall(len(message).to_bytes(_HEADER_BYTES, "little") + message)

    def receive(self, timeout: float | None = None, *, spin: float = 0.0) -> bytes | None:
        """Wait for a message, at most `timeout` seconds; None when there will be none any more.

        Args:
            spin: look for so many seconds before sleeping, from which it takes 0.1 ms to wake up.

        Raises:
            TimeoutError: nothing came, or not all of it; the next call goes on from there.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while (message := self._take_message()) is None:
                if spin:
                    self._look(spin)
                    spin = 0.0
                    continue
                left = None if deadline is None else max(deadline - time.monotonic(), 1e-3)
                self._connection.settimeout(left)
                received = self._connection.recv(2**16)
                if not received:
                    return None
                self._received += received
        except TimeoutError:
            raise
        except OSError:
            return None
        return message

    def hang_up(self) -> None:
        """End the connection, also for a thread that waits in it; the other end sees it at once."""
        with contextlib.suppress(OSError):  # it may never have been connected
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and let go, when no other thread uses this any more."""
        self.hang_up()
        self._connection.close()

    def _look(self, seconds: float) -> None:
        """Receive what comes within `seconds`, and let others have the core meanwhile."""
        until = time.monotonic() + seconds
        self._connection.settimeout(None)
        while time.monotonic() < until:
            try:
                self._received += self._connection.recv(2**16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
            else:
                return

    def _take_message(self) -> bytes | None:
        end = _HEADER_BYTES + int.from_bytes(self._received[:_HEADER_BYTES], "little")
        if end > _HEADER_BYTES + MAX_BYTES:
            raise OSError(errno.EMSGSIZE, f"a message of {end} bytes is announced")
        if len(self._received) < max(end, _HEADER_BYTES):
            return None
        message = bytes(self._received[_HEADER_BYTES:end])
        del self._received[:end]
        return message


def connect(path: Path) -> Channel:
    """Connect to the socket at `path`.

    Raises:
        OSError: nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_path(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return Channel(connection)


def listen(path: Path) -> socket.socket:
    """Make a socket at `path` that its owner alone can connect to; an old one is replaced.

    Raises:
        OSError: it cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError):
        path.unlink()
    try:
        with _short_path(path) as address:
            listener.bind(address)
        path.chmod(0o600)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def connections(listener: socket.socket, is_closing: Callable[[], bool]) -> Iterator[Channel]:
    """What connects to a listener, until it is shut down after `is_closing` has become true."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # or there are no descriptors left, for the moment
            if is_closing():
                return
            time.sleep(_TRY_AGAIN_S)
        else:
            yield Channel(connection)


class ChannelServer:
    """Answers messages, each connection's in a thread of its own.

    Args:
        path: where the socket is made; an old one is replaced.
        answer: message to reply, or None to hang up. Called in several threads.
        spin: after a reply the next message is looked for so many seconds, see `Channel.receive`.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(
        self, path: Path, answer: Callable[[bytes], bytes | None], *, spin: float = 0.0
    ) -> None:
        self._answer = answer
        self._spin = spin
        self._lock = threading.Lock()
        self._is_closing = False
        self._channels: dict[Channel, threading.Thread] = {}
        self._listener = listen(path)
        self._thread = threading.Thread(target=self._run, name="charonia-listener", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Hang up and stop listening; waits for messages that are being answered."""
        with self._lock:
            self._is_closing = True
            threads = [self._thread, *self._channels.values()]
            for channel in self._channels:
                channel.hang_up()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        for thread in threads:
            thread.join(timeout)
        self._listener.close()

    def _run(self) -> None:
        for channel in connections(self._listener, lambda: self._is_closing):
            thread = threading.Thread(
                target=self._serve, args=(channel,), name="charonia-channel", daemon=True
            )
            with self._lock:
                if self._is_closing:
                    channel.close()
                    break
                self._channels[channel] = thread
                thread.start()

    def _serve(self, channel: Channel) -> None:
        with contextlib.suppress(OSError):  # the other end has gone
            while (message := channel.receive(spin=self._spin)) is not None:
                reply = self._answer(message)
                if reply is None:
                    break
                channel.send(reply)
        with self._lock:
            del self._channels[channel]
        channel.close()


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """`path` through its directory, opened: a socket's own has 107 characters at most."""
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
