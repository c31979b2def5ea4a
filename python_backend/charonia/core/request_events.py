"""Events of requests: calls go down from layer to layer, events come up.

Owns the events that leave the core; the replica's are in `replica`. Must not know who sends or
receives them.

    EngineService ─ add, cancel ─► AnswerCache ─ add, cancel ─► EngineCore ─ add, finish ─► Replica
                  ◄─ RequestEvents ─           ◄─ RequestEvents ─          ◄─ ReplicaEvents ─

Whoever adds a request gets the entry that stands for it from then on, and gives a receiver of its
events. So nothing is looked up by a request's key, but for samples that `Replica.finish` ends.
"""

from abc import ABC, abstractmethod

from charonia.core.output.outputs import Chunk


class RequestEvents(ABC):
    """Receives the events of one request.

    Events are sent within a call of the receiver's or within `step`, in the same thread. Handlers
    must return quickly and must not call back. Only `on_chunk` has to be implemented.
    """

    @abstractmethod
    def on_chunk(self, chunk: Chunk) -> None:
        """The request has output. Its last chunk is its end."""

    def on_started(self) -> None:
        """The first step of the request, or of one of its samples, begins."""
        return

    def on_joined(self) -> None:
        """The request gets the output of another computation; it waits for no step of its own."""
        return

    def on_first_token(self) -> None:
        """The request, a shared computation, has its first token, which may be held back."""
        return
