"""What other models say to the scheduler through a socket: requests of proxies such as `generate`,
which are answered, and what becomes of the chunks that `postprocessor` hands on.

Owns the messages, and how each is sent; `relay_client` and `relay_server` are the ends. Must not
know what a request asks for, nor Triton.

    a proxy                                                                     scheduler
      any thread ─► outbox ─► writer ─► RelayedRequest, Cancellation, … ─────► reader ─► takes in
      passes on ◄── reader ◄────────────── RelayedAnswer ◄─ writer ◄─ outbox ◄─ any thread

    postprocessor ──────────────────────► Delivery, Cancellation, Disconnect ───► reader

Every request gets answers up to a final one, which may be a refusal. Of the others a proxy says
when it has passed them on, and only a few of a request are under way before that: what piles up
leaves as one. Neither side ever waits for the other: what a stopped process does not take stays in
the outbox, as far as that reaches; then requests are refused, and a proxy that does not take its
answers is hung up on. The end of a connection cancels all requests that came through it, because
their client is seen to have gone. A process that has said deliveries and dies without a word has
lost what it had in hand.
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
"""Beside the scheduler's model.py."""


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


class Acknowledgement(msgspec.Struct, frozen=True, tag=True):
    """The proxy has passed on answers to the request of this key, so many by now."""

    key: str
    number: int


class Delivery(msgspec.Struct, frozen=True, tag=True):
    """Responses of the request of this key, up to this one, have been handed on to its client."""

    key: str
    number: int


class Disconnect(msgspec.Struct, frozen=True, tag="Parting"):
    """Who handed responses on ends in order, and has nothing in hand any more.

    Its tag is of an older name: processes of two versions may meet while models are reloaded.
    """


class ServerStopping(msgspec.Struct, frozen=True, tag=True):
    """The server is shutting down; it waits for the requests of this proxy first."""


class RelayedAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """An answer to one request: outputs, or an error and its kind, which always is final."""

    key: str
    outputs: dict[str, list[Any]] = {}
    error: str | None = None
    kind: str = ""
    has_suffix: bool = True  # as `CharoniaError.has_suffix`
    is_final: bool = True

    @property
    def failure(self) -> CharoniaError | None:
        """The error, where it is one."""
        if self.error is None:
            return None
        return error_of(self.error, self.kind) if self.has_suffix else ExactTextError(self.error)


Message = RelayedRequest | Cancellation | Acknowledgement | Delivery | Disconnect | ServerStopping
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


def post(connection: Connection, message: Message | RelayedAnswer) -> None:
    """Send a message soon. Nothing happens after the connection's end.

    Raises:
        InvalidRequestError: it is too long.
        UnavailableError: too much waits already for the process at the other end.
    """
    try:
        connection.post(encode(message))
    except OSError as error:
        if error.errno == errno.EMSGSIZE:
            raise InvalidRequestError(
                f"the request cannot be handed on: {error.strerror}"
            ) from None
        raise UnavailableError(f"the scheduler takes nothing: {error.strerror}") from None
