"""Accepts connections to a socket, checks them, bounds their number, and serves them.

Owns the listening socket, and each connection's thread until it ends. Knows nothing about the
messages.

    accept ──► admit: may it be served? ──► serve, until it is over ──► close
               within limits of time and bytes; if there are too many connections, the oldest one
               that is not admitted yet is closed: silent ones keep nobody out
"""

import contextlib
import socket
import threading
import time
import traceback
from collections.abc import Callable

from charonia.events import RareLog
from charonia.sockets.channel import MAX_BYTES, Channel
from charonia.sockets.connection import Connection

MAX_CONNECTIONS = 64
_TRY_AGAIN_S = 0.1
_NOTICE_TIMEOUT_S = 1.0
_LISTENER_TIMEOUT_S = 5.0


class Server:
    """Serves each connection in a thread of its own, from `start` on; earlier ones wait.

    Args:
        listener: closed by this server.
        admit: whether a connection may be served; it may receive and send, and raise OSError.
        serve: called with an admitted connection. If it returns True, the connection stays open for
            somebody else. If it raises or returns anything else, the connection is closed.
        log: takes one line, from any thread.
        max_bytes: longest message, see `Channel`.
    """

    def __init__(
        self,
        listener: socket.socket,
        admit: Callable[[Channel], bool],
        serve: Callable[[Connection], bool | None],
        *,
        log: Callable[[str], None],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._listener = listener
        self._admit = admit
        self._serve = serve
        self._log = log
        self._complain = RareLog(log)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._is_closing = False
        self._strangers: dict[Connection, threading.Thread] = {}  # not admitted yet, oldest first
        self._served: dict[Connection, threading.Thread] = {}
        self._thread = threading.Thread(target=self._run, name="charonia-listener", daemon=True)

    def start(self) -> None:
        """Begin to accept connections."""
        self._thread.start()

    def stop_listening(self) -> None:
        """Accept no further connections; existing ones stay."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        if self._thread.ident is not None:
            self._thread.join(_LISTENER_TIMEOUT_S)
        self._listener.close()

    def close(self, notice: bytes | None = None, timeout: float = 5.0) -> None:
        """Stop listening, take no more messages, and hang up when those received are answered.

        Args:
            notice: sent on each connection at once, before outstanding answers: these may take
                longer than this process has.
            timeout: seconds that each connection may take to end.
        """
        self.stop_listening()
        with self._lock:
            served, strangers = dict(self._served), dict(self._strangers)
        for connection in strangers:
            connection.hang_up()
        for connection in served:
            if notice is not None:
                with contextlib.suppress(OSError):
                    connection.send(notice, _NOTICE_TIMEOUT_S)
            connection.channel.stop_receiving()
        for thread in (served | strangers).values():
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            try:
                accepted, address = self._listener.accept()
            except OSError:  # closing, or no descriptors are left for the moment
                if self._is_closing:
                    return
                time.sleep(_TRY_AGAIN_S)
                continue
            channel = Channel(accepted, max_bytes=self._max_bytes)
            with self._lock:
                if self._is_closing or not self._make_room():
                    channel.close()
                    continue
                connection = Connection(channel)
                thread = threading.Thread(
                    target=self._host,
                    args=(connection, _origin(address)),
                    name="charonia-connection",
                    daemon=True,
                )
                try:
                    thread.start()
                except RuntimeError:  # a limit of processes, perhaps for a moment only
                    self._complain("refused: no thread can be started for a connection")
                    channel.close()
                    continue
                self._strangers[connection] = thread

    def _make_room(self) -> bool:
        """Make room for one more connection; return whether there is. Needs the lock.

        If there are too many, the oldest stranger is closed.
        """
        if len(self._strangers) + len(self._served) < MAX_CONNECTIONS:
            return True
        if not self._strangers:
            self._complain(f"refused: {MAX_CONNECTIONS} connections are there already")
            return False
        oldest = next(iter(self._strangers))
        del self._strangers[oldest]
        self._complain(f"hung up: {MAX_CONNECTIONS} connections are there, one has said nothing")
        oldest.hang_up()
        return True

    def _let_in(self, connection: Connection, origin: str) -> bool:
        try:
            is_welcome = self._admit(connection.channel)
        except OSError:  # it has gone, or is silent
            is_welcome = False
        if not is_welcome:
            self._complain(f"refused: whoever connected{origin} does not belong here")
            return False
        with self._lock:
            thread = self._strangers.pop(connection, None)
            if thread is None or self._is_closing:  # it was closed to make room
                return False
            self._served[connection] = thread
        return True

    def _host(self, connection: Connection, origin: str) -> None:
        lives_on = False
        try:
            if self._let_in(connection, origin):
                lives_on = self._serve(connection) is True
        except OSError:
            pass  # it has gone, or is silent
        except Exception:
            self._log(f"error: a message could not be taken, hanging up: {traceback.format_exc()}")
        finally:
            if not lives_on:
                connection.close()
            with self._lock:
                self._strangers.pop(connection, None)
                self._served.pop(connection, None)


def _origin(address: object) -> str:
    """Describe the origin of a connection, if it has an address."""
    return f" from {address[0]}" if isinstance(address, tuple) else ""
