"""charonia behind a tritonserver, asked by its own client, and what it says of its drafts.

Owns the side that tells its tokens and its timing beside when they came.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from charonia_client import Client
from systems_under_test import Trace, Waves, WaveTrace
from triton_side import TritonSide


@dataclass(slots=True)
class ServedTrace(Trace):
    """A trace with the server's measurements of the request; see model_repository/README.md."""

    timing: dict[str, Any] = field(default_factory=dict)


class ServedSide(TritonSide):
    """One prompt after the other, over a gRPC stream.

    Args:
        settings: the engine's arguments, with `model`.

    Raises:
        charonia.errors.CharoniaError: the server cannot be started.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        rest = {name: value for name, value in settings.items() if name != "model"}
        super().__init__(Path(settings["model"]), rest)
        client = Client(self._server.grpc_url, protocol="grpc", model="scheduler")
        self._client = self._exit.enter_context(client)

    def run(self, waves: Waves, sampling: dict[str, Any] | None = None) -> list[WaveTrace]:
        """See `systems_under_test.Side`; a wave has one request."""
        traces = []
        for ((prompt, max_tokens),) in waves:
            trace = self._complete(prompt, {"max_tokens": max_tokens, **(sampling or {})})
            traces.append(WaveTrace(trace.arrivals[-1], [trace]))
        return traces

    def _complete(self, prompt: list[int], sampling: dict[str, Any]) -> ServedTrace:
        trace = ServedTrace()
        started = time.perf_counter()
        parameters: Any = {"temperature": 0.0, "ignore_eos": True, **sampling}
        for chunk in self._client.stream(prompt, parameters):
            trace.arrivals.append(time.perf_counter() - started)
            trace.counts.append(len(chunk.token_ids))
            trace.tokens.extend(chunk.token_ids)
            if chunk.timing is not None:
                trace.timing = dict(chunk.timing)
        return trace
