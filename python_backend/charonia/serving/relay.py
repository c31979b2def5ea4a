"""Mailboxes: answers that another model fetches in batches, instead of one BLS stream each.

Owns both ends' message and the scheduler's end; the other one is `generate_host`. Must not know
Triton's tensors.

Every BLS call under way holds a thread of Triton's Python backend (32 by default), and dozens
of them at once were seen to corrupt the heap of the calling process. So a model that has many
requests under way hands each in by a short call, which answers at once whether it was accepted,
and keeps one long call open that brings whatever is finished::

    generate ──(request, request_key, relay_key)──► scheduler       accepted, or refused
    generate ──(relay_key)────────────────────────► scheduler       … the next results
"""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from charonia.errors import CharoniaError
from charonia.serving.outlets import Outlet
from charonia.serving.tensors import RELAYED, Outputs


class RelayedAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request's whole answer: outputs, or an error with its code's name.

    A refusal has no key: it is the answer to the call itself.
    """

    key: str
    outputs: dict[str, list[Any]] = {}
    error: str | None = None
    code: str = ""


class RelayBatch(msgspec.Struct, frozen=True):
    """What one call brings.

    Attributes:
        owner: names the scheduler's process; when it changes, what was accepted before is lost.
    """

    owner: str
    answers: list[RelayedAnswer] = []


@dataclass
class Mailbox:
    """Answers that wait for a collector, or a collector that waits for answers."""

    answers: list[RelayedAnswer] = field(default_factory=list)
    collector: Outlet | None = None
    asked_at: float = 0.0


class MailboxOutlet:
    """An outlet whose answer goes into a mailbox. The caller cancels by key, not by leaving."""

    def __init__(self, relay: "Relay", relay_key: str, request_key: str) -> None:
        self._relay = relay
        self._relay_key = relay_key
        self._request_key = request_key

    def send(self, outputs: Outputs, *, is_final: bool) -> None:
        """Put the one response into the mailbox."""
        assert is_final, "a relayed request does not stream"
        self._relay.put(self._relay_key, RelayedAnswer(self._request_key, dict(outputs)))

    def fail(self, error: CharoniaError) -> None:
        """Put an error into the mailbox."""
        answer = RelayedAnswer(self._request_key, error=str(error), code=error.code)
        self._relay.put(self._relay_key, answer)

    def is_cancelled(self) -> bool:
        """Never by itself."""
        return False


class Relay:
    """The scheduler's mailboxes.

    A collector gets an empty batch after `PATIENCE_S`, so that it never holds up the end of the
    server; a mailbox that nobody asked for in `FORGET_S` is dropped.
    """

    PATIENCE_S = 1.0
    FORGET_S = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._owner = secrets.token_hex(8)
        self._clock = clock
        self._mailboxes: dict[str, Mailbox] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="charonia-relay", daemon=True)
        self._thread.start()

    def accepted(self) -> Outputs:
        """The answer to a request that was handed in."""
        return self._outputs([])

    def refused(self, error: CharoniaError) -> Outputs:
        """The answer to a call that is refused. As Triton's own error it would lose its code."""
        return self._outputs([RelayedAnswer("", error=str(error), code=error.code)])

    def put(self, relay_key: str, answer: RelayedAnswer) -> None:
        """Add an answer, and hand all that there is to a waiting collector."""
        with self._lock:
            mailbox = self._mailbox(relay_key)
            mailbox.answers.append(answer)
            answers, collector = self._match(mailbox)
        self._deliver(collector, answers)

    def collect(self, relay_key: str, collector: Outlet) -> None:
        """Answer `collector` with all that there is, as soon as there is something."""
        with self._lock:
            mailbox = self._mailbox(relay_key)
            mailbox.asked_at = self._clock()
            previous, mailbox.collector = mailbox.collector, collector
            answers, collected = self._match(mailbox)
        self._deliver(previous, [])
        self._deliver(collected, answers)

    def close(self) -> None:
        """Answer every collector and stop the thread."""
        self._stop.set()
        self._thread.join()
        self._tick(patience_s=0.0)

    def _mailbox(self, relay_key: str) -> Mailbox:
        return self._mailboxes.setdefault(relay_key, Mailbox(asked_at=self._clock()))

    def _match(self, mailbox: Mailbox) -> tuple[list[RelayedAnswer], Outlet | None]:
        if not mailbox.answers or mailbox.collector is None:
            return [], None
        answers, mailbox.answers = mailbox.answers, []
        collector, mailbox.collector = mailbox.collector, None
        return answers, collector

    def _deliver(self, collector: Outlet | None, answers: list[RelayedAnswer]) -> None:
        if collector is not None:
            collector.send(self._outputs(answers), is_final=True)

    def _outputs(self, answers: list[RelayedAnswer]) -> Outputs:
        return {RELAYED: list(msgspec.msgpack.encode(RelayBatch(self._owner, answers)))}

    def _run(self) -> None:
        while not self._stop.wait(self.PATIENCE_S / 4):
            self._tick(self.PATIENCE_S)

    def _tick(self, patience_s: float) -> None:
        impatient: list[Outlet] = []
        now = self._clock()
        with self._lock:
            for key, mailbox in list(self._mailboxes.items()):
                if mailbox.collector is not None and now - mailbox.asked_at >= patience_s:
                    impatient.append(mailbox.collector)
                    mailbox.collector = None
                elif mailbox.collector is None and now - mailbox.asked_at > self.FORGET_S:
                    del self._mailboxes[key]
        for collector in impatient:
            self._deliver(collector, [])
