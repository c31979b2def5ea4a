"""charonia without Triton: scheduler, text and engine in this process and its main thread."""

import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from worker import Request, Wave, serve_engine

from charonia import SamplingParams
from charonia.config import EngineArgs, SchedulerArgs
from charonia.core.engine_core import EngineCore
from charonia.core.generation_request import GenerationRequest
from charonia.core.inline import InlineExecutor
from charonia.core.output.outputs import Chunk, OutputStream
from charonia.core.request_events import RequestEvents
from charonia.parallel.engine import load_engine
from charonia.text.tokenizer import Tokenizer


class Charonia(RequestEvents):
    """The engine core, stepped by whoever asks for completions.

    Attributes:
        runner: the engine's first rank.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.versions = {name: version(name) for name in ("charonia", "torch", "numpy")}
        self.notes: list[str] = []
        args = EngineArgs.from_dict({"device": "cpu", **settings})
        self.runner = load_engine(args, log=self._note)
        self._core = EngineCore(
            InlineExecutor(lambda: self.runner),
            args,
            SchedulerArgs(),
            partial(OutputStream, tokenizer=Tokenizer.from_dir(Path(args.model))),
            clock=time.monotonic,
            log=print,
        )
        self._core.step()
        self._wave = Wave(0)
        self._num_live = 0

    def complete(self, wave: Wave, requests: list[Request], sampling: dict[str, Any]) -> None:
        """See `worker.Engine`; request i samples with seed + i."""
        self._wave = wave
        self._num_live = len(requests)
        for index, (prompt, max_tokens) in enumerate(requests):
            values = {"temperature": 0.0, **sampling}
            if "seed" in values:
                values["seed"] += index
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **values)
            request = GenerationRequest(key=str(index), prompt_ids=prompt, params=params)
            self._core.add(request, self)
        while self._num_live:
            self._core.step()

    def _note(self, line: str) -> None:
        print(line)
        if not line.startswith("loading weights"):
            self.notes.append(line)

    def on_chunk(self, chunk: Chunk) -> None:
        """See `RequestEvents`."""
        if chunk.error is not None:
            raise chunk.error
        self._wave.add(int(chunk.key), chunk.token_ids)
        self._num_live -= chunk.is_final


if __name__ == "__main__":
    serve_engine(Charonia)
