"""One attempt of a request on one connection: the two small protocols behind both transports.

Owns nothing but the names. Diagram of one attempt::

    open ──► receive() ──► Chunk, … Chunk (final) ──► finish()     the answer is complete
                    │
                    ├────► CharoniaClientError ────► abort()       the server's, or the connection's
                    └─ interrupt() from any thread or task ► abort()   nobody wants it any more
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from charonia_client.values import Chunk


@dataclass(frozen=True, slots=True)
class Limits:
    """The timeouts of an attempt, in seconds; None is for ever.

    Attributes:
        total_s: of the whole call, as errors say it. left_s: of that, when the attempt starts.
    """

    total_s: float | None
    left_s: float | None
    first_token_s: float | None


class Exchange(Protocol):
    """An attempt under way. One thread receives; any thread may interrupt."""

    def receive(self) -> Sequence[Chunk] | None:
        """What the next response brings of each sample; None when the server has no more to send.

        Raises:
            CharoniaClientError: whatever went wrong, typed.
        """
        ...

    def finish(self) -> None:
        """Let go of a complete answer, so that its connection can serve again. Never raises."""
        ...

    def abort(self) -> None:
        """Give up: the server is told to cancel, as its protocol has it. Never raises."""
        ...

    def interrupt(self) -> None:
        """Make a `receive` that waits in another thread raise Cancelled."""
        ...


class AsyncExchange(Protocol):
    """The same for asyncio; a waiting `receive` ends by the cancellation of its task."""

    async def receive(self) -> Sequence[Chunk] | None:
        """See `Exchange.receive`."""
        ...

    async def finish(self) -> None:
        """See `Exchange.finish`."""
        ...

    async def abort(self) -> None:
        """See `Exchange.abort`."""
        ...
