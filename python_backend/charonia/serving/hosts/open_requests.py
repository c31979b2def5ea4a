"""What a proxy has not answered to its end: clients' requests, and the parts that they are made of.

Owns which parts belong to whom, and whose clients are asked after. Must not know what is asked or
answered, nor the scheduler.

    client ──┬── part ── key     the scheduler answers each part by its key
             └── part ── key     the last answer to the last part ends the request
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from charonia.errors import CharoniaError
from charonia.serving.conventions.convention import Part
from charonia.serving.requests.responders import CancellationPoller, TritonResponder


@dataclass
class ClientRequest:
    """A client's request that is not answered to its end.

    Attributes:
        num_bytes: of the request as it came. waiting: keys of parts that are not answered to their
            end.
        num_passed_on: answers of all parts. is_cancelled: the client has gone, or `error` is what
            it is to be told.
    """

    key: str
    responder: TritonResponder
    num_bytes: int
    waiting: set[str] = field(default_factory=set)
    num_passed_on: int = 0
    is_cancelled: bool = False
    error: CharoniaError | None = None


@dataclass
class OpenPart:
    """A part of a client's request; `num_passed_on` answers to it have gone on."""

    client: ClientRequest
    part: Part
    num_passed_on: int = 0


class OpenRequests:
    """One registry of both. The caller holds a lock, but to ask whether there are any.

    Args:
        poller: asks after the clients of what is here.
    """

    def __init__(self, poller: CancellationPoller) -> None:
        self._poller = poller
        self._parts: dict[str, OpenPart] = {}  # by the key that the scheduler knows
        self._clients: dict[str, ClientRequest] = {}

    def __bool__(self) -> bool:
        return bool(self._clients)

    def add_part(self, key: str, part: OpenPart) -> None:
        """The scheduler has got a part."""
        self._parts[key] = part
        part.client.waiting.add(key)

    def add(self, client: ClientRequest) -> None:
        """The scheduler has got all parts of a request."""
        self._clients[client.key] = client
        self._poller.add(client.key, client.responder)

    def withdraw(self, client: ClientRequest) -> Collection[str]:
        """Forget a request of which a part could not be sent; the keys of those that were."""
        for key in client.waiting:
            del self._parts[key]
        return client.waiting

    def find(self, client_key: str) -> ClientRequest | None:
        """A request by the name that it has here."""
        return self._clients.get(client_key)

    def take_answer(self, key: str, *, is_final: bool) -> OpenPart | None:
        """Whose answer it is; None where nobody waits for it any more.

        With the final answer to its last part a request is not here any more, and no part of its
        client is waiting.
        """
        part = self._parts.get(key)
        if part is None:
            return None
        client = part.client
        if is_final:
            del self._parts[key]
            client.waiting.remove(key)
        if not client.waiting:
            self._poller.remove(client.key)
            del self._clients[client.key]
        return part

    def take_all(self) -> list[ClientRequest]:
        """All requests, which are not here any more."""
        clients = list(self._clients.values())
        for client in clients:
            self._poller.remove(client.key)
        self._clients.clear()
        self._parts.clear()
        return clients
