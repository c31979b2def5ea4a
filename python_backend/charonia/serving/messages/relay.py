"""The messages of other models to the scheduler: requests of proxies such as `generate`, with their
answers, and reports of `postprocessor` on the chunks that it passes on.

Owns the messages and how each is sent; `relay_client` and `relay_server` are the ends. Must not
know the contents of a request, nor Triton.

    a proxy                                                                     scheduler
      any thread ─► outbox ─► writer ─► RelayedRequest, Cancellation, … ─────► reader ─► takes in
      passes on ◄── reader ◄────────────── RelayedAnswer ◄─ writer ◄─ outbox ◄─ any thread

    postprocessor ──────────────────────► Delivery, Cancellation, Disconnect ───► reader

Every request gets answers up to a final one, which may be an error. A proxy acknowledges the other
answers when it has passed them on. Only a few are under way before that, and later output gathers
into one answer. Neither side waits for the other. Messages to a stopped process stay in the outbox.
If that is full, requests are refused, and a proxy that does not read its answers is disconnected.
Cancellations and acknowledgements are always queued: there are only a few for each request.
The end of a connection cancels all its requests. If a process that reports deliveries dies without
a `Disconnect`, the responses that it held are lost.
"""

import errno
from typing import Any

import msgspec
import numpy as np

from charonia.errors import (
    CharoniaError,
    ExactTextError,
    InvalidRequestError,
    UnavailableError,
    error_of,
)
from charonia.serving.requests.raw_request import Array, RawRequest
from charonia.sockets.connection import Connection
from charonia.sockets.local import SOCKET_SUFFIX

REQUESTS_SOCKET = f"requests{SOCKET_SUFFIX}"
"""Name of the socket, beside the scheduler's model.py."""


class RelayedRequest(msgspec.Struct, frozen=True, tag=True):
    """A request of a client.

    Attributes:
        key: identifies it until it is answered; random.
    """

    key: str
    raw: RawRequest


class Cancellation(msgspec.Struct, frozen=True, tag=True):
    """Cancels the request of this key, which still gets its answer."""

    key: str


class Acknowledgement(msgspec.Struct, frozen=True, tag=True):
    """The proxy has passed on this number of answers to the request of this key, in all."""

    key: str
    number: int


class Delivery(msgspec.Struct, frozen=True, tag=True):
    """Responses of the request of this key, up to this number, were passed on to its client."""

    key: str
    number: int


class Disconnect(msgspec.Struct, frozen=True, tag="Parting"):
    """A process that passed responses on ends in order, and holds none any more.

    The tag is an older name: processes of two versions may meet while models are reloaded.
    """


class ServerStopping(msgspec.Struct, frozen=True, tag=True):
    """The server is shutting down; it waits for the requests of this proxy first."""


class RelayedAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """An answer to one request: outputs, or an error and its kind. Errors are always final."""

    key: str
    outputs: dict[str, list[Any]] = {}
    error: str | None = None
    kind: str = ""
    has_suffix: bool = True  # as `CharoniaError.has_suffix`
    is_final: bool = True

    @property
    def failure(self) -> CharoniaError | None:
        """The error, or None."""
        if self.error is None:
            return None
        return error_of(self.error, self.kind) if self.has_suffix else ExactTextError(self.error)


Message = RelayedRequest | Cancellation | Acknowledgement | Delivery | Disconnect | ServerStopping
"""Messages to the scheduler."""


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
    """Raises ValueError, RecursionError: the data is not such a message."""
    message: Message = _message_decoder.decode(data)
    return message


def decode_answer(data: bytes) -> RelayedAnswer:
    """Raises ValueError, RecursionError: the data is not such a message."""
    return _answer_decoder.decode(data)


def post(
    connection: Connection, message: Message | RelayedAnswer, *, may_exceed: bool = False
) -> None:
    """Queue a message. After the connection's end it is dropped.

    Args:
        may_exceed: see `Connection.post`.

    Raises:
        InvalidRequestError: it is too long.
        UnavailableError: the outbox is full.
    """
    try:
        connection.post(encode(message), may_exceed=may_exceed)
    except OSError as error:
        if error.errno == errno.EMSGSIZE:
            raise InvalidRequestError(
                f"the request cannot be handed on: {error.strerror}"
            ) from None
        raise UnavailableError(f"the scheduler takes nothing: {error.strerror}") from None
