"""Malformed requests by every way in, each with what its error must say.

Owns the list, by what is wrong. Must not know what else is asked of an error.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    HTTP,
    MAX_MODEL_LEN,
    error_of,
    generate,
    generate_stream,
    infer_grpc,
    infer_http,
    request_inputs,
    stream_grpc,
)

PROMPT = "A request waits"
LONGEST = f"at most {MAX_MODEL_LEN - 1}"
VOCAB_SIZE = 384
KIND = r" \[charonia:(invalid_request|prompt_too_long|not_supported)\]$"
Send = Callable[[TritonServer], str]


@dataclass(frozen=True)
class Case:
    """A malformed request.

    Attributes:
        send: sends it and returns the error's text. says: regular expressions that match the text.
    """

    name: str
    send: Send
    says: tuple[str, ...]


# ---------------------------------------------------------------------- ways to send


def by_stream(inputs: dict[str, Any], model: str = "scheduler", **options: Any) -> Send:
    """A gRPC stream."""
    return lambda server: error_of(lambda: stream_grpc(server, inputs, model, **options)).message()


def by_unary_grpc(inputs: dict[str, Any], model: str = "generate", **options: Any) -> Send:
    return lambda server: error_of(lambda: infer_grpc(server, inputs, model, **options)).message()


def by_unary_http(inputs: dict[str, Any], model: str = "generate", **options: Any) -> Send:
    return lambda server: error_of(lambda: infer_http(server, inputs, model, **options)).message()


def by_http(body: Any, model: str = "scheduler") -> Send:
    """`generate`; a body that is bytes goes out as it is."""

    def send(server: TritonServer) -> str:
        reply = generate(server, body, model)
        assert reply.status_code >= 400, reply.text
        return str(reply.json()["error"])

    return send


def by_sse(body: dict[str, Any], model: str = "scheduler") -> Send:
    """`generate_stream`."""

    def send(server: TritonServer) -> str:
        (event,) = generate_stream(server, {**body, "stream": True}, model)
        assert set(event) == {"error"}
        return str(event["error"])

    return send


def sampling_ways(sampling: dict[str, Any] | str) -> Iterator[tuple[str, Send]]:
    """The ways to send wrong sampling parameters."""
    inputs = request_inputs(PROMPT) | {"sampling_parameters": sampling}
    yield "scheduler, gRPC stream", by_stream(inputs | {"stream": True})
    yield "llm, gRPC stream", by_stream(inputs | {"stream": True}, "llm")
    yield "generate, gRPC", by_unary_grpc(inputs)
    yield "generate, HTTP", by_unary_http(inputs)
    text = sampling if isinstance(sampling, str) else json.dumps(sampling)
    body = {"text_input": PROMPT, "sampling_parameters": text}
    yield "scheduler, HTTP generate", by_http(body)
    yield "llm, HTTP generate_stream", by_sse(body, "llm")


# ---------------------------------------------------------------------- sampling parameters

NAN = float("nan")
INF = float("inf")
WRONG_SAMPLING: list[tuple[dict[str, Any] | str, tuple[str, ...]]] = [
    ({"max_tokens": 0}, ("max_tokens must be at least 1", "is 0")),
    ({"max_tokens": -7}, ("max_tokens must be at least 1", "is -7")),
    ({"max_tokens": 10**12}, ("max_tokens", "at most 2147483647", str(10**12))),
    ({"max_tokens": 2**70}, ("max_tokens must be an integer", str(2**70))),
    ({"max_tokens": 10**400}, ("max_tokens must be an integer", "is 1000")),
    ({"max_tokens": 1.5}, ("max_tokens must be an integer", "is 1.5")),
    ({"max_tokens": "many"}, ("max_tokens must be an integer", "'many'")),
    ({"max_tokens": "1e3"}, ("max_tokens must be an integer", "'1e3'")),
    ({"max_tokens": []}, ("max_tokens must be an integer", r"is \[\]")),
    ({"max_tokens": True}, ("max_tokens must be an integer", "is True")),
    ({"max_tokens": {"a": 1}}, ("max_tokens must be an integer", "{'a': 1}")),
    ({"min_tokens": -1}, ("min_tokens must be from 0 to max_tokens", "is -1")),
    ({"max_tokens": 10, "min_tokens": 11}, (r"min_tokens .* max_tokens \(10\)", "is 11")),
    ({"temperature": -0.1}, ("temperature must be from 0", "is -0.1")),
    ({"temperature": 1e300}, ("temperature must be from 0.0 to 1000000", "1e\\+300")),
    ({"temperature": NAN}, ("temperature must be from 0", "is nan")),
    ({"temperature": INF}, ("temperature must be from 0", "is inf")),
    ({"temperature": -INF}, ("temperature must be from 0", "is -inf")),
    ({"temperature": "NaN"}, ("temperature must be from 0", "is nan")),
    ({"temperature": "hot"}, ("temperature must be a number", "'hot'")),
    ({"temperature": True}, ("temperature must be a number", "is True")),
    ({"top_p": 0}, ("top_p must be above 0 and at most 1", "is 0")),
    ({"top_p": 1.1}, ("top_p must be above 0 and at most 1", "is 1.1")),
    ({"top_p": NAN}, ("top_p must be above 0 and at most 1", "is nan")),
    ({"top_k": -2}, ("top_k must be -1 or 0", "is -2")),
    ({"top_k": 0.5}, ("top_k must be an integer", "is 0.5")),
    ({"min_p": -0.1}, ("min_p must be from 0.0 to 1.0", "is -0.1")),
    ({"min_p": 2}, ("min_p must be from 0.0 to 1.0", "is 2.0")),
    ({"seed": 2**64}, ("seed must be", str(2**64))),
    ({"seed": -(2**63) - 1}, ("seed must be a 64-bit integer", "-9223372036854775809")),
    ({"seed": "dice"}, ("seed must be an integer", "'dice'")),
    ({"n": 0}, ("n must be from 1 to 128", "is 0")),
    ({"n": 129}, ("n must be from 1 to 128, but is 129",)),
    ({"n": 3, "best_of": 2}, ("best_of must be from 3 to 128, but is 2",)),
    ({"num_beams": 4}, ("num_beams = 4 is for beam search, which is not supported",)),
    ({"stop": ""}, ("stop must be a string or a list of non-empty strings",)),
    ({"stop": ["a", ""]}, ("stop must be a string or a list of non-empty strings",)),
    ({"stop": [1]}, ("stop must be a string or a list of strings", r"\[1\]")),
    ({"stop": {"a": 1}}, ("stop must be a string or a list of strings",)),
    ('{"stop": "\\ud800"}', ("stop must be valid Unicode", "surrogate")),
    ({"stop_token_ids": [VOCAB_SIZE]}, ("stop_token_ids", "384", "0 to 383")),
    ({"stop_token_ids": [-1]}, ("stop_token_ids", "token id -1", "0 to 383")),
    ({"stop_token_ids": "5,6"}, ("stop_token_ids must be a list of integers", "'5,6'")),
    ({"stop_token_ids": [1.5]}, ("stop_token_ids must be an integer", "1.5")),
    ({"stop_token_ids": 7}, ("stop_token_ids must be a list of integers", "is 7")),
    ({"allowed_token_ids": []}, ("allowed_token_ids must be a list of at least one token id",)),
    ({"allowed_token_ids": [5] * 4097}, ("allowed_token_ids must have at most 4096", "has 4097")),
    ({"allowed_token_ids": [VOCAB_SIZE]}, ("allowed_token_ids", "384", "0 to 383")),
    ({"allowed_token_ids": [5, -1]}, ("allowed_token_ids", "token id -1 at place 1", "0 to 383")),
    ({"allowed_token_ids": [1.5]}, ("allowed_token_ids must be an integer", "1.5")),
    ({"bad_words": [""]}, ("bad_words must be a list of non-empty strings",)),
    ({"bad_words": [3]}, ("bad_words must be", r"\[3\]")),
    ({"presence_penalty": 2.5}, ("presence_penalty must be from -2.0 to 2.0", "is 2.5")),
    ({"frequency_penalty": -3}, ("frequency_penalty must be from -2.0 to 2.0", "is -3.0")),
    ({"repetition_penalty": 0}, ("repetition_penalty must be above 0", "is 0.0")),
    ({"repetition_penalty": NAN}, ("repetition_penalty must be above 0", "is nan")),
    ({"logit_bias": {"384": 1}}, ("logit_bias", "384", "0 to 383")),
    ({"logit_bias": {"-1": 1}}, ("logit_bias", "-1", "0 to 383")),
    ({"logit_bias": {"x": 1}}, ("token id of logit_bias must be an integer", "'x'")),
    ({"logit_bias": {"5": 101}}, ("logit_bias of token 5 must be from -100", "is 101")),
    ({"logit_bias": {"5": NAN}}, ("logit_bias of token 5 must be from -100", "is nan")),
    ({"logit_bias": {"5": "much"}}, ("logit_bias of '5' must be a number", "'much'")),
    ({"logit_bias": [1]}, ("logit_bias must be an object", r"\[1\]")),
    ({"logprobs": -1}, ("logprobs must be from 0 to 20", "is -1")),
    ({"logprobs": 21}, ("logprobs must be from 0 to 20", "is 21")),
    ({"logprobs": "all"}, ("logprobs must be an integer", "'all'")),
    ({"prompt_logprobs": 1000}, ("prompt_logprobs must be from 0 to 20", "is 1000")),
    ({"ignore_eos": "perhaps"}, ("ignore_eos must be true or false", "'perhaps'")),
    ({"ignore_eos": 2}, ("ignore_eos must be true or false", "is 2")),
    ({"priority": 2**40}, ("priority must be", str(2**40))),
    ({"deadline_ms": 0}, ("deadline_ms must be from 1", "is 0")),
    ({"cache_priority": 101}, ("cache_priority must be from 0 to 100", "is 101")),
    ({"cache_priority": "high"}, ("cache_priority must be an integer or a list", "'high'")),
    ({"cache_priority": [{"prio": 5}]}, ("each range of cache_priority must be an object", "prio")),
    ({"cache_ttl_s": 5}, ("cache_ttl_s = 5.0 has no effect without a cache_priority",)),
    ({"tenant": 5}, ("tenant must be a string", "is 5")),
    ({"max_token": 5}, ("unknown sampling parameter 'max_token'", "accepted are max_tokens")),
    ({"": 5}, ("unknown sampling parameter ''", "accepted are max_tokens")),
    ({"a [charonia:queue_full]": 5}, ("unknown sampling parameter 'a .charonia:queue_full.'",)),
    ({"__class__": 5}, ("unknown sampling parameter '__class__'", "accepted are")),
    ({"x" * 9999: 5}, ("unknown sampling parameter 'xxx", "accepted are")),
    ("{", ("sampling_parameters is not valid JSON",)),
    ("[]", ("sampling_parameters must be a JSON object", r"\[\]")),
    ("7", ("sampling_parameters must be a JSON object", "'7'")),
    ("null", ("sampling_parameters must be a JSON object", "'null'")),
    ("[" * 100_000, ("sampling_parameters is not valid JSON",)),
    ('{"max_tokens": 1} x', ("sampling_parameters is not valid JSON", "Extra data")),
]


def sampling_cases() -> Iterator[Case]:
    """Each wrong value by one of the ways, in turn."""
    for index, (sampling, says) in enumerate(WRONG_SAMPLING):
        ways = list(sampling_ways(sampling))
        way, send = ways[index % len(ways)]
        shown = sampling if isinstance(sampling, str) else repr(sampling)
        yield Case(f"{shown[:50]} ({way})", send, (*says, KIND))


# ---------------------------------------------------------------------- prompts and tensors


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def strings(*values: bytes, shape: tuple[int, ...] | None = None) -> np.ndarray:
    array = np.array(values, dtype=object)
    return array if shape is None else array.reshape(shape)


WRONG_PROMPTS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("no prompt", {"return_timing": True}, ("text_input or input_ids must be given", "none")),
    ("two prompts", {"text_input": "a", "input_ids": ids(1)}, ("text_input or input_ids", "both")),
    ("an empty text", {"text_input": ""}, ("text_input must not be empty",)),
    ("no ids", {"input_ids": ids()}, ("input_ids must be a list of at least one",)),
    ("an id beyond the vocabulary", {"input_ids": ids(1, 384)}, ("384 at place 1", "0 to 383")),
    ("a negative id", {"input_ids": ids(-1)}, ("token id -1 at place 0", "0 to 383")),
    ("the largest id", {"input_ids": ids(2**31 - 1)}, ("2147483647 at place 0", "0 to 383")),
    (
        "ids longer than the limit",
        {"input_ids": ids(*[5] * MAX_MODEL_LEN)},
        (f"prompt has {MAX_MODEL_LEN} tokens", LONGEST, f"max_model_len {MAX_MODEL_LEN}"),
    ),
    (
        "a text longer than the limit",
        {"text_input": "xq" * MAX_MODEL_LEN},
        ("the prompt has", LONGEST),
    ),
    (
        "a text that no tokens of that number could be",
        {"text_input": b"\xff" * 2**20},
        ("text_input must have at most", "but has 1048576"),
    ),
    (
        "a text that is not UTF-8",
        {"text_input": b"\xff\xfeabc"},
        ("text_input is not valid UTF-8",),
    ),
    ("a text cut in a character", {"text_input": b"\xf0\x9f\x90"}, ("not valid UTF-8", "byte 0")),
    ("sampling that is not UTF-8", {"text_input": "a", "sampling_parameters": b"\xff"}, ("UTF-8",)),
]
WRONG_TENSORS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("text as numbers", {"text_input": ids(1)}, ("text_input", "INT32", "BYTES")),
    ("two texts", {"text_input": strings(b"a", b"b")}, ("text_input", r"\[2\]", r"\[1\]")),
    ("no text", {"text_input": strings()}, ("text_input", r"\[0\]", r"\[1\]")),
    ("text with a batch", {"text_input": strings(b"a", shape=(1, 1))}, ("text_input", r"\[1,1\]")),
    ("64-bit ids", {"input_ids": np.array([1])}, ("input_ids", "INT64", "INT32")),
    ("float ids", {"input_ids": np.array([1.0], np.float32)}, ("input_ids", "FP32", "INT32")),
    ("ids with a batch", {"input_ids": ids(1, 2).reshape(1, 2)}, ("input_ids", r"\[1,2\]")),
    (
        "a number to exclude",
        {"text_input": "a", "exclude_input_in_output": ids(1)},
        ("INT32", "BOOL"),
    ),
    ("a number as flag", {"text_input": "a", "return_timing": ids(1)}, ("return_timing", "BOOL")),
    (
        "two flags",
        {"text_input": "a", "return_timing": np.array([True, False])},
        ("return_timing", r"\[2\]"),
    ),
    (
        "two sets of sampling parameters",
        {"text_input": "a", "sampling_parameters": strings(b"{}", b"{}")},
        ("sampling_parameters", r"\[2\]"),
    ),
    ("an unknown tensor", {"text_input": "a", "prompt": "b"}, ("prompt",)),
    ("a cancellation of nobody", {"cancel": True}, ("cancel needs the id",)),
    ("a cancellation by number", {"cancel": ids(1)}, ("cancel", "INT32", "BOOL")),
]


def tensor_cases() -> Iterator[Case]:
    """Wrong prompts by each of four ways; other wrong tensors by three, in turn."""
    for name, inputs, says in WRONG_PROMPTS:
        says = (*says, KIND)
        yield Case(f"{name} (scheduler)", by_stream(inputs), says)
        yield Case(f"{name} (llm)", by_stream(inputs, "llm"), says)
        yield Case(f"{name} (generate, gRPC)", by_unary_grpc(inputs), says)
        yield Case(f"{name} (generate, HTTP)", by_unary_http(inputs), says)
    models = itertools.cycle(["scheduler", "llm", "generate"])
    for (name, inputs, says), model in zip(WRONG_TENSORS, models, strict=False):
        way = by_unary_grpc if model == "generate" else by_stream
        yield Case(f"{name} ({model})", way(inputs, model), says)


# ---------------------------------------------------------------------- what is between the models

NO_UTF8 = b"\xff\xfeabc"
WRONG_INNER: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("scheduler", {"input_ids": ids(5), "request_key": NO_UTF8}, ("request_key", "UTF-8")),
    ("scheduler", {"input_ids": ids(5), "prompt_text": NO_UTF8}, ("prompt_text", "UTF-8")),
    ("scheduler", {"input_ids": ids(5), "prompt_text": "x" * 2**20}, ("prompt_text must have at",)),
    ("scheduler", {"input_ids": ids(5), "request_key": "k"}, ("are for other models",)),
    ("scheduler", {"input_ids": ids(5), "prompt_text": "five"}, ("are for other models",)),
    ("scheduler", {"probe": ids(1)}, ("probe", "INT32", "BOOL")),
    ("tokenizer", {"text_input": NO_UTF8}, ("text_input is not valid UTF-8",)),
    ("tokenizer", {"text_input": "x" * 2**20}, ("text_input must have at most",)),
    ("tokenizer", {"input_ids": ids(*[5] * MAX_MODEL_LEN)}, (LONGEST,)),
    ("tokenizer", {"text_input": "a", "input_ids": ids(5)}, ("both are given",)),
    ("tokenizer", {"cancel": ids(1)}, ("cancel", "INT32", "BOOL")),
    ("postprocessor", {"request_key": NO_UTF8}, ("request_key must be one string",)),
    ("postprocessor", {"request_key": "k.1"}, ("request_key must be one string",)),
    ("postprocessor", {"request_key": "0" * 10**6}, ("request_key must be one string",)),
    ("postprocessor", {"chunk_output_ids": strings(NO_UTF8)}, ("BYTES", "INT32")),
]


def inner_cases() -> Iterator[Case]:
    """Inputs and models that clients have no business with."""
    for index, (model, inputs, says) in enumerate(WRONG_INNER):
        send = by_stream if model == "scheduler" else by_unary_grpc
        yield Case(f"inner {index} ({model})", send(inputs, model), says)
    long_id = {"request_id": "x" * 2000}
    for model, send in (("scheduler", by_stream), ("generate", by_unary_grpc)):
        says = ("of the request's id at most 1024 bytes are accepted, but 2000 came",)
        yield Case(f"a long id ({model})", send({"text_input": "a"}, model, **long_id), says)
    for name, body in (
        ("id", b'{"text_input": "a", "id": "\xff"}'),
        ("parameter", b'{"text_input": "a", "tenant": "\xff"}'),
        ("parameter's name", b'{"text_input": "a", "\xff": 1}'),
    ):
        yield Case(f"a {name} that is not UTF-8", by_http(body), ("JSON|UTF-8|unknown",))


# ---------------------------------------------------------------------- the protocols


def not_a(kind: str) -> str:
    """Triton's own words, said before charonia sees the request."""
    return f"JSON non-{kind} as {kind}"


