"""Talks to a real server as its users do: tritonclient, an HTTP library, a scrape of its metrics.

Owns the clients of the end-to-end tests and what they remember of each answer. Must not know
charonia's insides: only the tensors, parameters and metrics of its interface.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as grpc
import tritonclient.http
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from charonia.launch.server.tritonserver import TritonServer

ANSWER_TIMEOUT_S = 240.0
# Made once, because making one takes longer than most requests. It keeps no connections, which a
# server would wait for when it stops.
HTTP = httpx.Client(timeout=ANSWER_TIMEOUT_S, headers={"Connection": "close"})
"""A connection per request: in a pool one thread may close as idle what another has just taken."""
T = TypeVar("T")

ONE_THREAD = "cpu_threads=1"
"""An engine computes in one thread. More do not help with a model this small, and they spin while
they wait for each other: on a busy machine with two cores that made 64 streams seven times slower.
"""

ENDLESS = 60_000
"""Tokens of a request that must still run when its test ends it. They take half a minute on an
idle machine, and the longer the busier it is. Who asks for so many never waits for them."""
MAX_MODEL_LEN = 65_536
"""Length limit of the servers that run such requests."""
NUM_BLOCKS = 16_384
"""Blocks of 16 tokens that those servers have: for four such requests, or many that end before."""
ENDLESS_BLOCKS = f"num_gpu_blocks_override={NUM_BLOCKS + 1}"  # one is the null block


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Servers that start here have one thread of torch's, see `ONE_THREAD`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


# ---------------------------------------------------------------------- tensors


def array_of(value: Any) -> npt.NDArray[Any]:
    """A value as the tensor that a client would make of it; an array stays what it is."""
    match value:
        case np.ndarray():
            return value
        case bool():
            return np.array([value])
        case str() | bytes():
            return np.array([value.encode() if isinstance(value, str) else value], dtype=object)
        case dict():
            return array_of(json.dumps(value))
        case _:
            return np.array(value, dtype=np.int32)


def tensors(inputs: Mapping[str, Any], module: Any = grpc) -> list[Any]:
    """Named values as `InferInput`s of `tritonclient.grpc` or `tritonclient.http`."""
    made = []
    for name, value in inputs.items():
        array = array_of(value)
        tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def request_inputs(
    prompt: str | list[int], sampling: Mapping[str, Any] | None = None, **inputs: Any
) -> dict[str, Any]:
    """The inputs of a request: a prompt as text or token ids, sampling parameters, and more."""
    values: dict[str, Any] = {"text_input" if isinstance(prompt, str) else "input_ids": prompt}
    if sampling is not None:
        values["sampling_parameters"] = dict(sampling)
    return values | inputs


# ---------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Response:
    """One response: its outputs by name, as lists (strings decoded), and its FINAL flag."""

    outputs: Mapping[str, list[Any]]
    is_final: bool

    @property
    def text(self) -> str:
        """Generated text."""
        (text,) = self.outputs["text_output"]
        assert isinstance(text, str)
        return text

    def one(self, name: str) -> Any:
        """The only element of an output."""
        (value,) = self.outputs[name]
        return value


def response_of(result: Any, names: Iterable[str], *, is_final: bool) -> Response:
    """An `InferResult` of either protocol, with strings decoded."""
    outputs = {}
    for name in names:
        values = result.as_numpy(name).tolist()
        outputs[name] = [v.decode() if isinstance(v, bytes) else v for v in values]
    return Response(outputs, is_final)


def _grpc_response(result: grpc.InferResult, *, is_final: bool | None = None) -> Response:
    message = result.get_response()
    if is_final is None:
        is_final = message.parameters["triton_final_response"].bool_param
    return response_of(result, [output.name for output in message.outputs], is_final=is_final)


def text_of(responses: list[Response]) -> str:
    """The whole text of a stream."""
    return "".join(response.text for response in responses)


def ids_of(responses: list[Response]) -> list[int]:
    """All `output_ids` of a stream."""
    return [token_id for response in responses for token_id in response.outputs["output_ids"]]


def one_response(responses: list[Response]) -> Response:
    """The only one."""
    (response,) = responses
    return response


def check_stream(responses: list[Response]) -> None:
    """Assert what holds for every stream: FINAL on the last response alone, and none is empty."""
    assert [response.is_final for response in responses] == [False] * (len(responses) - 1) + [True]
    texts = [response.outputs["text_output"] for response in responses[:-1]]
    assert all(any(some) for some in texts), "a response without text"
    for response in responses:
        assert response.outputs.get("output_ids", [0]), "a response without a token"


# ---------------------------------------------------------------------- gRPC


class GrpcStream:
    """One gRPC stream with a connection of its own, and the responses of its requests.

    Iterating gives the responses of one request, up to the one with the FINAL flag; an error is
    raised as `InferenceServerException`.

    Args:
        model: `scheduler` or `llm`. headers: of the stream.
    """

    def __init__(
        self,
        server: TritonServer,
        model: str = "scheduler",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._model = model
        self._results: SimpleQueue[Any] = SimpleQueue()
        self._client = grpc.InferenceServerClient(server.grpc_url)
        self._client.start_stream(
            lambda result, error: self._results.put(error or result), headers=headers
        )

    def send(self, inputs: Mapping[str, Any], **options: Any) -> "GrpcStream":
        """Send a request; `options` are of `async_stream_infer`, e.g. `request_id`."""
        # Triton would tell of an empty last response only to who asks for it.
        self._client.async_stream_infer(
            self._model, tensors(inputs), enable_empty_final_response=True, **options
        )
        return self

    def next(self, timeout: float = ANSWER_TIMEOUT_S) -> Response:
        """The next response."""
        try:
            result = self._results.get(timeout=timeout)
        except Empty:
            raise AssertionError(f"no response within {timeout:g} s") from None
        if isinstance(result, Exception):
            raise result
        return _grpc_response(result)

    def __iter__(self) -> Iterator[Response]:
        is_final = False
        while not is_final:
            response = self.next()
            is_final = response.is_final
            yield response

    def close(self) -> None:
        """Wait for the end of what is under way, and close the connection."""
        self._client.stop_stream()
        self._client.close()

    def __enter__(self) -> "GrpcStream":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def stream_grpc(
    server: TritonServer, inputs: Mapping[str, Any], model: str = "scheduler", **options: Any
) -> list[Response]:
    """All responses of one request that streams over gRPC.

    Raises:
        InferenceServerException: the server answers with an error.
    """
    with GrpcStream(server, model) as stream:
        responses = list(stream.send(inputs, **options))
    check_stream(responses)
    return responses


@contextlib.contextmanager
def endless_request(server: TritonServer, prompt: str | list[int] = "A request") -> Iterator[None]:
    """A request that runs for as long as this lasts: it has a token, and at the end is cancelled.

    It must be the only one on this server at the time.
    """
    request_id = "endless"
    with GrpcStream(server) as stream:
        inputs = request_inputs(prompt, {"max_tokens": ENDLESS, "ignore_eos": True}, stream=True)
        stream.send(inputs, request_id=request_id).next()
        try:
            yield
        finally:
            infer_grpc(server, {"cancel": True}, request_id=request_id)
            error = error_of(lambda: list(stream))
        assert "cancelled" in error.message(), error


def infer_grpc(
    server: TritonServer, inputs: Mapping[str, Any], model: str = "generate", **options: Any
) -> Response:
    """A unary request over gRPC."""
    with contextlib.closing(grpc.InferenceServerClient(server.grpc_url)) as client:
        result = client.infer(model, tensors(inputs), client_timeout=ANSWER_TIMEOUT_S, **options)
    return _grpc_response(result, is_final=True)


def infer_http(
    server: TritonServer, inputs: Mapping[str, Any], model: str = "generate", **options: Any
) -> Response:
    """A unary request over HTTP with tritonclient."""
    client = tritonclient.http.InferenceServerClient(
        server.http_url, network_timeout=ANSWER_TIMEOUT_S
    )
    with contextlib.closing(client):
        result = client.infer(model, tensors(inputs, tritonclient.http), **options)
    names = [output["name"] for output in result.get_response()["outputs"]]
    return response_of(result, names, is_final=True)


def error_of(call: Callable[[], Any]) -> InferenceServerException:
    """The error that a tritonclient call ends with."""
    try:
        answer = call()
    except InferenceServerException as error:
        return error
    raise AssertionError(f"no error, but {answer}")


# ---------------------------------------------------------------------- HTTP generate


def generate_url(server: TritonServer, model: str, *, stream: bool = False) -> str:
    """The URL of Triton's generate extension."""
    return f"http://{server.http_url}/v2/models/{model}/generate{'_stream' if stream else ''}"


