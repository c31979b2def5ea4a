"""The connection between the engine's process and one rank: messages, and whether it lives.

Owns one socket from both sides. Must not know what messages are about.

A rank says every half second that it lives, and is given up when nothing was heard of it for
`rank_timeout_s`. A rank gives the engine's process up when the network does: its kernel asks after
the other's, and does not wait for ever for what it sends to be acknowledged. A process that ends
closes its socket, which is noticed at once.
"""

import contextlib
import os
import socket
import struct
import threading
import time

from charonia.connection import Channel
from charonia.errors import RankLostError
from charonia.parallel.messages import BEAT, Message, decode, encode

BEAT_S = 0.5
SPIN_S = 2e-3
"""How long a rank looks for the next pass before it sleeps: what lies between two steps of a busy
engine, and then some."""


class Peer:
    """The other side, for one thread that receives and any that send.

    Args:
        timeout: seconds without a sign of life.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        whole_seconds = max(round(timeout / 2), 1)
        # Of the socket, not of Python's socket object: that would limit receiving as well.
        send_timeout = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout * 1000)),
            (socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, whole_seconds),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, whole_seconds),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
        ):
            connection.setsockopt(level, option, value)
        self._channel = Channel(connection)
        self._timeout = timeout
        self._lock = threading.Lock()
        self.heard_at = time.monotonic()

    def fileno(self) -> int:
        """For `select`."""
        return self._channel.fileno()

    @property
    def is_silent(self) -> bool:
        """Whether nothing was received for too long."""
        return time.monotonic() - self.heard_at > self._timeout

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            RankLostError: the other side has gone, or takes nothing.
        """
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """The same with a message that goes to several."""
        try:
            with self._lock:
                self._channel.send(data)
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
            data = self._channel.receive(timeout, spin=spin)
        except TimeoutError:
            raise RankLostError("nothing was heard of it") from None
        if data is None:
            raise RankLostError("the connection has ended")
        self.heard_at = time.monotonic()
        return decode(data) if data != BEAT else None

    def beat_for_ever(self) -> None:
        """Start to say that this process lives, and end it when there is nobody to say it to."""

        def run() -> None:
            with contextlib.suppress(RankLostError):
                while True:
                    self.beat()
                    time.sleep(BEAT_S)
            os._exit(1)

        threading.Thread(target=run, name="charonia-beat", daemon=True).start()

    def close(self) -> None:
        """Hang up, when no other thread uses this any more."""
        self._channel.close()
