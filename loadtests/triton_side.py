"""charonia behind a tritonserver, asked by gRPC streams from this process.

Owns how one request is sent and when its tokens are seen.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import tritonclient.grpc.aio as grpc_aio

from charonia.launch.server.run import running_server
from systems_under_test import TRITON, Trace, Waves, WaveTrace
from triton_inputs import infer_input

START_TIMEOUT_S = 600.0


class TritonSide:
    """The `scheduler` model of a tritonserver that is started here.

    Args:
        settings: engine arguments, and `scheduler.NAME` of the scheduler's.

    Raises:
        charonia.errors.CharoniaError: the server cannot be started.
    """

    name = TRITON

    def __init__(self, model: Path, settings: dict[str, Any]) -> None:
        as_text = tuple(settings_as_text(settings))
        self._exit = contextlib.ExitStack()
        self._server = self._exit.enter_context(
            running_server(model=model, settings=as_text, timeout=START_TIMEOUT_S)
        )
        self.versions = {name: version(name) for name in ("nvidia-pytriton", "tritonclient")}
        self.notes = ["gRPC streams; the client's process computes beside the server"]

    def run(self, waves: Waves, sampling: dict[str, Any] | None = None) -> list[WaveTrace]:
        """See `systems_under_test.Side`."""
        return run_waves(self._server.grpc_url, waves, sampling)

    def processes(self) -> list[psutil.Process]:
        """The server and its models' processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._server.pid)
            return [process, *process.children(recursive=True)]
        return []

    def close(self) -> None:
        """Stop the server."""
        self._exit.close()


def settings_as_text(settings: dict[str, Any]) -> list[str]:
    """Engine arguments as `NAME=VALUE`, for `charonia serve --set` and the like."""
    return [
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in settings.items()
    ]


def run_waves(
    grpc_url: str, waves: Waves, sampling: dict[str, Any] | None = None
) -> list[WaveTrace]:
    """Complete all requests on the server at this address, as `systems_under_test.Side.run`."""
    return asyncio.run(_run_waves(grpc_url, waves, sampling or {}))


async def _run_waves(grpc_url: str, waves: Waves, sampling: dict[str, Any]) -> list[WaveTrace]:
    traces = []
    async with grpc_aio.InferenceServerClient(grpc_url) as client:
        await client.is_server_live()  # connects before the clock starts
        for wave in waves:
            started = time.perf_counter()
            streams = [complete(client, *request, sampling, started) for request in wave]
            done = list(await asyncio.gather(*streams))
            traces.append(WaveTrace(max(trace.arrivals[-1] for trace in done), done))
    return traces


async def complete(
    client: grpc_aio.InferenceServerClient,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: dict[str, Any],
    started: float,
    trace: Trace | None = None,
    model: str = "scheduler",
) -> Trace:
    """Stream one request, greedy and to its last token.

    Args:
        started: what arrivals are counted from. trace: to note them in. model: its name on Triton.
    """
    parameters = json.dumps(
        {"temperature": 0, **sampling, "max_tokens": max_tokens, "ignore_eos": True}
    )
    inputs = [
        infer_input("input_ids", "INT32", prompt),
        infer_input("stream", "BOOL", [True]),
        infer_input("sampling_parameters", "BYTES", [parameters]),
        infer_input("return_num_output_tokens", "BOOL", [True]),
    ]
    outputs = [grpc_aio.InferRequestedOutput(name) for name in ("text_output", "num_output_tokens")]

    async def requests():
        yield {"model_name": model, "inputs": inputs, "outputs": outputs}

    trace = Trace() if trace is None else trace
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        trace.arrivals.append(time.perf_counter() - started)
        trace.counts.append(int(result.as_numpy("num_output_tokens")[0]))
    return trace
