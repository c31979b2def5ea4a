"""Traces of requests to a real tritonserver, as a collector gets them."""

import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tritonclient.utils import InferenceServerException

from charonia.launch.server.run import running_server
from charonia.launch.server.trace_options import trace_options
from charonia.launch.server.tritonserver import TritonServer
from support.collector import Collector, Span, running_collector
from support.e2e import (
    HTTP,
    ONE_THREAD,
    GrpcStream,
    one_torch_thread,
    request_inputs,
    wait_for,
)
from support.gateway import running_gateway

NUM_TOKENS = 6
NUM_STREAMS = 200
PARTS = ("tokenize", "queue", "prefill", "decode", "send")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@contextlib.contextmanager
def traced_server(
    model: Path, collector: Collector, rate: int, *settings: str, **options: Any
) -> Iterator[TritonServer]:
    """A server that traces one in `rate` requests; its own spans go over gRPC, all of them soon."""
    tracing = (ONE_THREAD, f"scheduler.otlp_traces_endpoint={collector.grpc_endpoint}")
    quick = "--trace-config=opentelemetry,bsp_schedule_delay=200"
    with (
        one_torch_thread(),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with running_server(
            model=model,
            settings=(*tracing, *settings),
            tritonserver=[*trace_options(collector.http_endpoint, rate=rate), quick],
            **options,
        ) as server:
            yield server


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path], collector: Collector) -> Iterator[TritonServer]:
    """A server that traces what its clients trace."""
    model = checkpoint("LlamaForCausalLM")
    settings = ("max_num_batched_tokens=32", "max_num_seqs=4")
    facades = ("tensorrt-llm",)
    with traced_server(model, collector, 0, *settings, facades=facades) as server:
        yield server


@pytest.fixture(scope="module")
def tracing_server(
    checkpoint: Callable[..., Path], collector: Collector, faulty_repository: Path
) -> Iterator[TritonServer]:
    """A server that traces every request. Its engine fails on order, and has six blocks."""
    model = checkpoint("LlamaForCausalLM")
    settings = ("max_model_len=80", "num_gpu_blocks_override=7", "max_num_seqs=4")
    with traced_server(model, collector, 1, *settings, source=faulty_repository) as server:
        yield server


def new_context(flags: str = "01") -> tuple[str, str, str]:
    """A client's `traceparent`, with its trace id and span id."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-{flags}", trace_id, span_id


def whole_below(client_span: str) -> Callable[[list[Span]], bool]:
    """Whether all spans of a request have come, from Triton's first one to all of ours."""

    def is_whole(spans: list[Span]) -> bool:
        ids = {client_span, *(span.span_id for span in spans)}
        names = {span.name for span in spans}
        return {"request", *PARTS} <= names and all(span.parent_id in ids for span in spans)

    return is_whole


def check_tree(spans: list[Span], client_span: str, num_tokens: int = NUM_TOKENS) -> Span:
    """Assert that the spans are one tree below the client's span; return ours of the request.

    Args:
        client_span: empty where the client has none; Triton's is the first one then.
    """
    assert len([span for span in spans if span.parent_id == client_span]) == 1
    (request,) = [span for span in spans if span.name == "request"]
    below = [span for span in spans if span.parent_id == request.span_id]
    names = [span.name for span in below]
    assert set(PARTS) <= set(names)
    for span in below:
        assert request.began_ns <= span.began_ns <= span.ended_ns <= request.ended_ns
    assert request.attributes["gen_ai.usage.output_tokens"] == num_tokens
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    return request


SAMPLING = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
PROMPT = "A prompt of some words, which take several steps of thirty-two tokens each. " * 2


@pytest.mark.parametrize("model", ["scheduler", "llm"])
def test_a_stream_over_grpc_is_one_trace(
    server: TritonServer, collector: Collector, model: str
) -> None:
    traceparent, trace_id, span_id = new_context()
    prompt = f"{model}: {PROMPT}"  # nothing of it is cached
    with GrpcStream(server, model, headers={"traceparent": traceparent}) as stream:
        assert list(stream.send(request_inputs(prompt, SAMPLING, stream=True)))
    spans = collector.wait(trace_id, whole_below(span_id))
    request = check_tree(spans, span_id)
    chunks = [span for span in spans if span.name == "prefill"]
    assert len(chunks) > 1
    num_prompt = request.attributes["gen_ai.usage.input_tokens"]
    assert sum(span.attributes["charonia.tokens"] for span in chunks) == num_prompt
    assert request.attributes["charonia.preemptions"] == 0
    assert not any(PROMPT[:20] in str(span) for span in spans)


