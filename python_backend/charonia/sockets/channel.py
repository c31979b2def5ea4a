"""Whole messages through a stream socket, of any kind.

Owns the framing, waiting for a message, and the unsent rest of posted messages. Knows nothing about
the content of a message, the other end, or threads.

The socket has no timeout, because a socket's timeout applies to both directions. A call with a
timeout polls.
"""

import contextlib
import errno
import os
import select
import socket
import time

MAX_BYTES = 2**28
_SHORT_S = 0.02  # timeouts below this need better than poll()'s whole milliseconds
FD_SETSIZE = 1024  # select() takes only descriptors below this
_HEADER_BYTES = 4


class Channel:
    """One end of a connection: whole messages in order.

    For one thread at a time; or for one that sends and one that receives, if nothing is posted.

    Attributes:
        max_bytes: longest message in either direction. A longer one that arrives is not read;
            `receive` treats it as the end of the connection.
    """

    def __init__(self, connection: socket.socket, *, max_bytes: int = MAX_BYTES) -> None:
        connection.settimeout(None)
        self.max_bytes = max_bytes
        self._connection = connection
        self._received = bytearray()
        self._unsent = memoryview(b"")

    @property
    def socket(self) -> socket.socket:
        """The socket, for its options."""
        return self._connection

    def fileno(self) -> int:
        """The socket's descriptor: a channel can be waited for with `select`."""
        return self._connection.fileno()

    def send(self, message: bytes, timeout: float | None = None) -> None:
        """Send a message.

        Raises:
            OSError: the other end has gone, or has not taken all of it within `timeout` seconds; or
                the message has more than `max_bytes` (EMSGSIZE). If it has taken a part of it, the
                connection has ended: no message can follow.
        """
        assert not self._unsent, "send() before all that was posted has gone"
        data = self._framed(message)
        if timeout is None:
            self._connection.sendall(data)
            return
        deadline = time.monotonic() + timeout
        rest = memoryview(data)
        try:
            while rest:
                self._wait(select.POLLOUT, deadline)
                rest = rest[self._send_some(rest) :]
        except OSError:
            if len(rest) < len(data):
                self.hang_up()
            raise

    def post(self, message: bytes) -> None:
        """Send as much of a message as the other end takes at once; `receive` sends the rest.

        Never waits. Only `receive` reports that the connection has ended. The caller must bound the
        number of posted messages, e.g. by the answers that it still expects.

        Raises:
            OSError: the message has more than `max_bytes` (EMSGSIZE).
        """
        data = self._framed(message)
        self._unsent = memoryview(self._unsent.tobytes() + data if self._unsent else data)
        self._send_unsent()

    def check_size(self, message: bytes) -> None:
        """Raises OSError (EMSGSIZE): the message is too long to be sent."""
        if len(message) > self.max_bytes:
            raise OSError(
                errno.EMSGSIZE,
                f"a message of {len(message)} bytes is too long; the most is {self.max_bytes}",
            )

    def receive(self, timeout: float | None = None, *, spin: float = 0.0) -> bytes | None:
        """Wait for a message, at most `timeout` seconds; None if the connection has ended.

        Args:
            spin: seconds to poll before sleeping; waking up from sleep takes 0.1 ms.

        Raises:
            TimeoutError: no message, or only a part of one; the next call continues from there.
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
        """True if another whole message was already received with the last one."""
        return len(self._received) >= self._end_of_message()

    def is_quiet(self) -> bool:
        """Return whether no data has arrived and the connection has not ended."""
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
        """End `receive` after the messages that have arrived; wakes a thread that waits in it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def hang_up(self) -> None:
        """End the connection; wakes threads that wait in it. The other end sees it at once."""
        with contextlib.suppress(OSError):  # it may never have been connected
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and close the socket, once no other thread uses it."""
        self.hang_up()
        self._connection.close()

    def _look(self, seconds: float) -> None:
        """Poll for `seconds` until data arrives; other threads may have the core meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                self._received += self._connection.recv(2**16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
            else:
                return

    def _wait_to_receive(self, deadline: float | None) -> None:
        """Wait until there is data to receive; send what was posted meanwhile.

        Raises:
            TimeoutError: there is none.
        """
        while self._unsent:
            ready = self._wait(select.POLLIN | select.POLLOUT, deadline)
            self._send_unsent()
            if ready & ~select.POLLOUT:
                return
        if deadline is not None:
            self._wait(select.POLLIN, deadline)

    def _wait(self, events: int, deadline: float | None) -> int:
        """Wait until the socket is ready for one of `events`, or has ended; return its events.

        Raises:
            TimeoutError: neither happened in time. OSError: this end is closed.
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
            num_bytes = len(self._unsent)  # the connection has ended; `receive` will see it
        self._unsent = self._unsent[num_bytes:]

    def _send_some(self, data: memoryview) -> int:
        """Send without waiting; return the number of bytes that were taken."""
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _framed(self, message: bytes) -> bytes:
        """The message behind its length; raises as `check_size`."""
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
