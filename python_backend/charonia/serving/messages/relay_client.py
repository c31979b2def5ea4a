"""The client ends of `relay`: a proxy's, and that of a model that passes chunks on.

Owns the messages as methods, and the thread that reads the answers. Must not know Triton: any
process that may open the socket can use these. `hosts.scheduler_address` has the part for models of
Triton only: to find out whether there is a scheduler.
"""

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from charonia.errors import UnavailableError
from charonia.serving.messages.relay import (
    REQUESTS_SOCKET,
    Acknowledgement,
    Cancellation,
    Delivery,
    Disconnect,
    RelayedAnswer,
    RelayedRequest,
    ServerStopping,
    decode_answer,
    encode,
    post,
)
from charonia.serving.requests.raw_request import RawRequest
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection

_SEND_TIMEOUT_S = 1.0


def requests_socket(repository: Path, scheduler_model: str) -> Path:
    """The socket of a scheduler.

    Args:
        repository: directory of the models. scheduler_model: its name.
    """
    return repository / scheduler_model / "1" / REQUESTS_SOCKET


class AnswerEvents(Protocol):
    """Receives the scheduler's messages, one after the other, in a thread of the client."""

    def on_answer(self, answer: RelayedAnswer) -> None:
        """An answer to a request has arrived. If this raises, the client disconnects."""
        ...

    def on_end(self) -> None:
        """The connection has ended, and no more answers come. Called once."""
        ...


class SchedulerClient:
    """One connection to the scheduler, for requests and their answers.

    For all threads. Only `close` may block.

    Args:
        channel: connected to the scheduler's socket; the client closes it.
        events: may be called before the constructor returns.
        log: takes one line, from any thread.

    Raises:
        UnavailableError: the thread that reads the answers cannot be started.
    """

    def __init__(
        self, channel: Channel, events: AnswerEvents, *, log: Callable[[str], None]
    ) -> None:
        self._connection = Connection(channel)
        try:
            self._connection.follow(
                lambda data: events.on_answer(decode_answer(data)), events.on_end, log=log
            )
        except OSError as error:
            self._connection.close()
            raise UnavailableError(f"no answer could be taken: {error.strerror}") from None

    def send(self, raw: RawRequest) -> str:
        """Send a request; returns its key, which its answers carry.

        It gets answers up to a final one, unless the connection ends.

        Raises:
            InvalidRequestError: it is too long.
            UnavailableError: the outbox to the scheduler is full.
        """
        key = secrets.token_hex(16)
        post(self._connection, RelayedRequest(key, raw))
        return key

    def cancel(self, key: str) -> None:
        """Cancel a request; it still gets a final answer."""
        self._tell(Cancellation(key))

    def acknowledge(self, key: str, number: int) -> None:
        """Acknowledge the answers to a request that were passed on, by their number.

        The scheduler has only a few unacknowledged answers under way.
        """
        self._tell(Acknowledgement(key, number))

    def note_server_stopping(self) -> None:
        """Tell the scheduler that the server is shutting down; disconnect if that fails."""
        try:
            post(self._connection, ServerStopping())
        except UnavailableError:
            self._connection.hang_up()

    def close(self) -> None:
        """Send the queued messages, as far as the scheduler reads them, and disconnect.

        Live requests are cancelled. `AnswerEvents.on_end` is still called.
        """
        self._connection.close()

    def _tell(self, message: Cancellation | Acknowledgement) -> None:
        # Without a thread that writes, the request was not sent either.
        with contextlib.suppress(UnavailableError):
            post(self._connection, message, may_exceed=True)


class DeliveryClient:
    """One connection to the scheduler, of a process that passes its responses on. For one thread.

    Args:
        channel: connected to the scheduler's socket; the client closes it.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def tell(self, message: Delivery | Cancellation) -> None:
        """Report a response, or a client that has disconnected.

        Raises:
            OSError: the scheduler has ended or does not read.
        """
        self._channel.send(encode(message), _SEND_TIMEOUT_S)

    def part(self) -> None:
        """Send a `Disconnect`, if the scheduler reads it, and disconnect."""
        with contextlib.suppress(OSError):
            self._channel.send(encode(Disconnect()), _SEND_TIMEOUT_S)
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connection without a message."""
        self._channel.close()
