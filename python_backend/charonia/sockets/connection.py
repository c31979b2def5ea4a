"""One end of a connection, for any number of threads.

Owns the order of sending, the outbox, and the threads that send and receive. Knows nothing about
the content of a message, or how the connection was made.

    send()   any thread ──────────────────────────► socket     at once, one after the other
    post()   any thread ─► outbox ─► writer ──────► socket     soon; never waits
    messages(), follow()              the caller, or a reader ◄── socket

The outbox is bounded in messages and in bytes, which limits what a stalled other end costs. The
first `post` starts the writer thread; a caller that only sends needs none.
"""

import contextlib
import errno
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator

from charonia.sockets.channel import Channel

MAX_WAITING = 8192
MAX_WAITING_BYTES = 2**28
"""Limit of the outbox; an empty one takes one message of any legal length."""
FIRST_MESSAGE_S = 10.0
"""Timeout of the first message of a connection."""
_CLOSE_TIMEOUT_S = 2.0


class Connection:
    """One end.

    Args:
        channel: others may only receive from it, in one thread.

    Attributes:
        has_ended: whether the connection is over.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.has_ended = False
        self._sending = threading.Lock()
        self._changed = threading.Condition()  # guards what follows
        self._outbox: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_closing = False
        self._has_writer = False
        self._threads: list[threading.Thread] = []

    def send(self, message: bytes, timeout: float | None = None) -> None:
        """Send a message now.

        Raises:
            OSError: the other end has gone, or has not taken all of it within `timeout` seconds; or
                the message is too long.
        """
        if not self._sending.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError
        try:
            self.channel.send(message, timeout)
        finally:
            self._sending.release()

    def post(self, message: bytes, *, may_exceed: bool = False) -> None:
        """Send a message soon; never waits. Does nothing once the connection has ended.

        Args:
            may_exceed: send it even if the outbox is full. The caller bounds how many such messages
                there are.

        Raises:
            OSError: the message is too long (EMSGSIZE), the outbox is full (ENOBUFS), or the writer
                thread cannot be started (EAGAIN).
        """
        self.channel.check_size(message)
        with self._changed:
            if self._is_closing or self.has_ended:
                return
            num_bytes = self._num_bytes + len(message)
            is_full = len(self._outbox) >= MAX_WAITING or num_bytes > MAX_WAITING_BYTES
            if self._outbox and is_full and not may_exceed:
                raise OSError(errno.ENOBUFS, f"{len(self._outbox)} messages wait to be sent")
            if not self._has_writer:
                self._start(self._write, "charonia-writer")
                self._has_writer = True
            self._outbox.append(message)
            self._num_bytes = num_bytes
            self._changed.notify_all()

    def messages(self, *, spin: float = 0.0) -> Iterator[bytes]:
        """Yield messages until the connection ends; see `Channel.receive`.

        Raises:
            TimeoutError: the first message did not come within `FIRST_MESSAGE_S`.
        """
        timeout: float | None = FIRST_MESSAGE_S
        while (message := self.channel.receive(timeout, spin=spin)) is not None:
            timeout = None
            yield message

    def follow(
        self,
        take: Callable[[bytes], None],
        on_end: Callable[[], None],
        *,
        log: Callable[[str], None],
    ) -> None:
        """Pass messages on, in a thread of its own.

        Args:
            take: called with each message; if it raises, the error is logged and this hangs up.
            on_end: called once, after the last message.

        Raises:
            OSError: the thread cannot be started (EAGAIN).
        """

        def read() -> None:
            try:
                while (message := self.channel.receive()) is not None:
                    take(message)
            except Exception:
                log(f"error: a message could not be taken, hanging up: {traceback.format_exc()}")
            self.hang_up()
            self.close()
            on_end()

        self._start(read, "charonia-reader")

    def hang_up(self) -> None:
        """End the connection and drop the outbox; wakes threads that wait in it."""
        with self._changed:
            self.has_ended = True
            self._outbox.clear()
            self._num_bytes = 0
            self._changed.notify_all()
        self.channel.hang_up()

    def close(self) -> None:
        """Send what waits, for up to two seconds, then hang up and close the socket."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.has_ended or not self._outbox, _CLOSE_TIMEOUT_S)
        self.hang_up()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_TIMEOUT_S)
        self.channel.close()

    # ------------------------------------------------------------------ the threads

    def _start(self, run: Callable[[], None], name: str) -> None:
        """Raises OSError (EAGAIN): a limit of processes is reached."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from None
        self._threads.append(thread)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the other end has gone
            while (message := self._next()) is not None:
                self.send(message)
                with self._changed:
                    if self._outbox:  # hanging up empties it
                        self._outbox.popleft()
                        self._num_bytes -= len(message)
                        self._changed.notify_all()
            return
        self.hang_up()

    def _next(self) -> bytes | None:
        """Wait for the next message to send. It stays in the outbox until it is sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._is_closing or self.has_ended)
            return self._outbox[0] if self._outbox else None
