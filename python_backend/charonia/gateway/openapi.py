"""The OpenAPI 3.1 document: what every route takes and answers.

Owns how the table of `routes` becomes that document. The fields come from the models that read
requests and write answers. Must not know how a route works. `make interface` writes it to
`openapi.json`.
"""

import inspect
import json
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from charonia.gateway.routes import (
    ERRORS,
    JSON,
    PARTS_OF_ANSWERS,
    PARTS_OF_REQUESTS,
    ROUTES,
    Answer,
    ErrorAnswer,
    Route,
)
from charonia.version import VERSION

_SCHEMAS = "#/components/schemas/"
_RETRIED = {
    HTTPStatus.TOO_MANY_REQUESTS: True,
    HTTPStatus.SERVICE_UNAVAILABLE: True,
    HTTPStatus.GATEWAY_TIMEOUT: False,
}
"""Errors that may say when to try again, and whether each of them does."""
_KEY = "api_key"
_DESCRIPTION = "A gateway in front of charonia servers: OpenAI's API, and a plain REST API."


class _Untitled(GenerateJsonSchema):
    """A generator of schemas without a title per field, which would repeat its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """See pydantic."""
        return False


def document() -> dict[str, Any]:
    """Return the document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "charonia", "version": VERSION, "description": _DESCRIPTION},
        "paths": paths,
        "security": [{_KEY: []}, {}],
        "components": {
            "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(),
            "responses": {_name_of(status): _error(status) for status in ERRORS},
        },
    }


def encoded() -> str:
    """Return the document as the text of `openapi.json`."""
    return json.dumps(document(), indent=2, ensure_ascii=False) + "\n"


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "tags": [route.tag],
        "summary": route.summary,
    }
    if route.parameters:
        operation["parameters"] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"type": "string"},
                "example": example,
            }
            for name, example in route.parameters.items()
        ]
    if route.request is not None:
        examples = {name: {"value": value} for name, value in route.examples.items()}
        body = {"schema": _ref(route.request), "examples": examples}
        operation["requestBody"] = {"required": True, "content": {JSON: body}}
    responses: dict[str, Any] = {}
    for answer in route.answers:
        empty = {"description": answer.status.phrase, "content": {}}
        response = responses.setdefault(str(int(answer.status)), empty)
        response["content"][answer.media_type] = _content(answer)
    for status in route.errors:
        responses[str(int(status))] = {"$ref": f"#/components/responses/{_name_of(status)}"}
    operation["responses"] = responses
    if HTTPStatus.UNAUTHORIZED not in route.errors:
        operation["security"] = []
    return operation


def _content(answer: Answer) -> dict[str, Any]:
    if answer.kind is not None and answer.media_type == JSON:
        return {"schema": _ref(answer.kind), "example": answer.example}
    schema: dict[str, Any] = {"type": "object" if answer.media_type == JSON else "string"}
    if answer.says:
        schema["description"] = answer.says
    if answer.kind is not None:
        schema["x-part"] = _ref(answer.kind)
        schema["x-last-part"] = {"anyOf": [_ref(kind) for kind in answer.last_kinds]}
    return {"schema": schema, "example": answer.example}


def _name_of(status: HTTPStatus) -> str:
    return f"Error{int(status)}"


def _error(status: HTTPStatus) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": ERRORS[status].meaning,
        "content": {JSON: {"schema": _ref(ErrorAnswer), "example": ERRORS[status].example}},
    }
    if status in _RETRIED:
        header = {
            "description": "Seconds to wait before trying again.",
            "required": _RETRIED[status],
            "schema": {"type": "integer", "minimum": 1},
        }
        response["headers"] = {"Retry-After": header}
    return response


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _SCHEMAS + kind.__name__}


def _schemas() -> dict[str, Any]:
    """The schemas of all requests and answers, by name."""
    requests = _unique(route.request for route in ROUTES if route.request is not None)
    answers = _unique(
        kind
        for route in ROUTES
        for one in route.answers
        for kind in (one.kind, *one.last_kinds)
        if kind
    )
    _, of_requests = models_json_schema(
        [(kind, "validation") for kind in (*requests, *PARTS_OF_REQUESTS)],
        ref_template=_SCHEMAS + "{model}",
        schema_generator=_Untitled,
    )
    _, of_answers = msgspec.json.schema_components(
        [*answers, *PARTS_OF_ANSWERS], ref_template=_SCHEMAS + "{name}"
    )
    found: dict[str, Any] = dict(of_requests["$defs"])
    assert not found.keys() & of_answers.keys(), "a request and an answer have the same name"
    schemas = dict(sorted({**found, **of_answers}.items()))
    for schema in schemas.values():
        if "description" in schema:
            schema["description"] = inspect.cleandoc(schema["description"])
    return schemas


def _unique(kinds: Iterable[type | None]) -> list[Any]:
    return list(dict.fromkeys(kinds))
