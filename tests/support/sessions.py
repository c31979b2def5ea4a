"""Sessions for tests: what they cancel and log, and the chunks that they take."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from charonia.core.output.outputs import Chunk
from charonia.serving.conventions.schema import OutputOptions
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.serving.requests.raw_request import Outputs
from charonia.serving.requests.session import Session
from charonia.serving.requests.sessions import Sessions
from charonia.text.tokenizer import Tokenizer
from support.waiting import eventually

STREAMING = OutputOptions(
    is_streaming=True, has_echo=False, names=frozenset({"text_output", "output_ids"})
)
AT_ONCE = OutputOptions(
    is_streaming=False, has_echo=True, names=frozenset({"text_output", "output_ids"})
)
NAMED = OutputOptions(
    is_streaming=True, has_echo=False, names=frozenset({"text_output"}), has_key=True
)


@dataclass
class Source:
    """Writes down what is cancelled."""

    harness: "Harness"
    key: str

    def cancel(self) -> None:
        self.harness.cancelled.append(self.key)

    def cancel_samples(self, indexes: Collection[int]) -> None:
        self.harness.cancelled_samples.append((self.key, indexes))


class Harness:
    """Sessions, what they cancelled and what they logged."""

    def __init__(self, num_threads: int = 2, stream_interval: int = 1) -> None:
        from support.checkpoints import make_tokenizer

        self.cancelled: list[str] = []
        self.cancelled_samples: list[tuple[str, Collection[int]]] = []
        self.live: dict[str, Session] = {}
        self.log: list[str] = []
        self.queue_limit = QueueLimit(100, 1000)
        self.sessions = Sessions(
            Tokenizer(make_tokenizer()),
            num_threads,
            self.queue_limit,
            log=self.log.append,
            stream_interval=stream_interval,
        )

    def open(self, key: str, *args: Any, **options: Any) -> Callable[[Chunk], None]:
        """Open a session; the sink for its chunks."""
        session = self.live[key] = self.sessions.open(key, *args, **options)
        self.sessions.attach(session, Source(self, key))
        return partial(self.sessions.take, session)

    def settle(self, responder: Any) -> None:
        """Wait until all that may be sent has been, where there is one sender: a stream's only
        token comes last.
        """
        self.open("settles", STREAMING, str, responder)(chunk(0, is_last=True))
        eventually(lambda: responder.sent)


def chunk(index: int, *, is_last: bool = False) -> Chunk:
    return Chunk(
        "k", text=f"{index} ", token_ids=(index,), finish_reason="stop" if is_last else None
    )


def texts(sent: list[tuple[Outputs, bool]]) -> str:
    return "".join(outputs["text_output"][0] for outputs, _ in sent)
