"""Finds earlier prompts of similar meaning, in a thread of its own.

Owns that thread and its queue. Must not know answers, nor how prompts are compared: the index does,
which is used in this thread only. A vector takes milliseconds and a search of the index a fraction
of one, too much for the scheduling thread.
"""

import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

MAX_LOOKUPS = 16
"""Most searches that wait at once; further requests are computed without a search."""
_END: Callable[[], None] = lambda: None  # noqa: E731 (it is compared, and never called)


class Match(Protocol):
    """The earlier prompt that is nearest to a prompt.

    Attributes:
        vector: of the prompt, for `PromptIndex.add`. key: of the nearest one; None without one.
        similarity: cosine similarity of both.
    """

    @property
    def vector(self) -> Any: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def similarity(self) -> float: ...


class PromptIndex(Protocol):
    """The vectors of earlier prompts. Each scope is searched separately."""

    @property
    def bytes_per_prompt(self) -> int:
        """Memory of one prompt."""
        ...

    def find(self, scope: bytes, text: str) -> Match | None:
        """The nearest prompt; None if the text cannot be compared."""
        ...

    def add(self, scope: bytes, key: bytes, vector: Any) -> None:
        """Add a prompt."""
        ...

    def remove(self, key: bytes) -> None:
        """Remove a prompt."""
        ...


class SimilarPrompts:
    """An index and its thread. All methods are called from one other thread.

    Args:
        decode: returns the text of a prompt.
        post: calls a function in that other thread, later. log: takes one line.
    """

    def __init__(
        self,
        index: PromptIndex,
        decode: Callable[[Sequence[int]], str],
        *,
        post: Callable[[Callable[[], None]], None],
        log: Callable[[str], None],
    ) -> None:
        self._index = index
        self._decode = decode
        self._post = post
        self._log = log
        self._num_waiting = 0
        self._lock = threading.Lock()  # for _num_waiting
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="charonia-similar", daemon=True)

    @property
    def bytes_per_prompt(self) -> int:
        """Memory of one prompt in the index."""
        return self._index.bytes_per_prompt

    def start(self) -> None:
        """Start the thread, unless it is started."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop the thread; nothing is posted afterwards."""
        self._jobs.put(_END)
        if self._thread.ident is not None:
            self._thread.join()

    def ask(
        self, scope: bytes, prompt_ids: Sequence[int], done: Callable[[Match | None], None]
    ) -> bool:
        """Begin to search the prompt that is nearest to another one.

        Args:
            done: posted with the match, or with None if the search failed.

        Returns:
            Whether a search has begun; False if too many wait.
        """
        with self._lock:
            if self._num_waiting >= MAX_LOOKUPS:
                return False
            self._num_waiting += 1
        self._jobs.put(partial(self._find, scope, prompt_ids, done))
        return True

    def keep(self, scope: bytes, key: bytes, vector: Any) -> None:
        """Add a prompt."""
        self._jobs.put(partial(self._index.add, scope, key, vector))

    def forget(self, key: bytes) -> None:
        """Remove a prompt, if there is one with this key."""
        self._jobs.put(partial(self._index.remove, key))

    def _find(
        self, scope: bytes, prompt_ids: Sequence[int], done: Callable[[Match | None], None]
    ) -> None:
        match = None
        try:
            match = self._index.find(scope, self._decode(prompt_ids))
        finally:
            with self._lock:
                self._num_waiting -= 1
            self._post(partial(done, match))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not _END:
            try:
                job()
            except Exception:
                self._log(
                    f"error: a similar prompt could not be looked for: {traceback.format_exc()}"
                )
