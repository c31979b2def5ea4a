"""The scheduler's end of `relay`: takes requests and sends the answers.

Owns the socket, the requests of each connection, and the effects of its end. Must not know the
contents of a request.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from charonia.errors import CharoniaError, InvalidRequestError, UnavailableError
from charonia.serving.messages.relay import (
    Acknowledgement,
    Cancellation,
    Delivery,
    Disconnect,
    RelayedAnswer,
    RelayedRequest,
    ServerStopping,
    decode_message,
    post,
)
from charonia.serving.requests.raw_request import Outputs, RawRequest
from charonia.serving.requests.responders import Responder
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from charonia.sockets.local import is_same_user, listen, peer_pid
from charonia.sockets.server import Server
from charonia.supervision.process_table import start_time

_DEATH_S = 0.2
"""Time that a killed process may need to end after its connections are closed, in seconds."""


class RelayedResponder:
    """The responder of a request that came through a connection.

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
        """Return whether the connection has ended. A cancellation comes by message."""
        return self._connection.has_ended

    def _post(self, answer: RelayedAnswer) -> None:
        if answer.is_final:
            self._live.discard(self._key)
        try:
            post(self._connection, answer)
        except InvalidRequestError:
            self.fail(UnavailableError("the answer is too long to be handed on in one piece"))
            if not answer.is_final:
                raise  # this cancels the request
        except UnavailableError:
            self._connection.hang_up()  # the proxy does not read its answers


class RelayEvents(Protocol):
    """Receives the messages of proxies; called in a thread for each connection."""

    def on_request(self, key: str, raw: RawRequest, responder: Responder) -> None:
        """A request has arrived. Its answer goes to the responder, even if it is an error."""
        ...

    def on_cancelled(self, key: str) -> None:
        """The client of a request, or its proxy, has disconnected."""
        ...

    def on_acknowledged(self, key: str, number: int) -> None:
        """A proxy has passed on this number of answers to a request."""
        ...

    def on_server_stopping(self) -> None:
        """A proxy has seen that the server is shutting down."""
        ...


class Deliveries(Protocol):
    """Receives the reports of `postprocessor`; called in the connection's thread."""

    def report(self, key: str, number: int) -> None:
        """Responses of a request, up to this number, were passed on."""
        ...

    def stop_reports(self, is_lost: bool) -> None:
        """A connection that sent reports has ended.

        Args:
            is_lost: whether its process died without a `Disconnect`.
        """
        ...


class RelayServer:
    """The scheduler's end: any number of connections.

    Args:
        path: where the socket is made; an old one is replaced.
        log: takes one line, from any thread.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(
        self,
        path: Path,
        events: RelayEvents,
        deliveries: Deliveries,
        *,
        log: Callable[[str], None],
    ) -> None:
        self._events = events
        self._deliveries = deliveries
        self._server = Server(listen(path), is_same_user, self._serve, log=log)

    def start(self) -> None:
        """Accept connections; earlier ones have waited."""
        self._server.start()

    def close(self) -> None:
        """Stop listening, send the queued answers, and disconnect."""
        self._server.close()

    def _serve(self, connection: Connection) -> None:
        live: set[str] = set()
        peer = _Peer(connection.channel)
        try:
            for data in connection.messages():
                self._on_message(live, connection, peer, data)
        finally:
            if peer.hands_on:
                self._deliveries.stop_reports(not peer.has_parted and peer.has_died())
            for key in list(live):
                self._events.on_cancelled(key)

    def _on_message(
        self, live: set[str], connection: Connection, peer: "_Peer", data: bytes
    ) -> None:
        match decode_message(data):
            case Acknowledgement(key, number):
                self._events.on_acknowledged(key, number)
            case Delivery(key, number):
                peer.hands_on = True
                self._deliveries.report(key, number)
            case Disconnect():
                peer.has_parted = True
            case ServerStopping():
                self._events.on_server_stopping()
            case Cancellation(key):
                self._events.on_cancelled(key)
            case RelayedRequest(key, raw):
                self._events.on_request(key, raw, RelayedResponder(connection, key, live))


class _Peer:
    """The process at the other end of a connection.

    Attributes:
        hands_on: whether it has reported responses. has_parted: whether it has sent a `Disconnect`.
    """

    def __init__(self, channel: Channel) -> None:
        self.hands_on = False
        self.has_parted = False
        self._pid = peer_pid(channel)
        self._started = start_time(self._pid)

    def has_died(self) -> bool:
        """Return whether the process ends now or has ended. A kill closes its connections first."""
        deadline = time.monotonic() + _DEATH_S
        # The process may have ended before its start time was read.
        while self._started is not None and start_time(self._pid) == self._started:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True
