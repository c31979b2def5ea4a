"""Routes of the gateway, with the requests and answers of each, and examples.

Owns the table that the OpenAPI document is made of. Must not know how a route works; `app` does.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

from charonia.gateway.fields import Fields
from charonia.gateway.openai.answers import (
    ChatAnswer,
    ChatChunk,
    DetokenizeAnswer,
    Model,
    Models,
    TextAnswer,
    TokenizeAnswer,
)
from charonia.gateway.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from charonia.gateway.rest.answers import (
    BatchAnswer,
    BatchLine,
    Failure,
    GenerateAnswer,
    Health,
    MetricsAnswer,
    Piece,
    Totals,
)
from charonia.gateway.rest.requests import BatchRequest, GenerateRequest, PromptRequest

JSON = "application/json"
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
TEXT = "text/plain"


class Error(msgspec.Struct):
    """An error. `param` is the field that is wrong, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """The answer to a request that failed."""

    error: Error


@dataclass(frozen=True)
class ErrorStatus:
    """An error status: its meaning, and an answer with it."""

    meaning: str
    example: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """An answer of a route.

    Attributes:
        kind: the JSON of it, or of a part of a stream. says: the form of what is not JSON.
        last_kinds: what the JSON of a stream's last part may be.
    """

    example: Any
    kind: type | None = None
    media_type: str = JSON
    status: HTTPStatus = HTTPStatus.OK
    says: str = ""
    last_kinds: tuple[type, ...] = ()


@dataclass(frozen=True)
class Route:
    """A route.

    Attributes:
        path: as OpenAPI writes it. parameters: of the path, with an example of each.
        examples: of requests, by name. errors: statuses of answers that are errors.
    """

    method: str
    path: str
    name: str
    tag: str
    summary: str
    answers: tuple[Answer, ...]
    errors: tuple[HTTPStatus, ...]
    request: type[Fields] | None = None
    examples: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)