def protocol_cases() -> Iterator[Case]:
    """Yield requests that only one protocol can get wrong, and wrong requests to other models."""
    for name, body, says in (
        ("an unfinished body", b'{"text_input": "a"', ("JSON",)),
        ("an empty body", b"", ("JSON",)),
        ("a list for a body", b"[]", ("object",)),
        ("a body that is not UTF-8", b'{"text_input": "\xff"}', ("JSON|UTF-8",)),
        ("NaN", b'{"text_input": "a", "temperature": NaN}', ("JSON|temperature",)),
        ("infinity", b'{"text_input": "a", "temperature": 1e999}', ("JSON|temperature",)),
        ("a number for a text", {"text_input": 5}, (not_a("string"),)),
        ("a list of texts", {"text_input": ["a", "b"]}, ("text_input", "shape")),
        ("no text", {"max_tokens": 1}, ("text_input",)),
        ("a word for a flag", {"text_input": "a", "stream": "yes"}, (not_a("boolean"),)),
        ("parameters that are a list", {"text_input": "a", "parameters": [1]}, ("parameters",)),
        ("an unknown parameter", {"text_input": "a", "beam": 2}, ("parameter 'beam'", "accepted")),
        ("a wrong parameter", {"text_input": "a", "max_tokens": "-3"}, ("max_tokens", "is -3")),
        ("a list in a parameter", {"text_input": "a", "stop_token_ids": [1]}, ("stop_token_ids",)),
        ("a negative timeout", {"text_input": "a", "timeout": -5}, ("timeout must be", "is -5")),
        ("a timeout in words", {"text_input": "a", "timeout": "soon"}, ("timeout must", "'soon'")),
        (
            "a sampling object",
            {"text_input": "a", "sampling_parameters": {"n": 1}},
            (not_a("string"),),
        ),
    ):
        yield Case(f"{name} (HTTP generate)", by_http(body), says)
    stray = {"parameters": {"beam": 2}}
    yield Case(
        "an unknown parameter (llm, HTTP generate_stream)",
        by_sse({"text_input": "a", **stray}, "llm"),
        ("in ensemble 'llm', unknown sampling parameter 'beam'", "accepted are"),
    )
    prompt = {"text_input": "a"}
    for way, send in (("scheduler", by_stream), ("generate", by_unary_grpc)):
        yield Case(
            f"a stray parameter ({way}, gRPC)", send(prompt, **stray), ("'beam'", "accepted")
        )
    yield Case(
        "streaming by the unary model",
        by_unary_grpc({"text_input": "a", "stream": True}),
        ("stream",),
    )
    yield Case("unary infer (scheduler)", by_unary_grpc(prompt, "scheduler"), ("decoupled",))
    yield Case("unary infer (llm)", by_unary_http(prompt, "llm"), ("decoupled",))
    yield Case("an unknown model", by_unary_grpc(prompt, "gpt"), ("unknown model: 'gpt'",))
    yield Case(
        "an unknown version", by_unary_grpc(prompt, model_version="9"), ("'generate'", "version|9")
    )
    yield Case("tokenizer without a prompt", by_unary_grpc({}, "tokenizer"), ("text_input",))


