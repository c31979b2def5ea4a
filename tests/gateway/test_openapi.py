"""The OpenAPI document: it is valid, says all routes, and answers are as it says."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from openai.types import completion_create_params as completion_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_params
from openapi_spec_validator import validate

from charonia.errors import InvalidRequestError
from charonia.events import Log
from charonia.gateway import openapi, routes
from charonia.gateway.app import make_app
from charonia.gateway.errors import ApiError
from charonia.gateway.fields import INT32_MAX, Fields, read
from charonia.gateway.observing import Metrics
from charonia.gateway.openai.requests import ChatRequest, CompletionRequest, StreamOptions
from charonia.gateway.rest.requests import AllSamplingFields, GenerateRequest
from charonia.protocol import SamplingParams
from support.gateway import Gateway

DOCUMENT = openapi.document()


def check(value: Any, schema: dict[str, Any]) -> None:
    """Whether a value is as a schema of the document says, and names no other field."""
    exact: dict[str, Any] = copy.deepcopy(DOCUMENT["components"])
    for one in exact["schemas"].values():
        one.setdefault("additionalProperties", False)
    validator = jsonschema.Draft202012Validator({**schema, "components": exact})
    assert [error.message for error in validator.iter_errors(value)] == []


def check_stream(media_type: str, text: str, schema: dict[str, Any]) -> None:
    """Whether a stream's parts are as a schema of the document says."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    if media_type == routes.SSE:
        assert lines.pop() == "[DONE]"
    *parts, last = map(json.loads, lines)
    for part in parts:
        check(part, schema["x-part"])
    check(last, schema["x-last-part"])


def contents() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """All media types of answers: where, which, and what is said of it."""
    responses = {"components": DOCUMENT["components"]["responses"]}
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            responses[f"{method} {path}"] = operation["responses"]
    for where, of_status in responses.items():
        for status, response in of_status.items():
            for media_type, content in response.get("content", {}).items():
                yield f"{where} {status}", media_type, content


def check_answer(route: routes.Route, reply: httpx.Response) -> None:
    """Whether a reply is one of those that are said of a route."""
    operation = DOCUMENT["paths"][route.path][route.method]
    response = operation["responses"][str(reply.status_code)]
    media_type = reply.headers["content-type"].partition(";")[0]
    if "$ref" in response:
        response = DOCUMENT["components"]["responses"][response["$ref"].rpartition("/")[2]]
    content = response["content"][media_type]
    if media_type == routes.JSON:
        check(reply.json(), content["schema"])
    elif "x-part" in content["schema"]:
        check_stream(media_type, reply.text, content["schema"])


def test_the_document_is_valid() -> None:
    validate(DOCUMENT)


def test_the_file_and_the_running_gateway_have_the_same(gateway: Gateway) -> None:
    kept = Path(openapi.__file__).with_name("openapi.json").read_text(encoding="utf-8")
    reply = gateway.http.get("/openapi.json")
    assert reply.headers["content-type"] == "application/json"
    assert reply.text == kept


def test_every_route_of_the_gateway_is_described() -> None:
    serving: Any = SimpleNamespace(
        prompts=SimpleNamespace(has_template=True),
        upstream=SimpleNamespace(servers=[]),
        fallback=None,
    )
    watch: Any = SimpleNamespace(stall_timeout_s=1.0)
    app: FastAPI = make_app(serving, watch, Metrics(), Log(print, lambda: "info"))
    served = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    }
    assert {(route.method, route.path) for route in routes.ROUTES} == served


def test_examples_of_answers_are_as_described() -> None:
    num_checked = 0
    for where, media_type, content in contents():
        assert "example" in content, where
        if media_type == routes.JSON:
            check(content["example"], content["schema"])
        elif "x-part" in content["schema"]:
            check_stream(media_type, content["example"], content["schema"])
        num_checked += 1
    assert num_checked > len(routes.ROUTES)


