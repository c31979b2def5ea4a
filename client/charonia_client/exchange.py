"""One attempt of a request on one connection: the two small protocols behind both transports.

Owns only the protocols. One attempt::

    open ──► receive() ──► Chunk, … Chunk (final) ──► finish()     the answer is complete
                    │
                    ├────► CharoniaClientError ────► abort()       the server's, or the connection's
                    └─ interrupt() from any thread or task ► abort()   nobody wants it any more
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from charonia_client.values import Chunk

CLIENT_CLOSED = "the client was closed"
"""Text of the error `Cancelled` of requests that a closed client has, or gets."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The timeouts of an attempt, in seconds; None is no limit.

    Attributes:
        total_s: of the whole call, as errors say it. left_s: of that, when the attempt starts.
    """

    total_s: float | None
    left_s: float | None
    first_token_s: float | None


class Exchange(Protocol):
    """A running attempt. One thread receives; any thread may interrupt."""

    def receive(self) -> Sequence[Chunk] | None:
        """Return the next response's chunk of each sample; None at the end of the responses.

        Raises:
            CharoniaClientError: any failure, typed.
        """
        ...

    def finish(self) -> None:
        """Release a complete answer, so that its connection can be reused. Never raises."""
        ...

    def abort(self) -> None:
        """Give up, and tell the server to cancel as the protocol allows. Never raises."""
        ...

    def interrupt(self) -> None:
        """Make a `receive` that waits in another thread raise Cancelled."""
        ...


class AsyncExchange(Protocol):
    """The same for asyncio; cancelling its task ends a waiting `receive`."""

    async def receive(self) -> Sequence[Chunk] | None:
        """See `Exchange.receive`."""
        ...

    async def finish(self) -> None:
        """See `Exchange.finish`."""
        ...

    async def abort(self) -> None:
        """See `Exchange.abort`."""
        ...
