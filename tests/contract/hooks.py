"""What schemathesis checks of the gateway beyond its own checks: streams, batches, refusals, keys.

Owns these checks, and what schemathesis is told of the OpenAPI document. Must not know charonia.
schemathesis loads it (`loadtests/gateway_fuzz.py`).
"""

import atexit
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import schemathesis
from schemathesis import (
    Case,
    CheckContext,
    DeserializationContext,
    GenerationMode,
    HookContext,
    Response,
)

MODEL = "small"
VOCAB_SIZE = 384
COUNTS = "CHARONIA_FUZZ_COUNTS"
"""Names the environment variable with the file for the counts of answers."""
KEYS = "CHARONIA_FUZZ_KEYS"
"""Names the environment variable with the gateway's API keys: JSON, the tenant of each or null."""
NO_KEYS = ("Bearer sk-unknown", "Basic sk-unknown", "")
"""Headers without a known key; the empty one is not sent."""
RULES = (
    "exactly one of prompt and prompt_tokens must be given",
    "prompt or messages must be given, and not both",
    r"messages\[\d+\]\.content must be a text or a list of parts, but is null",
    "stream_options needs stream = true",
    "stream_options.continuous_usage_stats needs include_usage = true",
    "prompt_logprobs cannot be had with stream = true",
    "top_logprobs needs logprobs = true",
    "max_tokens = .* and max_completion_tokens = .* say different things",
    "max_tokens must be at least 1, but is 0",  # without `echo`
    "min_tokens must be from 0 to max_tokens",
    r"best_of must be from \d+ to",  # n
    "(stop|bad_words) must have at most 8192 characters",  # together
    "cache_ttl_s = .* has no effect without a cache_priority",
    "(start|end) of cache_priority must be (behind|above)",  # another range or the start
    "add_generation_prompt and continue_final_message cannot both be true",
    "chat_template_kwargs must not have",
    "(prompt|requests) must have at most 8 entries",  # what `charonia gateway` was told
    "This model's maximum context length is",
    "the prompt must have at least one token, but has none",  # of a text
    # A whole number with a fraction or an exponent is an integer in JSON schema.
    r"\w+: input should be a valid integer(, or .*)?; it is -?\d+(\.\d+)?(e\+\d+)?$",
    r"\w+: value error, must be .*list of token ids.*; it is \[.*\d(\.0|e\+\d+)\b",
)
"""Why a request may be refused that the document permits: of two fields, or of the model."""
_VOCABULARY = "^([0-9]|[1-9][0-9]|[12][0-9]{2}|3[0-7][0-9]|38[0-3])$"
_INT32_MAX = 2**31 - 1
_SSE, _NDJSON = "text/event-stream", "application/x-ndjson"
_keys: dict[str, str | None] = json.loads(os.environ.get(KEYS, "{}"))
_counts: Counter[tuple[str, str, str]] = Counter()
_num_calls: Counter[str] = Counter()


@schemathesis.hook
def before_load_schema(context: HookContext, raw_schema: dict[str, Any]) -> None:
    """Permit no field of an answer that the document does not name, and no foreign token id."""
    for name, schema in raw_schema["components"]["schemas"].items():
        schema.setdefault("additionalProperties", False)
        if name != "DetokenizeRequest":  # there a foreign token id has no text
            _bound_ids(schema)
    for methods in raw_schema["paths"].values():
        for operation in methods.values():
            content = operation["responses"].get("200", {}).get("content", {})
            for media_type in {_SSE, _NDJSON} & content.keys():
                # It would be taken for the schema of an event. `stream_conformance` reads x-part.
                del content[media_type]["schema"]["type"]


