"""What other models say to the scheduler through a socket: requests of fronts such as `generate`,
which are answered, and what becomes of the chunks that `postprocessor` hands on.

Owns the messages, both ends of a connection, the scheduler's socket and the way to it. Must not
know what a request asks for.

    a front                                                                     scheduler
      any thread ─► outbox ─► writer ─► RelayedRequest, Cancellation, … ─────► reader ─► takes in
      passes on ◄── reader ◄────────────── RelayedAnswer ◄─ writer ◄─ outbox ◄─ any thread

    postprocessor ──────────────────────► Delivery, Cancellation, Parting ───► reader

Every request gets answers up to a final one, which may be a refusal. Of the others a front says
when it has passed them on, and only a few of a request are under way before that: what piles up
leaves as one. Neither side ever waits for the other: what a stopped process does not take stays in
the outbox, as far as that reaches; then requests are refused, and a front that does not take its
answers is hung up on. The end of a connection cancels all requests that came through it, because
their client is seen to have gone. A process that has said deliveries and dies without a word has
lost what it had in hand.
"""

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from charonia.errors import (
    CharoniaError,
    ExactTextError,
    InvalidRequestError,
    UnavailableError,
    error_of,
    split_answer,
)
from charonia.events import RareLog, event
from charonia.serving.lifecycle.engine_liveness import start_time
from charonia.serving.lifecycle.readiness import clean
from charonia.serving.requests.outlets import Outlet
from charonia.serving.requests.raw_request import Array, Outputs, RawRequest
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from charonia.sockets.local import SOCKET_SUFFIX, connect, is_same_user, listen, peer_pid
from charonia.sockets.server import Server

REQUESTS_SOCKET = f"requests{SOCKET_SUFFIX}"
"""Beside the scheduler's model.py."""
_DEATH_S = 0.2
"""That a killed process may take to end once the kernel has closed its connections."""


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
    """The front has passed on answers to the request of this key, so many by now."""

    key: str
    number: int


class Delivery(msgspec.Struct, frozen=True, tag=True):
    """Responses of the request of this key, up to this one, have been handed on to its client."""

    key: str
    number: int


class Parting(msgspec.Struct, frozen=True, tag=True):
    """Who handed responses on ends in order, and has nothing in hand any more."""


class ServerStopping(msgspec.Struct, frozen=True, tag=True):
    """The server is shutting down; it waits for the requests of this front first."""


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


Message = RelayedRequest | Cancellation | Acknowledgement | Delivery | Parting | ServerStopping
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


class RelayedOutlet:
    """The outlet of a request that came through a connection.

    Args:
        live: keys of the connection's requests that are not answered yet.
    """

    is_polled = False
    is_acknowledged = True

    def __init__(self, connection: Connection, key: str, live: set[str]) -> None:
        self._connection = connection
        self._key = key
        self._live = live
        live.add(key)

    def send(self, outputs: Outputs, *, is_final: bool) -> None:
        """Send a response; one that is too long for a message becomes an error."""
        self._post(RelayedAnswer(self._key, dict(outputs), is_final=is_final))

    def fail(self, error: CharoniaError) -> None:
        """Send an error."""
        self._post(
            RelayedAnswer(self._key, error=str(error), kind=error.kind, has_suffix=error.has_suffix)
        )

    def is_cancelled(self) -> bool:
        """Whether the connection has ended. A cancellation comes by message."""
        return self._connection.has_ended

    def _post(self, answer: RelayedAnswer) -> None:
        if answer.is_final:
            self._live.discard(self._key)
        try:
            post(self._connection, answer)
        except InvalidRequestError:
            self.fail(UnavailableError("the answer is too long to be handed on in one piece"))
            if not answer.is_final:
                raise  # the request is to go no further
        except UnavailableError:
            self._connection.hang_up()  # nobody takes the answers of this connection


class RelayServer:
    """The scheduler's end: any number of connections.

    Args:
        path: where the socket is made; an old one is replaced.
        take: gets each request: its key, itself, and where its answer goes. Called in several
            threads; answers its own errors.
        cancel: called with the key of a request to be cancelled.
        acknowledge: called with the key of a request and the number of its answers that its front
            has passed on.
        delivered: called with the key of a request of which responses were handed on, and the
            number of the last. end_deliveries: called when a connection has ended, through which
            such words came; with whether its process has died without a word.
        server_stopping: called when a front has been told that the server is shutting down.
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
        acknowledge: Callable[[str, int], None],
        delivered: Callable[[str, int], None],
        end_deliveries: Callable[[bool], None],
        server_stopping: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        self._take = take
        self._cancel = cancel
        self._acknowledge = acknowledge
        self._delivered = delivered
        self._end_deliveries = end_deliveries
        self._server_stopping = server_stopping
        self._server = Server(listen(path), is_same_user, self._serve, log=log)

    def start(self) -> None:
        """Take connections; those made before have waited."""
        self._server.start()

    def close(self) -> None:
        """Stop listening, send the answers that there are, and hang up."""
        self._server.close()

    def _serve(self, connection: Connection) -> None:
        live: set[str] = set()
        peer = _Peer(connection.channel)
        try:
            for data in connection.messages():
                self._on_message(live, connection, peer, data)
        finally:
            if peer.hands_on:
                self._end_deliveries(not peer.has_parted and peer.has_died())
            for key in list(live):
                self._cancel(key)

    def _on_message(
        self, live: set[str], connection: Connection, peer: "_Peer", data: bytes
    ) -> None:
        match decode_message(data):
            case Acknowledgement(key, number):
                self._acknowledge(key, number)
            case Delivery(key, number):
                peer.hands_on = True
                self._delivered(key, number)
            case Parting():
                peer.has_parted = True
            case ServerStopping():
                self._server_stopping()
            case Cancellation(key):
                self._cancel(key)
            case RelayedRequest(key, raw):
                self._take(key, raw, RelayedOutlet(connection, key, live))


class _Peer:
    """The process at the other end of a connection.

    Attributes:
        hands_on: it has told of responses. has_parted: it has said that it ends.
    """

    def __init__(self, channel: Channel) -> None:
        self.hands_on = False
        self.has_parted = False
        self._pid = peer_pid(channel)
        self._started = start_time(self._pid)

    def has_died(self) -> bool:
        """Whether it ends, or has; asked when its connection has, which a kill ends first."""
        deadline = time.monotonic() + _DEATH_S
        # A process may have ended before this looked for the first time.
        while self._started is not None and start_time(self._pid) == self._started:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


class SchedulerAddress:
    """Where the scheduler is, for a model in the same repository.

    Args:
        scheduler_model: its name. repository: the models' folders. log: takes one line, from any
            thread.
    """

    def __init__(
        self,
        pb_utils: Any,
        scheduler_model: str,
        repository: Path,
        *,
        log: Callable[[str], None],
    ) -> None:
        self._pb_utils = pb_utils
        self._complain = RareLog(log)
        self._scheduler_model = scheduler_model
        self._path = repository / scheduler_model / "1" / REQUESTS_SOCKET

    def connect(self) -> Channel:
        """Connect, in the thread of `execute`.

        The scheduler takes connections once a request has shown it that Triton has loaded it, so it
        gets one: a probe whose text is not asked for. The answer has no tensors, because BLS makes
        those without holding Python's lock, see `readiness`.

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
            self._complain(event("scheduler_unreachable", socket=name, reason=error.strerror))
            raise UnavailableError(f"the scheduler cannot be reached: {error.strerror}") from None
