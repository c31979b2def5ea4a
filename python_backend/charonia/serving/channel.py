"""Sockets between models of one Triton: whole messages from process to process.

Owns where the sockets are and both ends' lives. Must not know what is in a message.

A message over BLS crosses tritonserver, which costs five or six wake-ups of sleeping threads each
way and some 0.4 ms of its processor time. All these processes are on one machine, so what is
said often goes directly from one to the other::

    scheduler ── socket: step ─────────────────► engine        one message each way per step
    generate, postprocessor ── socket ─────────► scheduler     see `relay`

There is a second reason. A BLS call makes the tensors of its answer without holding Python's lock
(2.51.0), so in a process with threads every such answer may corrupt the heap; measured, a process
with three threads dies after some thousand calls. Answers over BLS therefore carry no tensors here.

A socket is a file in its model's directory, which belongs to the run. The end of either process
ends the other's wait at once.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from socket import SO_PEERCRED, SOL_SOCKET

from charonia.connection import Channel

SOCKET_SUFFIX = ".socket"
_ROOT = 0  # may do anything anyway
_TRY_AGAIN_S = 0.1
_FAREWELL_TIMEOUT_S = 1.0


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
        os.fchmod(listener.fileno(), 0o600)  # which the file is made with: at no time is it wider
        with _short_path(path) as address:
            listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def peer_pid(channel: Channel) -> int:
    """The process that listens, or did, at the other end of a connection of `connect`."""
    return _credentials(channel.socket)[0]


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(SOL_SOCKET, SO_PEERCRED, size))
    return pid, uid


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
            _, uid = _credentials(connection)
            if uid in (os.geteuid(), _ROOT):
                yield Channel(connection)
            else:  # it got the socket from somebody
                connection.close()


Answer = Callable[[], bytes]
"""Ends what a message began, and gives the reply."""


class _Connection:
    """Somebody who is connected: the channel, its thread, and one sender at a time."""

    def __init__(self, channel: Channel, serve: Callable[["_Connection"], None]) -> None:
        self.channel = channel
        self.thread = threading.Thread(
            target=serve, args=(self,), name="charonia-channel", daemon=True
        )
        self._sending = threading.Lock()

    def send(self, message: bytes, timeout: float = -1) -> None:
        """Send a message; raises OSError as a channel does. Below 0 there is no time limit."""
        if not self._sending.acquire(timeout=timeout):
            raise TimeoutError
        try:
            self.channel.send(message, None if timeout < 0 else timeout)
        finally:
            self._sending.release()


class ChannelServer:
    """Answers messages, each connection's in a thread of its own.

    Args:
        path: where the socket is made; an old one is replaced.
        begin: message to what answers it, or None to hang up. Called in several threads.
        is_pipelined: begin messages while earlier ones of the same connection are still to be
            answered; that is then done by a second thread, in the order of the messages.
        spin: after a reply the next message is looked for so many seconds, see `Channel.receive`.
        farewell: sent to everybody who is connected as soon as this closes, whatever is still to be
            answered: that may take longer than this process has.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(
        self,
        path: Path,
        begin: Callable[[bytes], Answer | None],
        *,
        is_pipelined: bool = False,
        spin: float = 0.0,
        farewell: bytes | None = None,
    ) -> None:
        self._begin = begin
        self._is_pipelined = is_pipelined
        self._farewell = farewell
        self._spin = spin
        self._lock = threading.Lock()
        self._is_closing = False
        self._connections: set[_Connection] = set()
        self._listener = listen(path)
        self._thread = threading.Thread(target=self._run, name="charonia-listener", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Say farewell, answer what has come, hang up and stop listening."""
        with self._lock:
            self._is_closing = True
            threads = [self._thread, *(one.thread for one in self._connections)]
            for connection in self._connections:
                connection.channel.stop_receiving()
                if self._farewell is not None:
                    with contextlib.suppress(OSError):
                        connection.send(self._farewell, _FAREWELL_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        for thread in threads:
            thread.join(timeout)
        self._listener.close()

    def _run(self) -> None:
        for channel in connections(self._listener, lambda: self._is_closing):
            connection = _Connection(channel, self._serve)
            with self._lock:
                if self._is_closing:
                    channel.close()
                    break
                self._connections.add(connection)
                connection.thread.start()

    def _serve(self, connection: _Connection) -> None:
        try:
            if self._is_pipelined:
                self._answer_later(connection)
            else:
                for answer in self._answers(connection):
                    connection.send(answer())
        except OSError:
            pass  # the other end has gone
        finally:
            with self._lock:
                self._connections.remove(connection)
            connection.channel.close()

    def _answers(self, connection: _Connection) -> Iterator[Answer]:
        """Begin what comes, until nothing does any more or there is no answer to it."""
        while (message := connection.channel.receive(spin=self._spin)) is not None:
            answer = self._begin(message)
            if answer is None:
                return
            yield answer

    def _answer_later(self, connection: _Connection) -> None:
        answers: SimpleQueue[Answer | None] = SimpleQueue()
        ender = threading.Thread(
            target=self._end, args=(connection, answers), name="charonia-answers", daemon=True
        )
        ender.start()
        try:
            for answer in self._answers(connection):
                answers.put(answer)
        finally:
            answers.put(None)
            ender.join()

    def _end(self, connection: _Connection, answers: "SimpleQueue[Answer | None]") -> None:
        """Answer one message after the other; all of them, though nobody may be there any more."""
        while (answer := answers.get()) is not None:
            try:
                connection.send(answer())
            except OSError:
                pass  # the other end has gone
            except BaseException:
                connection.channel.hang_up()  # or it would wait for this answer for ever
                raise


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """`path` through its directory, opened: a socket's own has 107 characters at most."""
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
