"""What becomes of requests, told upwards: calls go down from layer to layer, events come up.

Owns the names of those that leave the core; the replica's are in `replica`. Must not know who tells
them, nor who listens.

    EngineService ─ add, cancel ─► AnswerCache ─ add, cancel ─► EngineCore ─ add, finish ─► Replica
                  ◄─ RequestEvents ─           ◄─ RequestEvents ─          ◄─ ReplicaEvents ─
"""

from abc import ABC, abstractmethod

from charonia.core.output.outputs import Chunk


class RequestEvents(ABC):
    """What is told of requests to whoever gave them.

    All are called within a call of theirs or of `step`, in that thread. They must return quickly,
    and must not call back. Whoever listens may leave out all but the chunks.
    """

    @abstractmethod
    def on_chunk(self, chunk: Chunk) -> None:
        """There is output of a request, or its end, which is its last chunk."""

    def on_started(self, key: str) -> None:
        """The first step of a request, or of one of its samples, begins."""
        return

    def on_joined(self, key: str) -> None:
        """A request waits for no step of its own: it gets what another one's steps give."""
        return

    def on_first_token(self, key: str) -> None:
        """What is computed for several has its first token, which may be held back."""
        return