@schemathesis.hook
def map_body(context: HookContext, body: Any) -> Any:
    """Name the model that is served, where a model is named: another one is only a 404."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        return {**body, "model": MODEL}
    return body


@schemathesis.hook
def before_call(context: HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    """Give known keys in turn, and with every fourth request of a route none, or an unknown one.

    A wrong method always gets a known one: without, it is refused for that. A key with a tenant
    comes with a request for another one where a request may name one.
    """
    if not _keys:
        return
    number = _num_calls[case.operation.label]
    _num_calls[case.operation.label] += 1
    key, tenant = list(_keys.items())[number % len(_keys)]
    if tenant is not None and case.operation.path == "/v1/generate" and isinstance(case.body, dict):
        case.body = {**case.body, "tenant": f"not {tenant}"}
    header = f"Bearer {key}"
    if number % 4 == 3 and case.method.upper() == case.operation.method.upper():
        header = NO_KEYS[number // 4 % len(NO_KEYS)]
    case.headers.pop("Authorization", None)
    if header:
        case.headers["Authorization"] = header


@schemathesis.hook
def after_call(context: HookContext, case: Case, response: Response) -> None:
    """Count answers by operation, status and media type."""
    _counts[case.operation.label, str(response.status_code), _media_type(response)] += 1


@atexit.register
def write_counts() -> None:
    """Write the counts where the environment says."""
    if COUNTS in os.environ:
        rows = [[*key, count] for key, count in sorted(_counts.items())]
        Path(os.environ[COUNTS]).write_text(json.dumps(rows), encoding="utf-8")


@schemathesis.check
def stream_conformance(context: CheckContext, response: Response, case: Case) -> None:
    """Every part of a stream is as the document says, and the stream ends as it says."""
    media_type = _media_type(response)
    if media_type not in (_SSE, _NDJSON):
        return
    text = response.content.decode()
    separator, prefix = ("\n\n", "data: ") if media_type == _SSE else ("\n", "")
    assert text.endswith(separator), f"the stream ends with {text[-100:]!r}"
    parts = text.removesuffix(separator).split(separator)
    assert all(part.startswith(prefix) for part in parts), f"not every part begins {prefix!r}"
    parts = [part.removeprefix(prefix) for part in parts]
    if media_type == _SSE:
        assert parts.pop() == "[DONE]", "the last event is not [DONE]"
    schema = _schema(case, media_type)
    for kind, some in (("x-part", parts[:-1]), ("x-last-part", parts[-1:])):
        validator = jsonschema.Draft202012Validator(
            {**schema[kind], "components": case.operation.schema.raw_schema["components"]}
        )
        for part in some:
            faults = [fault.message[:500] for fault in validator.iter_errors(json.loads(part))]
            assert not faults, f"{part[:500]} is no {kind}: {faults}"


@schemathesis.check
def wrong_entries_fail(context: CheckContext, response: Response, case: Case) -> None:
    """A batch with a wrong entry is answered, and the answer has the error of that entry."""
    if case.operation.path != "/v1/batch" or response.status_code != 200 or not _is_wrong(case):
        return
    text = response.content.decode()
    if _media_type(response) == _NDJSON:
        responses = [json.loads(line).get("response", {}) for line in text.splitlines()]
    else:
        responses = json.loads(text)["responses"]
    assert any("error" in one for one in responses), "no entry failed"


@schemathesis.check
def refusals_say_why(context: CheckContext, response: Response, case: Case) -> None:
    """What the document permits is refused only for a known reason, and that names its field."""
    if response.status_code != 400 or _is_wrong(case):
        return
    error = json.loads(response.content)["error"]
    message = error["message"]
    assert any(re.match(rule, message) for rule in RULES), f"unexpected refusal: {message}"
    is_told = error["param"] is not None or error["code"] == "context_length_exceeded"
    assert is_told, f"no field is named: {message}"


@schemathesis.check
def keys_are_asked_for(context: CheckContext, response: Response, case: Case) -> None:
    """With API keys 401 means that there is no known one, where one is needed.

    403 means that the request names another tenant than that of its key.
    """
    header = case.headers.get("Authorization", "")
    scheme, _, key = header.partition(" ")
    is_known = scheme == "Bearer" and key in _keys
    is_asked = bool(_keys) and case.operation.definition.raw.get("security") != []
    is_refused = response.status_code == 401
    assert is_refused == (is_asked and not is_known), f"{response.status_code} with {header!r}"
    named = case.body.get("tenant") if isinstance(case.body, dict) else None
    own = _keys.get(key)
    is_other = own is not None and (named or own) != own
    if response.status_code == 403:
        assert is_other, f"403 with {header!r} and the tenant {named!r}"
    if response.status_code == 200 and case.operation.path == "/v1/generate":
        assert not is_other, f"200 with {header!r} and the tenant {named!r}"


@schemathesis.deserializer(_NDJSON)
def read_lines(context: DeserializationContext, response: Response) -> str:
    """Take lines as a text, as the document does; `stream_conformance` reads them."""
    return response.content.decode()


def _bound_ids(schema: Any) -> None:
    """Keep token ids within the model's vocabulary, which the document cannot know."""
    if isinstance(schema, list):
        for one in schema:
            _bound_ids(one)
    elif isinstance(schema, dict):
        items = schema.get("items")
        if isinstance(items, dict) and items.get("maximum") == _INT32_MAX:
            schema["items"] = {**items, "maximum": VOCAB_SIZE - 1}
        if "propertyNames" in schema:
            schema["propertyNames"] = {"pattern": _VOCABULARY}
        for one in schema.values():
            _bound_ids(one)


def _is_wrong(case: Case) -> bool:
    """Whether a request breaks the document on purpose."""
    return case.meta is not None and case.meta.generation.mode == GenerationMode.NEGATIVE


def _media_type(response: Response) -> str:
    values = response.headers.get("content-type", [""])
    return values[0].partition(";")[0]


def _schema(case: Case, media_type: str) -> dict[str, Any]:
    paths = case.operation.schema.raw_schema["paths"]
    operation = paths[case.operation.path][case.operation.method.lower()]
    schema: dict[str, Any] = operation["responses"]["200"]["content"][media_type]["schema"]
    return schema