def generate(server: TritonServer, body: Any, model: str = "scheduler") -> httpx.Response:
    """POST to `generate`. A body that is bytes goes out as it is, else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HTTP.post(generate_url(server, model), content=content)


def sse_events(text: str) -> list[dict[str, Any]]:
    """The JSON objects of server-sent events, in Triton's framing."""
    assert text.endswith("\n\n"), text[-80:]
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events), events
    return [json.loads(event.removeprefix("data: ")) for event in events]


def generate_stream(
    server: TritonServer, body: Mapping[str, Any], model: str = "scheduler"
) -> list[dict[str, Any]]:
    """POST to `generate_stream`; the events."""
    reply = HTTP.post(generate_url(server, model, stream=True), json=dict(body))
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.headers
    return sse_events(reply.content.decode())


# ---------------------------------------------------------------------- metrics


def read_page(url: str) -> str:
    """The metrics page; empty where tritonserver was silent for longer than a page waits.

    Raises:
        httpx.HTTPError: there is no page, as while tritonserver does not run.
    """
    reply = HTTP.get(url)
    if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return ""
    return reply.raise_for_status().text


def whole_page(url: str) -> str:
    """`read_page`, asked until the page is whole: the numbers are the scheduler's at this moment.

    On a busy machine tritonserver or the scheduler may be silent for longer than a page waits, and
    this process for longer than the page waits for it.
    """

    def read() -> str:
        with contextlib.suppress(httpx.RemoteProtocolError):  # it hung up
            return read_page(url)
        return ""

    def is_whole(page: str) -> bool:
        return samples_of(page).get("charonia_scheduler_up") == 1

    page = wait_for(read, is_whole)
    assert is_whole(page), f"no whole page of metrics: {page}"
    return page


