"""Tokenizes long prompts, in threads of their own.

Owns the queue of prompts, and their ends while they wait: by cancellation or timeout. Must not know
how ids are made or used.

    any thread ─submit─► queue ─► tokenizing thread ─► done(ids)
                           └──── cancelled, expired or closed ─► done(error)

The library takes 0.3 to 0.5 s per MB and releases the GIL meanwhile. It cannot be stopped within a
prompt: if the request ends, it is answered at once, and the ids are dropped later.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from charonia.errors import (
    CharoniaError,
    RequestCancelledError,
    RequestTimeoutError,
    ShuttingDownError,
)
from charonia.events import exception_event
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.serving.requests.tensors import INTERNAL_ERROR

INLINE_CHARACTERS = 4096
"""Longest text that is tokenized at once: a handover to a thread would cost more."""
CLOSE_WAIT_S = 0.1
"""Longest wait for a thread, in seconds: it may be in the library for many seconds."""
_LOOK_S = 0.05
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Prompt(Generic[T]):
    """A prompt that waits.

    Attributes:
        encode: makes the ids. num_bytes: of the text.
        expires_at: when its request times out, on the monotonic clock.
        is_until_start: whether that is its `timeout`; else its `deadline_ms`.
        done: called once, with the ids or an error; must return quickly and not raise.
        tenant: of its request, if known. log_fields: the names of its request in the log.
    """

    encode: Callable[[], T]
    num_bytes: int
    expires_at: float | None
    done: Callable[[T | CharoniaError], None]
    tenant: str = ""
    is_until_start: bool = True
    log_fields: Mapping[str, str | None] = field(default_factory=dict)


class Tokenizing:
    """Threads that tokenize.

    Args:
        queue_limit: limits of the waiting prompts. log: takes one line, from any thread.
    """

    def __init__(
        self, num_threads: int, queue_limit: QueueLimit, *, log: Callable[[str], None]
    ) -> None:
        self._queue_limit = queue_limit
        self._log = log
        self._queue: deque[Prompt[Any]] = deque()
        self._live: dict[Prompt[Any], None] = {}  # `done` was not called yet
        self._num_of: Counter[str] = Counter()  # of these, by tenant
        self._is_closing = False
        # Held while `done` is called, so a request that is no longer here is already where `done`
        # puts it.
        self._wake = threading.Condition(threading.RLock())
        self._threads = [
            threading.Thread(target=self._run, name=f"charonia-tokenizing-{index}", daemon=True)
            for index in range(num_threads)
        ]
        self._threads.append(
            threading.Thread(target=self._expire, name="charonia-tokenizing-times", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def submit(self, prompt: Prompt[Any]) -> None:
        """Have a prompt tokenized.

        Raises:
            QueueFullError: too many wait. ShuttingDownError: the threads are stopped.
        """
        with self._wake:
            if self._is_closing:
                raise ShuttingDownError
            self._queue_limit.take(prompt.num_bytes)
            self._live[prompt] = None
            self._num_of[prompt.tenant] += 1
            self._queue.append(prompt)
            self._wake.notify_all()

    def num_of(self, tenant: str) -> int:
        """Number of prompts of a tenant that wait or are being tokenized."""
        return self._num_of[tenant]

    def cancel(self, prompt: Prompt[Any]) -> bool:
        """Cancel a prompt's request for its client; return whether it was here."""
        return self._end(prompt, RequestCancelledError("the request was cancelled"))

    def close(self) -> None:
        """End all prompts with an error and stop the threads; a busy one ends after its prompt."""
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
            for prompt in list(self._live):
                self._end(prompt, ShuttingDownError())
        for thread in self._threads:
            thread.join(CLOSE_WAIT_S)

    def _end(self, prompt: Prompt[Any], outcome: Any) -> bool:
        with self._wake:
            if prompt not in self._live:
                return False
            del self._live[prompt]
            self._num_of[prompt.tenant] -= 1
            if not self._num_of[prompt.tenant]:
                del self._num_of[prompt.tenant]
            is_waiting = prompt in self._queue
            if is_waiting:
                self._queue.remove(prompt)
            prompt.done(outcome)
            if is_waiting:  # else its thread gives it back
                self._queue_limit.give_back(prompt.num_bytes)
        return True

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._queue or self._is_closing):
                    self._wake.wait()
                if self._is_closing:
                    return
                prompt = self._queue.popleft()
            outcome = self._outcome_of(prompt)
            self._end(prompt, outcome)
            self._queue_limit.give_back(prompt.num_bytes)  # it counts until its thread is done
            del prompt, outcome  # free them while the thread waits

    def _outcome_of(self, prompt: Prompt[T]) -> T | CharoniaError:
        try:
            return prompt.encode()
        except CharoniaError as error:
            return error
        except Exception:
            self._log(exception_event("prompt_not_tokenized", **prompt.log_fields))
            return CharoniaError(INTERNAL_ERROR)

    def _expire(self) -> None:
        with self._wake:
            while not self._is_closing:
                self._wake.wait(_LOOK_S if self._live else None)
                now = time.monotonic()
                for prompt in list(self._live):
                    if prompt.expires_at is not None and prompt.expires_at <= now:
                        error = RequestTimeoutError.of(is_until_start=prompt.is_until_start)
                        self._end(prompt, error)