def _example(message: str, kind: str, code: str, param: str | None = None) -> Mapping[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


_INVALID, _SERVER = "invalid_request_error", "server_error"
ERRORS = {
    HTTPStatus.BAD_REQUEST: ErrorStatus(
        "The request is wrong; `param` names the field.",
        _example(
            "Unrecognized request argument supplied: temprature",
            _INVALID,
            "unknown_parameter",
            "temprature",
        ),
    ),
    HTTPStatus.UNAUTHORIZED: ErrorStatus(
        "The gateway wants an API key, and the request has none that is known.",
        _example("the API key is not known here", _INVALID, "invalid_api_key"),
    ),
    HTTPStatus.FORBIDDEN: ErrorStatus(
        "The request names a tenant other than its API key's.",
        _example(
            "tenant must be 'a', that of the API key, or not be given, but is 'b'",
            _INVALID,
            "wrong_tenant",
            "tenant",
        ),
    ),
    HTTPStatus.NOT_FOUND: ErrorStatus(
        "There is no such model.",
        _example("The model 'x' does not exist", _INVALID, "model_not_found", "model"),
    ),
    HTTPStatus.REQUEST_TIMEOUT: ErrorStatus(
        "The request's body did not come in time.",
        _example("the request's body did not come within 30 s", "timeout_error", "request_timeout"),
    ),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: ErrorStatus(
        "The request's body is too large.",
        _example(
            "the request's body must have at most 16777216 bytes", _INVALID, "request_too_large"
        ),
    ),
    HTTPStatus.TOO_MANY_REQUESTS: ErrorStatus(
        "The tenant has reached its limit.",
        _example("tenant 'a' is above its rate", "rate_limit_error", "rate_limit_exceeded"),
    ),
    HTTPStatus.INTERNAL_SERVER_ERROR: ErrorStatus(
        "The gateway or a server failed, or the server was told to cancel the request.",
        _example("the gateway failed", _SERVER, "internal"),
    ),
    HTTPStatus.BAD_GATEWAY: ErrorStatus(
        "A server does not understand the gateway.",
        _example("unknown model 'scheduler'", _SERVER, "no_scheduler"),
    ),
    HTTPStatus.SERVICE_UNAVAILABLE: ErrorStatus(
        "No server takes requests now.",
        _example("no server can be reached", _SERVER, "unavailable"),
    ),
    HTTPStatus.GATEWAY_TIMEOUT: ErrorStatus(
        "The answer was not complete in time.",
        _example("the deadline has passed", "timeout_error", "timeout"),
    ),
}
_OF_WORK = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
_OF_GENERATION = (
    *_OF_WORK,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.GATEWAY_TIMEOUT,
)
# Whatever else goes wrong is said of an entry, within the answer.
_OF_BATCH = tuple(status for status in _OF_WORK if status != HTTPStatus.NOT_FOUND)
_FAULT = (HTTPStatus.INTERNAL_SERVER_ERROR,)
_KEYED_FAULT = (HTTPStatus.UNAUTHORIZED, HTTPStatus.INTERNAL_SERVER_ERROR)


def _events(*values: Mapping[str, Any]) -> str:
    return "".join(f"data: {json.dumps(value)}\n\n" for value in values) + "data: [DONE]\n\n"


_EVENTS = (
    "Server-sent events. The data of each is the JSON of `x-part`, and that of the last one is of "
    "`x-last-part`: an error if the answer failed after its beginning. Then [DONE] follows."
)
_LINES = (
    "Lines of JSON. Each is of `x-part`, and the last one is of `x-last-part`: the totals, or an "
    "error if the batch failed after its beginning."
)
_ID = "8f14e45fceea167a5a36dedd4bea2543"
_USAGE = {
    "prompt_tokens": 6,
    "completion_tokens": 2,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_TEXT_HEAD = {"id": f"cmpl-{_ID}", "created": 1795788000, "model": "small"}
_CHAT_HEAD = {"id": f"chatcmpl-{_ID}", "created": 1795788000, "model": "small"}
_GENERATED = {
    "request_id": _ID,
    "model": "small",
    "prompt_tokens": 6,
    "generated_tokens": 2,
    "text": "x):",
    "token_ids": [120, 312],
    "finish_reason": "length",
    "latency_ms": 25.0,
    "throughput_tokens_per_sec": 80.0,
}
_PIECES = (
    {"request_id": _ID, "text": "x", "token_ids": [120], "finish_reason": None},
    {
        "request_id": _ID,
        "text": "):",
        "token_ids": [312],
        "finish_reason": "length",
        "model": "small",
        "prompt_tokens": 6,
        "generated_tokens": 2,
        "latency_ms": 25.0,
        "throughput_tokens_per_sec": 80.0,
    },
)
_FAILED = {
    "request_id": f"{_ID}-1",
    "error": {
        "message": "The model 'x' does not exist",
        "type": _INVALID,
        "param": "model",
        "code": "model_not_found",
        "status": 404,
    },
}
_RESPONSES = ({**_GENERATED, "request_id": f"{_ID}-0"}, _FAILED)
_TOTALS = {
    "request_ids": [f"{_ID}-0", f"{_ID}-1"],
    "total_latency_ms": 25.0,
    "batch_throughput_tokens_per_sec": 80.0,
}
_TEXT_CHOICE = {"index": 0, "text": "x):", "logprobs": None, "finish_reason": "length"}
_CHAT_CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "Hello!", "refusal": None},
    "logprobs": None,
    "finish_reason": "stop",
}
_CHUNK = "chat.completion.chunk"
_CHAT_PIECE = {
    "index": 0,
    "delta": {"content": "Hello!"},
    "logprobs": None,
    "finish_reason": "stop",
}
_MODEL = {
    "id": "small",
    "created": 1795788000,
    "max_model_len": 4096,
    "root": "small",
    "owned_by": "charonia",
    "object": "model",
}
_SERVER_URL = "127.0.0.1:8001"
_READY = {
    "status": "ready",
    "servers": [{"server": _SERVER_URL, "ready": True, "reason": None}],
}
_NOT_READY = {
    "status": "not ready",
    "servers": [{"server": _SERVER_URL, "ready": False, "reason": "no answer"}],
}
_METRICS = {
    "total_requests": 12,
    "total_tokens_generated": 480,
    "avg_latency_ms": 500.0,
    "avg_throughput_tokens_per_sec": 80.0,
    "cache_hit_rate": 0.25,
    "acceptance_rate": None,
    "uptime_s": 60.0,
    "requests_in_flight": 1,
    "tokens_per_sec": 48.0,
    "ttft_ms": {"p50": 20.0, "p99": 45.0},
    "servers": [
        {"server": _SERVER_URL, "is_up": False, "reason": "no answer", "load": None},
    ],
}
PARTS_OF_REQUESTS: tuple[type[Fields], ...] = (PromptRequest,)
PARTS_OF_ANSWERS: tuple[type, ...] = (Failure, ErrorAnswer)
"""Types that the schemas of others refer to, beside those of the routes."""
_UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE
ROUTES = (
    Route(
        "post",
        "/v1/completions",
        "complete",
        "OpenAI",
        "Complete a text.",
        (
            Answer(
                {
                    **_TEXT_HEAD,
                    "choices": [_TEXT_CHOICE],
                    "usage": _USAGE,
                    "object": "text_completion",
                },
                TextAnswer,
            ),
            Answer(
                _events({**_TEXT_HEAD, "choices": [_TEXT_CHOICE], "object": "text_completion"}),
                TextAnswer,
                SSE,
                says=_EVENTS,
                last_kinds=(TextAnswer, ErrorAnswer),
            ),
        ),
        _OF_GENERATION,
        CompletionRequest,
        {
            "text": {"prompt": "def f(", "max_tokens": 2},
            "stream": {"prompt": [[1, 2], [3]], "stream": True, "max_tokens": 2},
        },
    ),
    Route(
        "post",
        "/v1/chat/completions",
        "chat",
        "OpenAI",
        "Generate the next message of a conversation.",
        (
            Answer(
                {
                    **_CHAT_HEAD,
                    "choices": [_CHAT_CHOICE],
                    "usage": _USAGE,
                    "object": "chat.completion",
                },
                ChatAnswer,
            ),
            Answer(
                _events({**_CHAT_HEAD, "choices": [_CHAT_PIECE], "object": _CHUNK}),
                ChatChunk,
                SSE,
                says=_EVENTS,
                last_kinds=(ChatChunk, ErrorAnswer),
            ),
        ),
        _OF_GENERATION,
        ChatRequest,
        {
            "message": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16},
            "stream": {"messages": [{"role": "user", "content": "Hi"}], "stream": True},
        },
    ),
    Route(
        "post",
        "/v1/embeddings",
        "embed",
        "OpenAI",
        "Refuse: no embedding model is served.",
        (),
        (HTTPStatus.NOT_FOUND, *_KEYED_FAULT),
    ),
    Route(
        "get",
        "/v1/models",
        "models",
        "OpenAI",
        "List the model under its first name.",
        (Answer({"data": [_MODEL], "object": "list"}, Models),),
        _KEYED_FAULT,
    ),
    Route(
        "get",
        "/v1/models/{name}",
        "model",
        "OpenAI",
        "Return the model under any of its names.",
        (Answer(_MODEL, Model),),
        (HTTPStatus.NOT_FOUND, *_KEYED_FAULT),
        parameters={"name": "small"},
    ),
    Route(
        "post",
        "/tokenize",
        "tokenize",
        "vLLM",
        "Return the token ids of a text or a conversation.",
        (
            Answer(
                {"count": 2, "max_model_len": 4096, "tokens": [72, 105], "token_strs": None},
                TokenizeAnswer,
            ),
        ),
        _OF_WORK,
        TokenizeRequest,
        {"text": {"prompt": "Hi"}, "message": {"messages": [{"role": "user", "content": "Hi"}]}},
    ),
    Route(
        "post",
        "/detokenize",
        "detokenize",
        "vLLM",
        "Return the text of token ids.",
        (Answer({"prompt": "Hi"}, DetokenizeAnswer),),
        _OF_WORK,
        DetokenizeRequest,
        {"tokens": {"tokens": [72, 105]}},
    ),
    Route(
        "post",
        "/v1/generate",
        "generate",
        "REST",
        "Complete one prompt.",
        (
            Answer(_GENERATED, GenerateAnswer),
            Answer(_events(*_PIECES), Piece, SSE, says=_EVENTS, last_kinds=(Piece, ErrorAnswer)),
        ),
        (*_OF_GENERATION, HTTPStatus.FORBIDDEN),
        GenerateRequest,
        {
            "text": {"prompt": "def f(", "max_tokens": 2, "temperature": 0.0},
            "stream": {"prompt_tokens": [72, 105], "max_tokens": 2, "stream": True},
        },
    ),
    Route(
        "post",
        "/v1/batch",
        "batch",
        "REST",
        "Complete several prompts at once. An entry that is wrong fails alone.",
        (
            Answer({**_TOTALS, "responses": list(_RESPONSES)}, BatchAnswer),
            Answer(
                "".join(
                    json.dumps(line) + "\n"
                    for line in (
                        {"index": 1, "response": _FAILED},
                        {"index": 0, "response": _RESPONSES[0]},
                        _TOTALS,
                    )
                ),
                BatchLine,
                NDJSON,
                says=_LINES,
                last_kinds=(Totals, ErrorAnswer),
            ),
        ),
        _OF_BATCH,
        BatchRequest,
        {
            "two": {
                "requests": [
                    {"prompt": "def f(", "max_tokens": 2},
                    {"prompt": "x", "model": "x"},
                ]
            },
            "stream": {"requests": [{"prompt": "def f(", "max_tokens": 2}], "stream": True},
        },
    ),
    Route(
        "get",
        "/v1/health",
        "health",
        "Operation",
        "Say that this process works, and whether it would accept a request now.",
        (
            Answer({"live": True, **_READY}, Health),
            Answer({"live": True, **_NOT_READY}, Health, status=_UNAVAILABLE),
        ),
        _FAULT,
    ),
    Route(
        "get",
        "/health/live",
        "live",
        "Operation",
        "Say that this process works.",
        (Answer({"status": "live"}),),
        _FAULT,
    ),
    Route(
        "get",
        "/health/ready",
        "ready",
        "Operation",
        "Say whether the gateway and one of its servers would accept a request now.",
        (Answer(_READY, Health), Answer(_NOT_READY, Health, status=_UNAVAILABLE)),
        _FAULT,
    ),
    Route(
        "get",
        "/v1/metrics",
        "figures",
        "Operation",
        "Return what clients got, and what the servers have to do.",
        (Answer(_METRICS, MetricsAnswer),),
        _KEYED_FAULT,
    ),
    Route(
        "get",
        "/metrics",
        "prometheus",
        "Operation",
        "Return the gateway's metrics for Prometheus.",
        (
            Answer(
                "charonia_gateway_requests_in_flight 1.0\n",
                media_type=TEXT,
                says="Prometheus' text format.",
            ),
        ),
        _FAULT,
    ),
    Route(
        "get",
        "/openapi.json",
        "describe",
        "Operation",
        "Return this document.",
        (Answer({"openapi": "3.1.0"}, says="An OpenAPI document."),),
        _FAULT,
    ),
)
