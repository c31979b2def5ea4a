"""Loads the models of one server again and again while they are loaded and used.

Owns what is loaded and how, and what is looked at. Must not know how many times.
"""

import random
import time
from collections.abc import Callable, Iterator

import psutil
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from charonia.launch.server.tritonserver import TritonServer
from endurance.trials import Holding, Trial, bad_lines
from support.e2e import ids_of, infer_grpc, request_inputs, stream_grpc, wait_for
from support.live_stream import LiveStream

PROMPT = [1, 2, 3]
SAMPLING = {"seed": 1, "ignore_eos": True}
LONG, SHORT = 600, 8
PROCESSES = {"scheduler": 1, "engine": 1, "generate": 1, "tokenizer": 2, "postprocessor": 1}
ENDS_STREAMS = ("scheduler", "llm")  # which is loaded with all its parts
RETRY = ("[charonia:shutting_down]", "[charonia:unavailable]", "[charonia:engine_down]")

Do = Callable[[grpc.InferenceServerClient, TritonServer, str], None]


def _load(client: grpc.InferenceServerClient, server: TritonServer, model: str) -> None:
    """Triton loads what is loaded only where a file has changed."""
    for path in (server.repository / model).glob("*/model.py"):
        path.touch()
    client.load_model(server.control_name(model), headers=server.api_headers)


def _unload_and_load(client: grpc.InferenceServerClient, server: TritonServer, model: str) -> None:
    client.unload_model(server.control_name(model), headers=server.api_headers)
    client.load_model(server.control_name(model), headers=server.api_headers)


KINDS: list[tuple[str, Do, str]] = [
    *(("load", _load, model) for model in (*PROCESSES, "llm")),
    *(("unload, load", _unload_and_load, model) for model in ("scheduler", "engine")),
]


def loads(num: int, server: TritonServer, log: list[str], seed: int) -> Iterator[Trial]:
    """Load models `num` times, in random order, each kind as often as the others.

    It stops when the server has ended.
    """
    draw = random.Random(seed)
    order = [KINDS[index % len(KINDS)] for index in range(num)]
    draw.shuffle(order)
    expected = _short_answers(server)
    whole = _start(server, "scheduler").wait_over().token_ids
    for name, do, model in order:
        num_lines = len(log)
        seconds, findings = _use(server, do, model, expected, whole)
        findings += bad_lines(log[num_lines:], is_ending=False)
        if not server.is_running:
            findings.append(server.explain_end())
        yield Trial(f"{name} {model}", seconds, tuple(findings))
        if not server.is_running:
            return


def holding(server: TritonServer) -> Holding:
    """Measure tritonserver's memory, file descriptors and threads."""
    process = psutil.Process(server.pid)
    return Holding(process.memory_info().rss, process.num_fds(), process.num_threads())


def _use(
    server: TritonServer, do: Do, model: str, expected: list[list[int]], whole: list[int]
) -> tuple[float, list[str]]:
    """Load a model beside streams and requests; how long it took, and what was wrong."""
    findings = []
    streams = [_start(server, name) for name in ("scheduler", "llm")]
    started = time.monotonic()
    seconds = 0.0
    try:
        with grpc.InferenceServerClient(server.grpc_url) as client:
            do(client, server, model)
        seconds = time.monotonic() - started
        if _short_answers(server) != expected:
            findings.append("another answer than before")
    except InferenceServerException as error:
        findings.append(f"an error: {error.message()}")
    for stream in streams:
        findings += _judge(stream, whole, may_end=model in ENDS_STREAMS)
    if (num := PROCESSES.get(model, 0)) and not wait_for(
        lambda: len(server.pids(model)) == num, bool
    ):
        findings.append(f"{len(server.pids(model))} processes of {model}")
    return seconds, findings


def _judge(stream: LiveStream, whole: list[int], *, may_end: bool) -> list[str]:
    """Describe what is wrong with the end of a stream."""
    try:
        stream.wait_over()
    except AssertionError as error:
        return [str(error)]
    if stream.error is None:
        return [] if stream.token_ids == whole else ["a stream with other tokens than before"]
    is_fair = may_end and stream.error.endswith(RETRY)
    return [] if is_fair else [f"a stream ended: {stream.error}"]


def _start(server: TritonServer, model: str) -> LiveStream:
    stream = LiveStream(server.grpc_url, PROMPT, model=model, max_tokens=LONG, **SAMPLING)
    stream.wait_tokens(1)
    return stream


def _short_answers(server: TritonServer) -> list[list[int]]:
    """Return the token ids of the same prompt's answer from each model that clients call."""
    inputs = request_inputs(PROMPT, SAMPLING | {"max_tokens": SHORT}, return_token_ids=True)
    streamed = [
        ids_of(stream_grpc(server, inputs | {"stream": True}, model))
        for model in ("scheduler", "llm")
    ]
    return [*streamed, infer_grpc(server, inputs).outputs["output_ids"]]
