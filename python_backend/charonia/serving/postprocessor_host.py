"""The `postprocessor` model's side: hands chunks of `llm` on, and tells the scheduler when their
client has gone.

Owns that bridge: Triton tells a running step of an ensemble nothing of its client, but the next
step sees it. Must not know tokens.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

from charonia.errors import CharoniaError
from charonia.serving.generate_host import SchedulerCalls
from charonia.serving.tensors import REQUEST_KEY

PREFIX = "chunk_"
"""Input `chunk_x` is handed on as output `x`."""

_NUM_REMEMBERED = 4096
"""Cancelled requests that are remembered: no chunk of theirs asks for a second cancellation."""


class PostprocessorHost:
    """The postprocessor behind Triton.

    Args:
        scheduler_model: its name. log: takes one line, from any thread.
    """

    def __init__(self, pb_utils: Any, scheduler_model: str, *, log: Callable[[str], None]) -> None:
        self._pb_utils = pb_utils
        self._log = log
        self._calls = SchedulerCalls(pb_utils, scheduler_model)
        self._gone: SimpleQueue[str | None] = SimpleQueue()
        self._cancelled: dict[str, None] = {}  # in the order in which they were cancelled
        self._thread = threading.Thread(target=self._run, name="charonia-cancel", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Hand on each chunk as it is; an input that did not come is an output that does not."""
        return [self._hand_on(request) for request in requests]

    def finalize(self) -> None:
        """Stop."""
        self._gone.put(None)
        self._thread.join()

    def _hand_on(self, request: Any) -> Any:
        outputs = []
        for chunk in request.inputs():
            if chunk.name() != REQUEST_KEY:
                name = chunk.name().removeprefix(PREFIX)
                outputs.append(self._pb_utils.Tensor(name, np.array(chunk.as_numpy())))
            else:
                key = str(chunk.as_numpy().item(), "utf-8")
                if key not in self._cancelled and request.is_cancelled():
                    self._cancel(key)
        return self._pb_utils.InferenceResponse(outputs)

    def _cancel(self, key: str) -> None:
        self._cancelled[key] = None
        if len(self._cancelled) > _NUM_REMEMBERED:
            del self._cancelled[next(iter(self._cancelled))]
        self._gone.put(key)

    def _run(self) -> None:
        """Cancel in a thread, so that other requests' chunks do not wait for it."""
        while (key := self._gone.get()) is not None:
            try:
                self._calls.cancel(key)
            except CharoniaError as error:
                self._log(f"a request could not be cancelled: {error}")
