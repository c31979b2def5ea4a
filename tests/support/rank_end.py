"""A rank's end of a connection, and the table that ranks share, for tests of one side.

Owns introducing it. Must not know what is said then.
"""

import contextlib
import socket
from collections.abc import Iterator

from charonia.parallel.handshake import admit_rank, find_engine
from charonia.parallel.table import RemoteTable, Table
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from charonia.sockets.server import Server


def introduced(address: tuple[str, int], secret: str) -> Connection:
    """Connect to a rendezvous, and show that this is a rank."""
    channel = Channel(socket.create_connection(address))
    assert find_engine(channel, secret)
    return Connection(channel)


@contextlib.contextmanager
def served_table(secret: str) -> Iterator[tuple[Table, int]]:
    """A table, and the port at which it is served."""
    table = Table()
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(listener, lambda channel: admit_rank(channel, secret), table.serve, log=print)
    server.start()
    try:
        yield table, listener.getsockname()[1]
    finally:
        table.close()
        server.close()


def remote_table(port: int, secret: str) -> RemoteTable:
    """The way to it."""
    return RemoteTable(introduced(("127.0.0.1", port), secret).channel)
