"""The other ends of the socket that `relay` describes: a proxy's, and that of who hands chunks on.

Owns what may be said there, as methods, and the thread that hears the answers. Must not know
Triton: a process of any kind that may open the socket may use these. `hosts.scheduler_address` has
what only a model of Triton can do, which is to find out whether there is a scheduler.
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
    """Where a scheduler listens.

    Args:
        repository: the models' folders. scheduler_model: its name.
    """
    return repository / scheduler_model / "1" / REQUESTS_SOCKET


class AnswerEvents(Protocol):
    """What comes from the scheduler; called in a thread of the client's, one after the other."""

    def on_answer(self, answer: RelayedAnswer) -> None:
        """An answer to a request has come; the client hangs up when this raises."""
        ...

    def on_end(self) -> None:
        """The connection has ended, and no more answers come. Called once."""
        ...


class SchedulerClient:
    """One connection to the scheduler: requests go through it, and their answers come back.

    For all threads. Only `close` waits for anything.

    Args:
        channel: connected to the scheduler's socket; this closes it.
        events: may be called before this returns.
        log: takes one line, from any thread.

    Raises:
        UnavailableError: there can be no thread that hears the answers.
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
        """Send a request; returns its key, by which its answers are known.

        It gets answers up to a final one, or the connection ends.

        Raises:
            InvalidRequestError: it is too long.
            UnavailableError: too much waits already for the scheduler.
        """
        key = secrets.token_hex(16)
        post(self._connection, RelayedRequest(key, raw))
        return key

    def cancel(self, key: str) -> None:
        """Cancel a request, which still gets its answer."""
        self._tell(Cancellation(key))

    def acknowledge(self, key: str, number: int) -> None:
        """Say that so many answers to a request have been passed on, of those that are not final.

        Without that word the scheduler sends only a few.
        """
        self._tell(Acknowledgement(key, number))

    def note_server_stopping(self) -> None:
        """Have the scheduler end what the server waits for; where it takes no word, hang up."""
        try:
            post(self._connection, ServerStopping())
        except UnavailableError:
            self._connection.hang_up()

    def close(self) -> None:
        """Send what waits, as far as the scheduler takes it, and hang up.

        What is live is cancelled. `AnswerEvents.on_end` is still called.
        """
        self._connection.close()

    def _tell(self, message: Cancellation | Acknowledgement) -> None:
        # Where nobody takes it, the request is lost with the connection.
        with contextlib.suppress(UnavailableError):
            post(self._connection, message)


class DeliveryClient:
    """One connection to the scheduler, of a process that hands its responses on. For one thread.

    Args:
        channel: connected to the scheduler's socket; this closes it.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def tell(self, message: Delivery | Cancellation) -> None:
        """Say what became of a response.

        Raises:
            OSError: the scheduler has gone, or takes nothing.
        """
        self._channel.send(encode(message), _SEND_TIMEOUT_S)

    def part(self) -> None:
        """Say that nothing is in hand any more, where the scheduler hears it, and hang up."""
        with contextlib.suppress(OSError):
            self._channel.send(encode(Disconnect()), _SEND_TIMEOUT_S)
        self.hang_up()

    def hang_up(self) -> None:
        """End the connection without a word."""
        self._channel.close()
