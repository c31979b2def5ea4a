"""What ranks must know of each other before they can exchange tensors: keys and values.

Owns the table, which is in the engine's process, and the way to it from the other ranks: a
connection beside the one for messages, because torch asks from wherever it is. Must not know what
keys mean.

torch.distributed has stores of its own, but the one for several machines takes anybody's word. So
it gets this one, see `TableStore`.
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
"""Of a message, and so of a value. torch's are a few hundred bytes."""
MAX_WAIT_S = 3600.0
_ANSWER_TIMEOUT_S = 10.0
"""For an answer, beside the time that it may wait for a value."""


class Put(msgspec.Struct, frozen=True, tag=True):
    """Set a value."""

    key: str
    value: bytes


class Add(msgspec.Struct, frozen=True, tag=True):
    """Add to a value that is a number, which begins with 0."""

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
    """The table, from wherever it is looked at."""

    def put(self, key: str, value: bytes) -> None:
        """Set a value."""
        ...

    def add(self, key: str, amount: int) -> bytes:
        """Add to a value that is a decimal number; return the new one."""
        ...

    def get(self, key: str, seconds: float) -> bytes | None:
        """Wait for a value; None when there is none within so many seconds.

        Raises:
            RankLostError: the table has gone.
        """
        ...


class Table:
    """The table itself; a `TableView` for the engine's process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, key: str, value: bytes) -> None:
        """See `TableView`, as with all that follows."""
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
        """End all waits with an error, now and later."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def serve(self, connection: Connection) -> None:
        """Answer what a rank asks, until it ends."""
        connection.channel.max_bytes = MAX_BYTES
        while (message := connection.channel.receive()) is not None:
            connection.send(self.answer(message))

    def answer(self, message: bytes) -> bytes:
        """Answer one request of a rank.

        Raises:
            msgspec.DecodeError: it is none. ValueError: what is to be added to is no number.
            RankLostError: the table is full, or has gone.
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
    """The table of an engine's process elsewhere; a `TableView` for any thread.

    Args:
        channel: to it; nobody else uses it.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._channel.max_bytes = MAX_BYTES
        self._lock = threading.Lock()

    def put(self, key: str, value: bytes) -> None:
        """See `TableView`, as with all that follows."""
        self._ask(Put(key, value))

    def add(self, key: str, amount: int) -> bytes:
        return self._ask(Add(key, amount)) or b""

    def get(self, key: str, seconds: float) -> bytes | None:
        return self._ask(Get(key, seconds), seconds)

    def close(self) -> None:
        """Hang up."""
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
            self._channel.close()  # a late answer would be taken for that to the next request
            raise


class TableStore(Store):
    """The table as torch.distributed wants it, which calls this from C++.

    Args:
        timeout: for values that torch asks for without saying how long it would wait.
    """

    def __init__(self, table: TableView, timeout: timedelta) -> None:
        super().__init__()
        self._table = table
        self._timeout = timeout

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # what it is called with
        """See torch.distributed.Store, as with all that follows."""
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
