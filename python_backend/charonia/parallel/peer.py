"""The connection between the engine's process and one rank: messages and heartbeats.

Owns both ends of one socket. Must not know the meaning of messages.

A rank sends a heartbeat every half second. If nothing arrives for `rank_timeout_s` it counts as
lost. The engine's process relies on that alone: a rank does not read while it computes, and the
kernel's timeout for unacknowledged data would take it for lost. A rank does rely on that timeout of
its kernel to notice a broken network. If a process ends, its socket is closed, which the other end
notices at once.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

from charonia.errors import RankLostError
from charonia.parallel.messages import BEAT, Message, decode, encode
from charonia.sockets.connection import Connection

BEAT_S = 0.5
SPIN_S = 2e-3
"""Time for which a rank polls for the next pass before it sleeps, in seconds: longer than the gap
between two steps of a busy engine."""


class Peer:
    """The other end. One thread may receive, any thread may send.

    Args:
        timeout: seconds without a message or heartbeat after which the other end counts as lost.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        self._socket = connection.channel.socket
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._timeout = timeout
        self.heard_at = time.monotonic()

    def fileno(self) -> int:
        """Return the socket's file descriptor, for `select`."""
        return self._socket.fileno()

    @property
    def is_silent(self) -> bool:
        """True if nothing was received within the timeout."""
        return time.monotonic() - self.heard_at > self._timeout

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            RankLostError: the connection has ended, or `hang_up` was called.
        """
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send a message that was encoded once for several ranks; raises as `send`."""
        try:
            self._connection.send(data)
        except OSError as error:
            raise RankLostError(f"the connection has ended: {error.strerror or error}") from None

    def beat(self) -> None:
        """Send a heartbeat; raises as `send`."""
        self.send_encoded(BEAT)

    def receive(self, timeout: float | None = None, *, spin: float = 0.0) -> Message | None:
        """Wait for a message or a heartbeat; None stands for a heartbeat.

        Args:
            timeout: seconds to wait; None waits without limit.

        Raises:
            RankLostError: the connection has ended, or nothing came in time.
            msgspec.DecodeError: the data is not a message.
        """
        try:
            return self._next(timeout, spin=spin)
        except TimeoutError:
            raise RankLostError("no message or heartbeat came in time") from None

    def take(self) -> Iterator[Message]:
        """Yield the complete messages that have arrived, without waiting.

        A rank that stops in the middle of a message does not block the others; it runs into its
        timeout.

        Raises:
            RankLostError, msgspec.DecodeError: as `receive`.
        """
        with contextlib.suppress(TimeoutError):
            while True:
                if (message := self._next(0.0)) is not None:
                    yield message

    def beat_for_ever(self) -> None:
        """Start sending heartbeats; when they cannot be delivered, end this process.

        That includes data that the other end's kernel has not acknowledged within the timeout.
        """
        self._socket.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._timeout * 1000)
        )

        def run() -> None:
            with contextlib.suppress(RankLostError):
                while True:
                    self.beat()
                    time.sleep(BEAT_S)
            os._exit(1)

        threading.Thread(target=run, name="charonia-beat", daemon=True).start()

    def hang_up(self) -> None:
        """End the connection. Threads that wait in it get an error."""
        self._connection.hang_up()

    def close(self) -> None:
        """End the connection and close the socket. No other thread may use this object any more."""
        self._connection.close()

    def _next(self, timeout: float | None, *, spin: float = 0.0) -> Message | None:
        data = self._connection.channel.receive(timeout, spin=spin)
        if data is None:
            raise RankLostError("the connection has ended")
        self.heard_at = time.monotonic()
        return decode(data) if data != BEAT else None
