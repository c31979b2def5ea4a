"""Whole messages through a stream socket, of any kind.

Owns the framing, how a message is waited for, and what is left of one that was posted. Must not
know what is in a message, who is at the other end, or threads.

The socket itself has no time limit, so one of each direction does not change the other's: who waits
for a while polls.
"""

import contextlib
import errno
import os
import select
import socket
import time

MAX_BYTES = 2**28
_SHORT_S = 0.02  # where a millisecond counts
FD_SETSIZE = 1024  # descriptors from there on are not for select()
_HEADER_BYTES = 4


class Channel:
    """One end of a connection: whole messages in order.

    For one thread at a time; or for one that sends and one that receives, where nobody posts.

    Attributes:
        max_bytes: of a message, either way. A longer one is not even begun to be kept.
    """

    def __init__(self, connection: socket.socket, *, max_bytes: int = MAX_BYTES) -> None:
        connection.settimeout(None)
        self.max_bytes = max_bytes
        self._connection = connection
        self._received = bytearray()
        self._unsent = memoryview(b"")

    @property
    def socket(self) -> socket.socket:
        """What it goes through, for its options."""
        return self._connection

    def fileno(self) -> int:
        """The socket's descriptor: a channel can be waited for with `select`."""
        return self._connection.fileno()

    def send(self, message: bytes, timeout: float | None = None) -> None:
        """Send a message.

        Raises:
            OSError: the other end has gone, or takes nothing for `timeout` seconds; or the message
                has more than `max_bytes` (EMSGSIZE).
        """
        assert not self._unsent, "send() before all that was posted has gone"
        data = self._framed(message)
        if timeout is None:
            self._connection.sendall(data)
            return
        deadline = time.monotonic() + timeout
        rest = memoryview(data)
        while rest:
            self._wait(select.POLLOUT, deadline)
            rest = rest[self._send_some(rest) :]

    def post(self, message: bytes) -> None:
        """Send what the other end takes of a message at once; `receive` sends the rest.

        It never waits. What becomes of a message after the end is told by `receive` alone. The
        caller bounds how many wait: those that it has not received an answer to.

        Raises:
            OSError: the message has more than `max_bytes` (EMSGSIZE).
        """
        data = self._framed(message)
        self._unsent = memoryview(self._unsent.tobytes() + data if self._unsent else data)
        self._send_unsent()

    def check_size(self, message: bytes) -> None:
        """Raises OSError (EMSGSIZE): it is too long to be sent."""
        if len(message) > self.max_bytes:
            raise OSError(
                errno.EMSGSIZE,
                f"a message of {len(message)} bytes is too long; the most is {self.max_bytes}",
            )

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
                self._wait_to_receive(deadline)
                received = self._connection.recv(2**16)
                if not received:
                    return None
                self._received += received
        except TimeoutError:
            raise
        except OSError:
            return None
        return message

    @property
    def has_message(self) -> bool:
        """Whether a whole message was received beside the last one."""
        return len(self._received) >= self._end_of_message()

    def is_quiet(self) -> bool:
        """Whether neither a message nor the end has come."""
        if self._received:
            return False
        try:
            self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False  # it has ended
        return False

    def stop_receiving(self) -> None:
        """End `receive`, also for a thread that waits in it, after what has come already."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

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
        while time.monotonic() < until:
            try:
                self._received += self._connection.recv(2**16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
            else:
                return

    def _wait_to_receive(self, deadline: float | None) -> None:
        """Wait until something can be received, and send meanwhile what was posted.

        Raises:
            TimeoutError: nothing came.
        """
        while self._unsent:
            ready = self._wait(select.POLLIN | select.POLLOUT, deadline)
            self._send_unsent()
            if ready & ~select.POLLOUT:
                return
        if deadline is not None:
            self._wait(select.POLLIN, deadline)

    def _wait(self, events: int, deadline: float | None) -> int:
        """Wait until the socket is ready for one of `events`, or has ended; return what it is.

        Raises:
            TimeoutError: it is not. OSError: this end is closed.
        """
        descriptor = self._connection.fileno()
        if descriptor < 0:
            raise OSError(errno.EBADF, "the connection is closed")
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        is_short = left is not None and left < _SHORT_S
        if is_short and events == select.POLLIN and descriptor < FD_SETSIZE:
            if not select.select([descriptor], [], [], left)[0]:  # poll() takes whole milliseconds
                raise TimeoutError("timed out")
            return select.POLLIN
        poll = select.poll()
        poll.register(descriptor, events)
        ready = poll.poll(None if left is None else left * 1000)
        if not ready:
            raise TimeoutError("timed out")
        return ready[0][1]

    def _send_unsent(self) -> None:
        try:
            num_bytes = self._send_some(self._unsent)
        except OSError:
            num_bytes = len(self._unsent)  # it has ended, which is seen when something is received
        self._unsent = self._unsent[num_bytes:]

    def _send_some(self, data: memoryview) -> int:
        """Send what is taken at once; return how many bytes that were."""
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _framed(self, message: bytes) -> bytes:
        """With its length before it; raises as `check_size`."""
        self.check_size(message)
        return len(message).to_bytes(_HEADER_BYTES, "little") + message

    def _end_of_message(self) -> int:
        return _HEADER_BYTES + int.from_bytes(self._received[:_HEADER_BYTES], "little")

    def _take_message(self) -> bytes | None:
        end = self._end_of_message()
        if end > _HEADER_BYTES + self.max_bytes:
            raise OSError(errno.EMSGSIZE, f"a message of {end} bytes is announced")
        if not self.has_message:
            return None
        message = bytes(self._received[_HEADER_BYTES:end])
        del self._received[:end]
        return message
