"""The connection between the engine's process and one rank: messages, and whether it lives.

Owns one socket from both sides. Must not know what messages are about.

A rank says every half second that it lives, and is given up when nothing was heard of it for
`rank_timeout_s`: by that alone, because a rank that computes for long does not read meanwhile, and
the kernel would take it for lost. It is a rank that leaves it to its kernel to notice that the
network has gone, by what it says not being acknowledged. A process that ends closes its socket,
which is noticed at once.
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
"""How long a rank looks for the next pass before it sleeps: what lies between two steps of a busy
engine, and then some."""


class Peer:
    """The other side, for one thread that receives and any that send.

    Args:
        timeout: seconds without a sign of life.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        self._socket = connection.channel.socket
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._timeout = timeout
        self.heard_at = time.monotonic()

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    @property
    def is_silent(self) -> bool:
        """Whether nothing was received for too long."""
        return time.monotonic() - self.heard_at > self._timeout

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            RankLostError: the other side has gone, or `hang_up` was called.
        """
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """The same with a message that goes to several."""
        try:
            self._connection.send(data)
        except OSError as error:
            raise RankLostError(f"the connection has ended: {error.strerror or error}") from None

    def beat(self) -> None:
        """Say that this side lives; raises as `send`."""
        self.send_encoded(BEAT)

    def receive(self, timeout: float | None = None, *, spin: float = 0.0) -> Message | None:
        """Wait for a message, or for any sign of life: None is only that.

        Args:
            timeout: for who has said nothing yet; later it is noticed that one falls silent.

        Raises:
            RankLostError: the other side has gone, or says nothing.
            msgspec.DecodeError: it says what is no message.
        """
        try:
            return self._next(timeout, spin=spin)
        except TimeoutError:
            raise RankLostError("nothing was heard of it") from None

    def take(self) -> Iterator[Message]:
        """What has come; waits for nothing, nor for the rest of a message that came in part.

        So one end that stops amid a message keeps nobody from hearing the others; it falls silent.

        Raises:
            RankLostError, msgspec.DecodeError: as `receive`.
        """
        with contextlib.suppress(TimeoutError):
            while True:
                if (message := self._next(0.0)) is not None:
                    yield message

    def beat_for_ever(self) -> None:
        """Start to say that this process lives, and end it when there is nobody to say it to.

        That is also when nothing was acknowledged for the time without a sign of life.
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
        """End the connection, also for threads that wait in it."""
        self._connection.hang_up()

    def close(self) -> None:
        """Hang up and let go, when no other thread uses this any more."""
        self._connection.close()

    def _next(self, timeout: float | None, *, spin: float = 0.0) -> Message | None:
        data = self._connection.channel.receive(timeout, spin=spin)
        if data is None:
            raise RankLostError("the connection has ended")
        self.heard_at = time.monotonic()
        return decode(data) if data != BEAT else None
