"""The open requests of a proxy, by their parts.

Owns which part belongs to which request, and which clients are polled for cancellation. Must not
know the contents of requests and answers, nor the scheduler.

    client ──┬── part ── key     the scheduler answers each part, by its key
             └── part ── key     the last answer to the last part ends the request
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from charonia.errors import CharoniaError
from charonia.serving.conventions.convention import Part
from charonia.serving.requests.responders import CancellationPoller, TritonResponder


@dataclass(eq=False)
class ClientRequest:
    """A client's request that is not completely answered.

    Attributes:
        num_bytes: of the request, as received. log_fields: its names in the log.
        waiting: keys of the parts that are not completely answered; empty once the request is not
            open any more.
        num_passed_on: answers passed on, of all parts. is_cancelled: the client has disconnected,
            or the request has failed with `error`.
    """

    responder: TritonResponder
    num_bytes: int
    log_fields: Mapping[str, str | None]
    waiting: set[str] = field(default_factory=set)
    num_passed_on: int = 0
    is_cancelled: bool = False
    error: CharoniaError | None = None


@dataclass
class OpenPart:
    """A part of a client's request; `num_passed_on` of its answers were passed on.

    Attributes:
        key: the scheduler's.
    """

    key: str
    client: ClientRequest
    part: Part
    num_passed_on: int = 0


class OpenRequests:
    """The registry of the parts. The caller holds a lock, except for `bool()`.

    Args:
        poller: polls the clients of these requests for cancellation.
    """

    def __init__(self, poller: CancellationPoller[ClientRequest]) -> None:
        self._poller = poller
        self._parts: dict[str, OpenPart] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, part: OpenPart) -> None:
        """Add a part that was sent to the scheduler."""
        self._parts[part.key] = part
        part.client.waiting.add(part.key)

    def poll(self, client: ClientRequest) -> None:
        """Begin to poll the client of a request whose parts were all sent."""
        self._poller.add(client, client.responder)

    def withdraw(self, client: ClientRequest) -> Collection[str]:
        """Remove a request of which a part could not be sent; return the keys of the sent parts."""
        for key in client.waiting:
            del self._parts[key]
        return client.waiting

    def take_answer(self, key: str, *, is_final: bool) -> OpenPart | None:
        """Find the part of an answer; None if nothing waits for it.

        The final answer to the last part removes the request; `client.waiting` is empty then.
        """
        part = self._parts.get(key)
        if part is None:
            return None
        client = part.client
        if is_final:
            del self._parts[key]
            client.waiting.remove(key)
        if not client.waiting:
            self._poller.remove(client)
        return part

    def take_all(self) -> list[ClientRequest]:
        """Remove and return all requests."""
        clients = list(dict.fromkeys(part.client for part in self._parts.values()))
        self._parts.clear()
        for client in clients:
            client.waiting.clear()
            self._poller.remove(client)
        return clients