# ---------------------------------------------------------------------- plans and locked doors


def by_question(*shape: int) -> Send:
    return by_unary_grpc({"question": np.zeros(shape, dtype=bool)}, "engine")


def by_load(server: TritonServer) -> str:
    """A load with an override is code execution."""
    with contextlib.closing(grpc.InferenceServerClient(server.grpc_url)) as client:
        files = {"file:1/model.py": b"import os; os.abort()"}
        config = json.dumps({"backend": "python"})
        return error_of(lambda: client.load_model("engine", config=config, files=files)).message()


def by_grpc_call(method: str, *arguments: Any) -> Send:
    def send(server: TritonServer) -> str:
        with contextlib.closing(grpc.InferenceServerClient(server.grpc_url)) as client:
            return error_of(lambda: getattr(client, method)(*arguments)).message()

    return send


def by_http_call(method: str, path: str, body: Any = None, status: int = 403) -> Send:
    def send(server: TritonServer) -> str:
        reply = HTTP.request(method, f"http://{server.http_url}{path}", json=body or {})
        assert reply.status_code == status, reply.status_code
        return str(reply.json()["error"])

    return send


def guarded_cases() -> Iterator[Case]:
    """Yield requests that only the scheduler, or a client with the key, may send."""
    for size in (0, 1, 6_000_000):
        says = ("unexpected shape", "1099511627776")
        yield Case(f"engine: {size} bytes", by_question(size), says)
    yield Case("engine: nothing", by_unary_grpc({}, "engine"), ("engine",))
    yield Case("engine: a plan", by_unary_grpc({"plan": "x"}, "engine"), ("plan",))
    key = ("restricted protocol|This protocol is restricted", "charonia-key")
    load = {"parameters": {"config": "{}", "file:1/model.py": "YQ=="}}
    control = (r"models is restricted: name the model KEY:MODEL.*\[charonia:not_supported\]$",)
    yield Case("load with code (gRPC)", by_load, control)
    yield Case("unload (gRPC)", by_grpc_call("unload_model", "engine"), control)
    for operation, body in (("load", load), ("unload", None)):
        path = f"/v2/repository/models/engine/{operation}"
        yield Case(f"{path} (HTTP)", by_http_call("POST", path, body, status=501), control)
    shm = ("register_system_shared_memory", "x", "/x", 64)
    yield Case("shared memory (gRPC)", by_grpc_call(*shm), key)
    cuda = ("register_cuda_shared_memory", "x", b"x" * 64, 0, 64)
    yield Case("CUDA memory (gRPC)", by_grpc_call(*cuda), key)
    yield Case("trace (gRPC)", by_grpc_call("update_trace_settings", None, {"a": "b"}), key)
    yield Case("logging (gRPC)", by_grpc_call("update_log_settings", {"log_info": False}), key)
    for path, body in (
        ("/v2/systemsharedmemory/region/x/register", {"key": "/x", "byte_size": 64}),
        ("/v2/cudasharedmemory/region/x/register", {"byte_size": 64}),
        ("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
        ("/v2/logging", {"log_info": False}),
    ):
        yield Case(f"{path} (HTTP)", by_http_call("POST", path, body), ("restricted",))


CASES = [
    *sampling_cases(),
    *tensor_cases(),
    *inner_cases(),
    *protocol_cases(),
    *guarded_cases(),
]
