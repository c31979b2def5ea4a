"""One end of a connection, for any number of threads.

Owns who sends when, what waits to be sent, and the threads that send and receive. Must not know
what is in a message, or how the connection came about.

    send()   any thread ──────────────────────────► socket     at once, one after the other
    post()   any thread ─► outbox ─► writer ──────► socket     soon; never waits
    messages(), follow()              the caller, or a reader ◄── socket

The outbox is bounded in messages and in bytes: an end that takes nothing costs no more than that.
The writer begins with the first `post`, so who only sends has no further thread.
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
"""Of the outbox; one message of any legal length has always room in an empty one."""
FIRST_MESSAGE_S = 10.0
"""Whoever connects has something to say by then."""
_CLOSE_TIMEOUT_S = 2.0


class Connection:
    """One end.

    Args:
        channel: nobody else uses it but to receive, in one thread.

    Attributes:
        has_ended: nothing comes or goes any more.
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
            OSError: the other end has gone, or takes nothing for `timeout` seconds; or the message
                is too long.
        """
        if not self._sending.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError
        try:
            self.channel.send(message, timeout)
        finally:
            self._sending.release()

    def post(self, message: bytes) -> None:
        """Send a message soon; never waits. Nothing happens after the end.

        Raises:
            OSError: the message is too long (EMSGSIZE), too much waits already (ENOBUFS), or there
                can be no further thread (EAGAIN).
        """
        self.channel.check_size(message)
        with self._changed:
            if self._is_closing or self.has_ended:
                return
            num_bytes = self._num_bytes + len(message)
            if len(self._outbox) >= MAX_WAITING or (self._outbox and num_bytes > MAX_WAITING_BYTES):
                raise OSError(errno.ENOBUFS, f"{len(self._outbox)} messages wait to be sent")
            if not self._has_writer:
                self._start(self._write, "charonia-writer")
                self._has_writer = True
            self._outbox.append(message)
            self._num_bytes = num_bytes
            self._changed.notify_all()

    def messages(self, *, spin: float = 0.0) -> Iterator[bytes]:
        """What comes, until nothing does any more; see `Channel.receive`.

        Raises:
            TimeoutError: not even the first message came in time.
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
        """Hand on what comes, in a thread of its own.

        Args:
            take: called with each message; when it raises, that is logged, and this hangs up.
            on_end: called once, after the last message.

        Raises:
            OSError: there can be no further thread (EAGAIN).
        """

        def read() -> None:
            try:
                while (message := self.channel.receive()) is not None:
                    take(message)
            except Exception:
                log(f"a message could not be taken, hanging up: {traceback.format_exc()}")
            self.hang_up()
            self.close()
            on_end()

        self._start(read, "charonia-reader")

    def hang_up(self) -> None:
        """End the connection, also for threads that wait in it; what waits is dropped."""
        with self._changed:
            self.has_ended = True
            self._outbox.clear()
            self._num_bytes = 0
            self._changed.notify_all()
        self.channel.hang_up()

    def close(self) -> None:
        """Send what waits, as far as the other side takes it, hang up and let go."""
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
        """Raises OSError (EAGAIN): there is a limit of processes."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from None
        self._threads.append(thread)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the other side has gone
            while (message := self._next()) is not None:
                self.send(message)
                with self._changed:
                    if self._outbox:  # it was not hung up
                        self._outbox.popleft()
                        self._num_bytes -= len(message)
                        self._changed.notify_all()
            return
        self.hang_up()

    def _next(self) -> bytes | None:
        """Wait for a message to be sent, which stays in the outbox meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._is_closing or self.has_ended)
            return self._outbox[0] if self._outbox else None
