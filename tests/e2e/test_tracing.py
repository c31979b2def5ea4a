"""Traces of requests to a real tritonserver, as a collector gets them."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

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
)
from support.gateway import running_gateway

NUM_TOKENS = 6
NUM_STREAMS = 200
PARTS = ("queue", "prefill", "decode", "send")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path], collector: Collector) -> Iterator[TritonServer]:
    """A server that traces what its clients trace; its own spans go over gRPC."""
    settings = (
        ONE_THREAD,
        "max_num_batched_tokens=32",
        "max_num_seqs=4",
        f"scheduler.otlp_traces_endpoint={collector.grpc_endpoint}",
    )
    options = trace_options(collector.http_endpoint, rate=0)
    quick = "--trace-config=opentelemetry,bsp_schedule_delay=200"
    with (
        one_torch_thread(),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with running_server(
            model=checkpoint("LlamaForCausalLM"),
            settings=settings,
            facades=("tensorrt-llm",),
            tritonserver=[*options, quick],
        ) as server:
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


def check_tree(spans: list[Span], client_span: str) -> Span:
    """Assert that the spans are one tree below the client's span; return ours of the request."""
    assert len([span for span in spans if span.parent_id == client_span]) == 1
    (request,) = [span for span in spans if span.name == "request"]
    below = [span for span in spans if span.parent_id == request.span_id]
    names = [span.name for span in below]
    assert set(PARTS) <= set(names)
    for span in below:
        assert request.began_ns <= span.began_ns <= span.ended_ns <= request.ended_ns
    assert request.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
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
    for traceparent, _, _ in contexts:
        with GrpcStream(server, headers={"traceparent": traceparent}) as stream:
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