def samples_of(page: str) -> dict[str, float]:
    """charonia's samples on a metrics page; keys as `charonia_kv_blocks{state="used"}`.

    The labels `model` and `version`, which all have, are left out, and `model_name` and `engine`,
    which all of vLLM's names have.
    """
    samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith("nv_") and not sample.name.startswith("nv_trt_llm_"):
                continue
            labels = ",".join(
                f'{name}="{value}"'
                for name, value in sample.labels.items()
                if name not in ("model", "version", "model_name", "engine")
            )
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def scrape(server: TritonServer) -> dict[str, float]:
    """The samples of the whole page."""
    return samples_of(whole_page(server.metrics_url))


def wait_for(ask: Callable[[], T], is_good: Callable[[T], bool], timeout: float = 120.0) -> T:
    """Ask until the answer is good, at most `timeout` seconds; the last answer either way."""
    deadline = time.monotonic() + timeout
    while not is_good(answer := ask()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer


def wait_idle(server: TritonServer, timeout: float = ANSWER_TIMEOUT_S) -> dict[str, float]:
    """Wait until nothing runs, nothing waits and no block is used; the metrics then.

    All that was counted before the call is on the page that is returned.
    """

    def busy(samples: Mapping[str, float]) -> dict[str, float]:
        names = (
            "charonia_requests_running",
            "charonia_requests_waiting",
            'charonia_kv_blocks{state="used"}',
        )
        return {name: count for name in names if (count := samples.get(name, math.inf))}

    samples = wait_for(lambda: scrape(server), lambda samples: not busy(samples), timeout)
    assert not busy(samples), f"not idle after {timeout:g} s: {busy(samples)}"
    return samples


def wait_running(server: TritonServer, num: int) -> None:
    """Wait until the engine runs so many requests."""
    name = "charonia_requests_running"
    samples = wait_for(lambda: scrape(server), lambda samples: samples[name] == num)
    assert samples[name] == num


# ---------------------------------------------------------------------- many at once


def at_once(calls: Sequence[Callable[[], T]], num_threads: int = 16) -> list[T]:
    """The results of calls that are made in threads, in order."""
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(lambda call: call(), calls))
