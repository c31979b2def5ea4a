"""What other models say to the scheduler through a socket: requests of `generate`, which are
answered, and what becomes of the chunks that `postprocessor` hands on.

Owns the messages, both ends of a connection, the scheduler's socket and the way to it. Must not
know what a request asks for.

    generate                                                                scheduler
      any thread ─► outbox ─► writer ─► RelayedRequest, Cancellation ─► reader ─► takes them in
      passes on ◄── reader ◄───────── RelayedAnswer ◄─ writer ◄─ outbox ◄─ any thread

    postprocessor ────────────────────► Delivery, Cancellation ───────► reader

Every request gets one answer, a refusal too. Neither side of `generate` ever waits for the other:
what a stopped process does not take stays in the outbox. The end of a connection cancels all
requests that came through it, because their client is seen to have gone.
"""

import contextlib
import socket
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np

from charonia.connection import Channel
from charonia.errors import CharoniaError, UnavailableError, error_of, split_answer
from charonia.serving.channel import SOCKET_SUFFIX, connect, connections, listen
from charonia.serving.engine_model import clean
from charonia.serving.outlets import Outlet
from charonia.serving.tensors import Array, Outputs, RawRequest

REQUESTS_SOCKET = f"requests{SOCKET_SUFFIX}"
"""Beside the scheduler's model.py."""

_CLOSE_TIMEOUT_S = 2.0


class RelayedRequest(msgspec.Struct, frozen=True, tag=True):
    """A request of a client.

    Attributes:
        key: names it until it is answered; unguessable.
    """

    key: str
    raw: RawRequest


class Cancellation(msgspec.Struct, frozen=True, tag=True):
    """Cancels the request of this key, which still gets its answer."""

    key: str


class Delivery(msgspec.Struct, frozen=True, tag=True):
    """Responses of the request of this key, up to this one, have been handed on to its client."""

    key: str
    number: int


class RelayedAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The whole answer to one request: outputs, or an error and its kind."""

    key: str
    outputs: dict[str, list[Any]] = {}
    error: str | None = None
    kind: str = ""


Message = RelayedRequest | Cancellation | Delivery
"""To the scheduler."""


def _plain(array: Array) -> tuple[str, tuple[int, ...], bytes | list[bytes]]:
    content = array.ravel().tolist() if array.dtype == np.object_ else array.tobytes()
    return array.dtype.str, array.shape, content


def _array(_: type, plain: Any) -> Array:
    dtype, shape, content = plain
    if isinstance(content, list):
        return np.array(content, dtype=np.object_).reshape(shape)
    return np.frombuffer(content, dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_message_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message, dec_hook=_array)
_answer_decoder = msgspec.msgpack.Decoder(RelayedAnswer)


def encode(message: Message | RelayedAnswer) -> bytes:
    """A message as bytes; arrays are their type, shape and content."""
    return _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    """Raises ValueError, RecursionError: it is no such message."""
    message: Message = _message_decoder.decode(data)
    return message


def decode_answer(data: bytes) -> RelayedAnswer:
    """Raises ValueError, RecursionError: it is no such message."""
    return _answer_decoder.decode(data)


class Connection:
    """One end, with a thread for each direction.

    Args:
        take: called with each message, in the reader's thread; when it raises, that is hung up.
        on_end: called once, in the reader's thread, after the last message.
        log: takes one line, from any thread.

    Attributes:
        has_ended: nothing comes or goes any more.
    """

    def __init__(
        self,
        channel: Channel,
        take: Callable[["Connection", bytes], None],
        on_end: Callable[[], None] = lambda: None,
        *,
        log: Callable[[str], None],
    ) -> None:
        self.has_ended = False
        self._channel = channel
        self._take = take
        self._on_end = on_end
        self._log = log
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="charonia-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="charonia-writer", daemon=True)
        self._writer.start()
        self._reader.start()

    def send(self, message: Message | RelayedAnswer) -> None:
        """Send a message, soon; never waits. Nothing happens after the end."""
        self._outbox.put(encode(message))

    def close(self) -> None:
        """Send what waits, as far as the other side takes it, and hang up."""
        self._outbox.put(None)
        self._writer.join(_CLOSE_TIMEOUT_S)
        self._channel.hang_up()
        self._reader.join()

    def _read(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._take(self, message)
        except Exception:
            self._log(f"a message could not be taken, hanging up: {traceback.format_exc()}")
        self.has_ended = True
        self._channel.hang_up()
        self._outbox.put(None)
        self._writer.join()
        self._channel.close()
        self._on_end()

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._channel.send(message)
        except OSError:
            pass  # the other side has gone
        except Exception:
            self._log(f"a message could not be sent, hanging up: {traceback.format_exc()}")
        else:
            return  # closed from this side, which hangs up
        self._channel.hang_up()


class RelayedOutlet:
    """The outlet of a request that came through a connection: a client that cannot stream.

    Args:
        live: keys of the connection's requests that are not answered yet.
    """

    is_polled = False

    def __init__(self, connection: Connection, key: str, live: set[str]) -> None:
        self._connection = connection
        self._key = key
        self._live = live
        live.add(key)

    def send(self, outputs: Outputs, *, is_final: bool) -> None:
        """Send the one response."""
        assert is_final, "a relayed request does not stream"
        self._live.discard(self._key)
        self._connection.send(RelayedAnswer(self._key, dict(outputs)))

    def fail(self, error: CharoniaError) -> None:
        """Send an error."""
        self._live.discard(self._key)
        self._connection.send(RelayedAnswer(self._key, error=str(error), kind=error.kind))

    def is_cancelled(self) -> bool:
        """Whether the connection has ended. A cancellation comes by message."""
        return self._connection.has_ended


class RelayServer:
    """The scheduler's end: any number of connections.

    Args:
        path: where the socket is made; an old one is replaced.
        take: gets each request: its key, itself, and where its answer goes. Called in several
            threads; answers its own errors.
        cancel: called with the key of a request to be cancelled.
        delivered: called with the key of a request of which responses were handed on, and the
            number of the last. end_deliveries: called when a connection has ended, through which
            such words may have come.
        log: takes one line, from any thread.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(
        self,
        path: Path,
        take: Callable[[str, RawRequest, Outlet], None],
        *,
        cancel: Callable[[str], None],
        delivered: Callable[[str, int], None],
        end_deliveries: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        self._take = take
        self._cancel = cancel
        self._delivered = delivered
        self._end_deliveries = end_deliveries
        self._is_closing = False
        self._log = log
        self._connections: list[Connection] = []
        self._listener = listen(path)
        self._thread = threading.Thread(target=self._run, name="charonia-requests", daemon=True)

    def start(self) -> None:
        """Take connections; those made before have waited."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening, send the answers that there are, and hang up."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _run(self) -> None:
        for channel in connections(self._listener, lambda: self._is_closing):
            live: set[str] = set()
            connection = Connection(
                channel, partial(self._on_message, live), partial(self._on_end, live), log=self._log
            )
            living = [one for one in self._connections if not one.has_ended]
            self._connections = [*living, connection]

    def _on_message(self, live: set[str], connection: Connection, data: bytes) -> None:
        match decode_message(data):
            case Delivery(key, number):
                self._delivered(key, number)
            case Cancellation(key):
                self._cancel(key)
            case RelayedRequest(key, raw):
                self._take(key, raw, RelayedOutlet(connection, key, live))

    def _on_end(self, live: set[str]) -> None:
        self._end_deliveries()
        for key in list(live):
            self._cancel(key)


class SchedulerAddress:
    """Where the scheduler is, for a model in the same repository.

    Args:
        scheduler_model: its name. repository: the models' folders.
    """

    def __init__(self, pb_utils: Any, scheduler_model: str, repository: Path) -> None:
        self._pb_utils = pb_utils
        self._scheduler_model = scheduler_model
        self._path = repository / scheduler_model / "1" / REQUESTS_SOCKET

    def connect(self) -> Channel:
        """Connect, in the thread of `execute`.

        The scheduler takes connections once a request has shown it that Triton has loaded it, so it
        gets one: a probe whose text is not asked for. The answer has no tensors, because BLS makes
        those without holding Python's lock, see `channel`.

        Raises:
            CharoniaError: there is no scheduler, or it answers with this error.
        """
        pb_utils = self._pb_utils
        try:
            knock = pb_utils.InferenceRequest(
                model_name=self._scheduler_model,
                requested_output_names=["timing"],
                inputs=[pb_utils.Tensor("probe", np.array([True]))],
            )
            for response in knock.exec(decoupled=True):
                if response.has_error():
                    message, kind = split_answer(response.error().message())
                    raise error_of(clean(message), kind or UnavailableError.kind)
            return connect(self._path)
        except pb_utils.TritonModelException as error:
            raise UnavailableError(clean(str(error))) from None
        except OSError as error:
            name = "/".join(self._path.parts[-3:])
            raise UnavailableError(f"the scheduler's socket, {name}: {error.strerror}") from None
