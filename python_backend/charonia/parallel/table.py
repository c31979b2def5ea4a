"""A table of keys and values, by which ranks find each other before they can exchange tensors.

Owns the table in the engine's process, and the access of other ranks to it. They use a second
connection, because torch may ask at any time. Must not know the meaning of keys.

torch.distributed has stores of its own, but its store for several machines has no authentication.
So torch is given this table, see `TableStore`.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import msgspec
from torch.distributed.distributed_c10d import Store

from charonia.errors import RankLostError
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection

MAX_ENTRIES = 2**16
MAX_BYTES = 2**16
"""Maximum size of a message, and so of a value. Values of torch have a few hundred bytes."""
MAX_WAIT_S = 3600.0
_ANSWER_TIMEOUT_S = 10.0
"""Timeout of an answer, in addition to the time that it may wait for a value."""


class Put(msgspec.Struct, frozen=True, tag=True):
    """Set a value."""

    key: str
    value: bytes


class Add(msgspec.Struct, frozen=True, tag=True):
    """Add to a value that is a number; a missing one counts as 0."""

    key: str
    amount: int


class Get(msgspec.Struct, frozen=True, tag=True):
    """Wait for a value."""

    key: str
    seconds: float


Request = Put | Add | Get
_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Request)
_value_decoder: msgspec.msgpack.Decoder[bytes | None] = msgspec.msgpack.Decoder(bytes | None)


class TableView(Protocol):
    """Access to the table, in its own process or from another one."""

    def put(self, key: str, value: bytes) -> None:
        """Set a value."""
        ...

    def add(self, key: str, amount: int) -> bytes:
        """Add to a value that is a decimal number; return the new one."""
        ...

    def get(self, key: str, seconds: float) -> bytes | None:
        """Wait for a value; None if it is not set within `seconds`.

        Raises:
            RankLostError: the table was closed, or cannot be reached.
        """
        ...


class Table:
    """The table itself; a `TableView` for the engine's process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, key: str, value: bytes) -> None:
        """See `TableView`, also for the following methods."""
        with self._changed:
            if len(self._values) >= MAX_ENTRIES and key not in self._values:
                raise RankLostError(f"the ranks' table is full: it has {MAX_ENTRIES} entries")
            self._values[key] = value
            self._changed.notify_all()

    def add(self, key: str, amount: int) -> bytes:
        with self._changed:
            self.put(key, str(int(self._values.get(key, b"0")) + amount).encode())
            return self._values[key]

    def get(self, key: str, seconds: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._is_closed, seconds)
            if self._is_closed:
                raise RankLostError("the engine has ended its ranks' table")
            return self._values.get(key)

    def close(self) -> None:
        """Make all waits fail, now and later."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def serve(self, connection: Connection) -> None:
        """Answer the requests of a rank until its connection ends."""
        connection.channel.max_bytes = MAX_BYTES
        while (message := connection.channel.receive()) is not None:
            connection.send(self.answer(message))

    def answer(self, message: bytes) -> bytes:
        """Answer one request of a rank.

        Raises:
            msgspec.DecodeError: it is not a request. ValueError: `Add` to a value that is not a
                number.
            RankLostError: the table is full or closed.
        """
        value: bytes | None = None
        match _request_decoder.decode(message):
            case Put(key, value_put):
                self.put(key, value_put)
            case Add(key, amount):
                value = self.add(key, amount)
            case Get(key, seconds):
                value = self.get(key, min(max(seconds, 0.0), MAX_WAIT_S))
        return _encoder.encode(value)


class RemoteTable:
    """A `TableView` of the table in the engine's process, for another process. Thread-safe.

    Args:
        channel: a connection to that process, used by this object alone.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._channel.max_bytes = MAX_BYTES
        self._lock = threading.Lock()

    def put(self, key: str, value: bytes) -> None:
        """See `TableView`, also for the following methods."""
        self._ask(Put(key, value))

    def add(self, key: str, amount: int) -> bytes:
        return self._ask(Add(key, amount)) or b""

    def get(self, key: str, seconds: float) -> bytes | None:
        return self._ask(Get(key, seconds), seconds)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _ask(self, request: Request, seconds: float = 0.0) -> bytes | None:
        try:
            with self._lock:
                answer = self._exchange(_encoder.encode(request), seconds + _ANSWER_TIMEOUT_S)
            if answer is not None:
                return _value_decoder.decode(answer)
        except (OSError, msgspec.DecodeError) as error:
            raise RankLostError(f"the engine's table does not answer: {error}") from None
        raise RankLostError("the engine's table has gone")

    def _exchange(self, message: bytes, timeout: float) -> bytes | None:
        self._channel.check_size(message)
        try:
            self._channel.send(message, _ANSWER_TIMEOUT_S)
            return self._channel.receive(timeout)
        except OSError:
            self._channel.close()  # a late answer would be read as the next one
            raise


class TableStore(Store):
    """The table as a store of torch.distributed, which calls it from C++.

    Args:
        timeout: for requests of torch without a timeout.
    """

    def __init__(self, table: TableView, timeout: timedelta) -> None:
        super().__init__()
        self._table = table
        self._timeout = timeout

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch passes str
        """See torch.distributed.Store, also for the following methods."""
        self._table.put(key, value)

    def get(self, key: str) -> bytes:
        return self._get(key, self._timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._table.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._table.get(key, 0.0) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._get(key, timeout or self._timeout)

    def _get(self, key: str, timeout: timedelta) -> bytes:
        value = self._table.get(key, timeout.total_seconds())
        if value is None:
            raise RankLostError(f"a rank has not said {key!r} within {timeout.total_seconds():g} s")
        return value