@pytest.mark.parametrize("route", routes.ROUTES, ids=lambda route: route.name)
def test_what_a_route_answers_is_described(gateway: Gateway, route: routes.Route) -> None:
    path = route.path.format(**route.parameters)
    if route.request is None:
        reply = gateway.http.request(route.method, path)
        assert reply.status_code == (404 if route.name == "embed" else 200)
        check_answer(route, reply)
        return
    schema = DOCUMENT["paths"][route.path][route.method]["requestBody"]["content"][routes.JSON]
    for example in route.examples.values():
        check(example, schema["schema"])
        for more in ({}, {"stream": True}) if "stream" in route.request.model_fields else ({},):
            reply = gateway.http.request(route.method, path, json={**example, **more})
            assert reply.status_code == 200, reply.text
            check_answer(route, reply)
    for body in (b"{", b"[]", b'{"temprature": 1}'):
        reply = gateway.http.request(route.method, path, content=body)
        assert reply.status_code == 400
        check_answer(route, reply)


NUMBERS = sorted(
    {
        int(limits[keyword]) + step
        for limits in AllSamplingFields.limits.values()
        for keyword in {"minimum", "exclusiveMinimum", "maximum"} & limits.keys()
        for step in (-1, 0, 1)
    }
)
"""The edges of all ranges, and what is beside them."""
OTHERS: dict[str, list[Any]] = {
    "stop": ["", "x", "x" * 8192, "x" * 8193, [], [""], ["x"] * 64, ["x"] * 65],
    "stop_token_ids": [[], [0] * 1024, [0] * 1025],
    "allowed_token_ids": [[], [0], [0] * 4096, [0] * 4097],
    "bad_words": [[], [""], ["x" * 8193], ["x"] * 256, ["x"] * 257],
    "logit_bias": [{}, {"0": -100}, {"17": 101}, {str(i): 1 for i in range(4097)}],
    "cache_salt": ["", "x" * 256, "x" * 257],
    "tenant": ["", "x" * 256, "x" * 257],
    "cache_priority": [
        [],
        [{"priority": 100, "start": 0, "end": 1, "ttl_s": 1}],
        *([{"priority": 1, **wrong}] for wrong in ({"start": -1}, {"end": 0}, {"ttl_s": 0})),
        [{"start": 1}],
        [{"priority": 101}],
        [{"priority": 1, "more": 1}],
    ],
}
TOGETHER = {"min_tokens": {"max_tokens": INT32_MAX}, "cache_ttl_s": {"cache_priority": 1}}
"""What a parameter needs beside it."""


@pytest.mark.parametrize("name", AllSamplingFields.limits)
def test_the_ranges_in_the_document_are_the_schedulers(name: str) -> None:
    schema = DOCUMENT["components"]["schemas"]["GenerateRequest"]["properties"][name]
    validator = jsonschema.Draft202012Validator(schema)
    found = set()
    for value in [*OTHERS.get(name, []), *NUMBERS]:
        body = {"prompt": "x", **TOGETHER.get(name, {}), name: value}
        try:
            sampling = read(GenerateRequest, json.dumps(body).encode()).sampling()
            biases = {int(token): bias for token, bias in sampling.get("logit_bias", {}).items()}
            SamplingParams(**{**sampling, "logit_bias": biases})
            is_accepted = True
        except (ApiError, InvalidRequestError):
            is_accepted = False
        assert validator.is_valid(value) == is_accepted, value
        found.add(is_accepted)
    assert found == {True, False}


def test_unserved_fields_are_described_with_what_is_accepted() -> None:
    for route in routes.ROUTES:
        if route.request is None:
            continue
        properties = DOCUMENT["components"]["schemas"][route.request.__name__]["properties"]
        example = next(iter(route.examples.values()))
        for name in route.request.unserved:
            for value in properties[name]["enum"]:
                read(route.request, json.dumps({**example, name: value}).encode())
            with pytest.raises(ApiError, match=name):
                read(route.request, json.dumps({**example, name: "?"}).encode())


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_params.CompletionCreateParamsStreaming),
        (StreamOptions, ChatCompletionStreamOptionsParam),
    ],
)
def test_every_field_of_openais_client_is_served_or_known_not_to_be(
    kind: type[Fields], params: type
) -> None:
    known = kind.model_fields.keys() | kind.unserved.keys()
    assert params.__annotations__.keys() - known == set()
