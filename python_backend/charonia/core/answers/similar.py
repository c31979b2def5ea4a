"""Earlier prompts that mean much the same, found in a thread of its own.

Owns that thread, and what waits for it. Must not know answers, nor how prompts are compared: that
is the index's, which is used in this thread alone. A vector takes milliseconds, a look at the index
a fraction of one, so neither is for the scheduling thread.
"""

import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

MAX_LOOKUPS = 16
"""That wait at once: a request that comes then is computed without a look, rather than late."""
_END: Callable[[], None] = lambda: None  # noqa: E731 (it is compared, and never called)


class Match(Protocol):
    """What is nearest to a prompt.

    Attributes:
        vector: of the prompt, for `PromptIndex.add`. key: of the nearest one, None where there is
            none. similarity: the cosine of both.
    """

    @property
    def vector(self) -> Any: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def similarity(self) -> float: ...


class PromptIndex(Protocol):
    """Earlier prompts by scope: what was put into one is found in that one alone."""

    @property
    def bytes_per_prompt(self) -> int:
        """That one takes."""
        ...

    def find(self, scope: bytes, text: str) -> Match | None:
        """The nearest one; None where a text cannot be compared."""
        ...

    def add(self, scope: bytes, key: bytes, vector: Any) -> None:
        """Have a prompt found from now on."""
        ...

    def remove(self, key: bytes) -> None:
        """Find it no more."""
        ...


class SimilarPrompts:
    """An index and its thread. All methods are for one other thread.

    Args:
        decode: gives the text of a prompt.
        post: has a function called in that other thread. log: takes one line.
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
        self._lock = threading.Lock()  # of that number
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="charonia-similar", daemon=True)

    @property
    def bytes_per_prompt(self) -> int:
        """That a prompt takes in the index."""
        return self._index.bytes_per_prompt

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; nothing is posted from now on."""
        self._jobs.put(_END)
        if self._thread.ident is not None:
            self._thread.join()

    def ask(
        self, scope: bytes, prompt_ids: Sequence[int], done: Callable[[Match | None], None]
    ) -> bool:
        """Look for the prompt that is nearest to another one.

        Args:
            done: is posted with what there is; None where it could not be looked for.

        Returns:
            Whether it is looked for: it is not where too many wait.
        """
        with self._lock:
            if self._num_waiting >= MAX_LOOKUPS:
                return False
            self._num_waiting += 1
        self._jobs.put(partial(self._find, scope, prompt_ids, done))
        return True

    def keep(self, scope: bytes, key: bytes, vector: Any) -> None:
        """Have a prompt found from now on."""
        self._jobs.put(partial(self._index.add, scope, key, vector))

    def forget(self, key: bytes) -> None:
        """Find a prompt no more; nothing happens where there is none."""
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
                self._log(f"a similar prompt could not be looked for: {traceback.format_exc()}")
