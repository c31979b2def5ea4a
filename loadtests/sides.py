"""The two sides of the benchmark: the engine in this process, and the same behind Triton.

Owns how one request is sent and when its tokens are seen. A side's `run` keeps a number of
requests in flight and returns one trace per request.
"""

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import tritonclient.grpc.aio as grpc_aio

from charonia import SamplingParams
from charonia.config import EngineArgs, SchedulerArgs
from charonia.data.runner import Runner
from charonia.engine.admission import GenerationRequest
from charonia.engine.core import EngineCore
from charonia.engine.inline import InlineExecutor
from charonia.engine.outputs import Chunk
from charonia.launch.run import running_server
from charonia.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Trace:
    """When one request was sent and when tokens of it arrived, in seconds."""

    sent_at: float
    arrivals: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def add(self, count: int) -> None:
        """Some tokens arrived now."""
        self.arrivals.append(time.perf_counter())
        self.num_tokens.append(count)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.sent_at

    def gaps(self) -> list[float]:
        """Seconds between tokens; several that arrive together share their time."""
        gaps = []
        for index in range(1, len(self.arrivals)):
            count = self.num_tokens[index]
            gaps += [(self.arrivals[index] - self.arrivals[index - 1]) / count] * count
        return gaps


class Side(Protocol):
    """One way to have prompts completed."""

    name: str

    def run(self, prompts: Sequence[list[int]], max_tokens: int, concurrency: int) -> list[Trace]:
        """Complete all prompts, so many at a time."""
        ...


class InProcess:
    """The engine core in this process and thread: scheduler, text and engine without Triton."""

    name = "in-process"

    def __init__(self, model: Path, settings: dict[str, object]) -> None:
        args = EngineArgs.from_dict({"model": str(model), **settings})
        self._core = EngineCore(
            InlineExecutor(Runner(args, log=lambda line: None)),
            args,
            SchedulerArgs(),
            Tokenizer.from_dir(model),
            deliver=self._take,
            clock=time.monotonic,
            log=print,
        )
        self._core.connect()
        self._traces: dict[str, Trace] = {}
        self._num_live = 0

    def run(self, prompts: Sequence[list[int]], max_tokens: int, concurrency: int) -> list[Trace]:
        """Complete all prompts, so many at a time."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._traces = {}
        waiting = deque(enumerate(prompts))
        while waiting or self._num_live:
            while waiting and self._num_live < concurrency:
                index, prompt = waiting.popleft()
                self._traces[str(index)] = Trace(time.perf_counter())
                self._num_live += 1
                self._core.add(GenerationRequest(key=str(index), prompt_ids=prompt, params=params))
            self._core.step()
        return list(self._traces.values())

    def close(self) -> None:
        """Let go of the model."""
        self._core.close()

    def _take(self, chunk: Chunk) -> None:
        if chunk.error is not None:
            raise chunk.error
        self._traces[chunk.key].add(len(chunk.token_ids))
        self._num_live -= chunk.is_final


class OverTriton:
    """The `scheduler` model of a tritonserver, by gRPC streams."""

    name = "triton"

    def __init__(self, url: str, model: str = "scheduler") -> None:
        self._url = url
        self._model = model

    def run(self, prompts: Sequence[list[int]], max_tokens: int, concurrency: int) -> list[Trace]:
        """Complete all prompts, so many at a time."""
        return asyncio.run(self._run(prompts, max_tokens, concurrency))

    async def _run(
        self, prompts: Sequence[list[int]], max_tokens: int, concurrency: int
    ) -> list[Trace]:
        gate = asyncio.Semaphore(concurrency)
        async with grpc_aio.InferenceServerClient(self._url) as client:

            async def one(prompt: list[int]) -> Trace:
                async with gate:
                    return await self._one(client, prompt, max_tokens)

            return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    async def _one(
        self, client: grpc_aio.InferenceServerClient, prompt: list[int], max_tokens: int
    ) -> Trace:
        sampling = json.dumps({"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True})
        inputs = [
            _tensor("input_ids", "INT32", np.array(prompt, dtype=np.int32)),
            _tensor("stream", "BOOL", np.array([True])),
            _tensor("sampling_parameters", "BYTES", np.array([sampling], dtype=object)),
            _tensor("return_num_output_tokens", "BOOL", np.array([True])),
        ]
        outputs = [
            grpc_aio.InferRequestedOutput(name) for name in ("text_output", "num_output_tokens")
        ]

        async def requests():
            yield {"model_name": self._model, "inputs": inputs, "outputs": outputs}

        trace = Trace(time.perf_counter())
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                raise RuntimeError(error)
            trace.add(int(result.as_numpy("num_output_tokens")[0]))
        return trace


@contextlib.contextmanager
def over_triton(model: Path, settings: dict[str, object]) -> Iterator[OverTriton]:
    """Start a tritonserver with the model."""
    as_text = tuple(f"{name}={json.dumps(value)}" for name, value in settings.items())
    with running_server(model=model, settings=as_text) as server:
        yield OverTriton(server.grpc_url)


def _tensor(name: str, kind: str, values: np.ndarray) -> grpc_aio.InferInput:
    tensor = grpc_aio.InferInput(name, list(values.shape), kind)
    tensor.set_data_from_numpy(values)
    return tensor
