"""A relay of connections to a server, which counts what the server sends.

Owns sockets and threads. Must not know what passes.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator

_PIECE_BYTES = 2**16


class CountingRelay:
    """Passes connections on to a server.

    Args:
        address: of the server, `host:port`.

    Attributes:
        address: where it listens, `host:port`. num_bytes: from the server so far.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._servers: set[socket.socket] = set()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Cut all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for one in (self._listener, *self._sockets):
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._sockets += [client, server]
            self._servers.add(server)
            for ends in ((client, server), (server, client)):
                thread = threading.Thread(target=self._pass, args=ends, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                if source in self._servers:
                    with self._lock:
                        self.num_bytes += len(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def counting_relay(address: str) -> Iterator[CountingRelay]:
    """A relay to a server, for the duration of this context."""
    with contextlib.closing(CountingRelay(address)) as relay:
        yield relay