def test_no_stream_over_grpc_loses_its_trace(server: TritonServer, collector: Collector) -> None:
    """Triton does not trace some of them, when they follow each other closely."""
    contexts = [new_context() for _ in range(NUM_STREAMS)]
    for number, (traceparent, _, _) in enumerate(contexts):
        model = ("scheduler", "llm")[number % 2]
        with GrpcStream(server, model, headers={"traceparent": traceparent}) as stream:
            assert list(stream.send(request_inputs(PROMPT, SAMPLING, stream=True)))
    for _, trace_id, span_id in contexts:
        check_tree(collector.wait(trace_id, whole_below(span_id)), span_id)


@pytest.mark.parametrize("model", ["generate", "ensemble"])
def test_a_proxy_over_http_is_one_trace(
    server: TritonServer, collector: Collector, model: str
) -> None:
    traceparent, trace_id, span_id = new_context()
    body = {
        "text_input": PROMPT,
        **({} if model == "generate" else {"bad_words": "", "stop_words": ""}),
    }
    body |= {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    if model == "ensemble":
        del body["ignore_eos"]
        body |= {"end_id": -1}
    answer = HTTP.post(
        f"http://{server.http_url}/v2/models/{model}/generate",
        json=body,
        headers={"traceparent": traceparent},
    )
    assert answer.status_code == httpx.codes.OK, answer.text
    check_tree(collector.wait(trace_id, whole_below(span_id)), span_id)


def test_a_refused_request_has_a_span_with_its_error(
    server: TritonServer, collector: Collector
) -> None:
    traceparent, trace_id, _ = new_context()
    with GrpcStream(server, headers={"traceparent": traceparent}) as stream:
        stream.send(request_inputs([10**6], SAMPLING, stream=True))
        with pytest.raises(InferenceServerException, match="token id 1000000"):
            stream.next()
    spans = collector.wait(trace_id, lambda found: any(span.name == "request" for span in found))
    (request,) = [span for span in spans if span.name == "request"]
    assert request.is_error
    assert request.attributes["error.type"] == "invalid_request"


def test_what_nobody_traces_is_not_traced(server: TritonServer, collector: Collector) -> None:
    before = collector.traces()
    with GrpcStream(server) as stream:
        assert list(stream.send(request_inputs(PROMPT, SAMPLING, stream=True)))
    traceparent, trace_id, span_id = new_context()  # what comes later shows that nothing is left
    with GrpcStream(server, headers={"traceparent": traceparent}) as stream:
        assert list(stream.send(request_inputs(PROMPT, SAMPLING, stream=True)))
    collector.wait(trace_id, whole_below(span_id))
    assert collector.traces() - before == {trace_id}


def test_the_gateways_span_is_above_the_servers(
    server: TritonServer, collector: Collector, checkpoint: Callable[..., Path]
) -> None:
    tokenizer = checkpoint("LlamaForCausalLM")
    options = (f"--otlp-traces-endpoint={collector.http_endpoint}", "--trace-rate=0")
    with running_gateway([server.grpc_url], tokenizer, *options) as gateway:
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
        unsampled, untraced, _ = new_context("00")  # Triton itself would trace this one
        odd, trace_id_of_odd, _ = new_context()
        traceparent, trace_id, span_id = new_context()
        for header in (unsampled, f"{odd}\xa0".encode("latin-1"), traceparent):
            answer = gateway.http.post("/v1/generate", json=body, headers={"traceparent": header})
            assert answer.status_code == httpx.codes.OK, answer.text
        gateway.stop()  # which sends what is left
    spans = collector.wait(trace_id, whole_below(span_id))
    check_tree(spans, span_id)
    (own,) = [span for span in spans if span.parent_id == span_id]
    assert own.name == "POST /v1/generate"
    assert own.attributes["http.response.status_code"] == httpx.codes.OK
    assert own.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert not collector.spans(untraced)
    assert collector.spans(trace_id_of_odd)


def trace_ids_of(collector: Collector, request_id: str) -> list[str]:
    """The traces with this request that have come so far."""
    return [
        span.trace_id
        for trace_id in collector.traces()
        for span in collector.spans(trace_id)
        if span.attributes.get("charonia.request_id") == request_id
    ]


def trace_of(collector: Collector, request_id: str) -> list[Span]:
    """The spans of a request's trace, once it is whole."""
    (trace_id,) = wait_for(lambda: trace_ids_of(collector, request_id), bool)
    return collector.wait(trace_id, whole_below(""))


@pytest.mark.parametrize("model", ["scheduler", "llm"])
def test_every_request_is_traced_by_default(
    tracing_server: TritonServer, collector: Collector, model: str
) -> None:
    request_id = f"default-{model}"
    with GrpcStream(tracing_server, model) as stream:
        inputs = request_inputs("A prompt", SAMPLING, stream=True)
        assert list(stream.send(inputs, request_id=request_id))
    spans = trace_of(collector, request_id)
    check_tree(spans, "")
    (top,) = [span for span in spans if not span.parent_id]
    assert (top.name, top.via) == ("InferRequest", "http")  # Triton's own


def test_one_in_three_requests_is_traced(
    checkpoint: Callable[..., Path], collector: Collector
) -> None:
    rate, num_traces = 3, 4
    inputs = request_inputs("A prompt", SAMPLING, stream=True)
    request_ids = [f"one-in-three-{number}" for number in range(rate * num_traces)]
    with traced_server(checkpoint("LlamaForCausalLM"), collector, rate) as server:
        for request_id in request_ids:
            with GrpcStream(server, "llm") as stream:
                assert list(stream.send(inputs, request_id=request_id))
        traceparent, trace_id, span_id = new_context()  # traced besides, and the last to come
        with GrpcStream(server, headers={"traceparent": traceparent}) as stream:
            assert list(stream.send(inputs))
        collector.wait(trace_id, whole_below(span_id))
        traced = [name for name in request_ids if trace_ids_of(collector, name)]
        assert traced in [request_ids[first::rate] for first in range(rate)]
        for request_id in traced:
            check_tree(trace_of(collector, request_id), "")


def test_a_lost_engine_is_a_span_of_the_stream(
    tracing_server: TritonServer, collector: Collector
) -> None:
    num_tokens = 60
    sampling = SAMPLING | {"max_tokens": num_tokens}
    with GrpcStream(tracing_server) as stream:
        stream.send(request_inputs([5] * 8, sampling, stream=True), request_id="restarted").next()
        (engine,) = tracing_server.pids("engine")
        os.kill(engine, signal.SIGKILL)
        assert list(stream)
    spans = trace_of(collector, "restarted")
    request = check_tree(spans, "", num_tokens)
    assert request.attributes["charonia.restarts"] == 1
    names = [span.name for span in spans]
    assert (names.count("recovery"), names.count("preempted")) == (1, 0)


def test_a_preemption_is_a_span_of_the_request(
    tracing_server: TritonServer, collector: Collector
) -> None:
    """Two requests grow to five blocks each, of six."""
    num_tokens = 56
    sampling = SAMPLING | {"max_tokens": num_tokens}
    request_ids = ("grows", "grows, too")
    with GrpcStream(tracing_server) as first, GrpcStream(tracing_server) as second:
        for number, stream in enumerate((first, second)):
            inputs = request_inputs([6 + number] * 16, sampling, stream=True)
            stream.send(inputs, request_id=request_ids[number])
        for stream in (first, second):
            assert list(stream)
    counts = []
    for request_id in request_ids:
        spans = trace_of(collector, request_id)
        request = check_tree(spans, "", num_tokens)
        counts.append([span.name for span in spans].count("preempted"))
        assert counts[-1] == request.attributes["charonia.preemptions"]
    assert sum(counts) >= 1
