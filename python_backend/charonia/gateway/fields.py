"""Reads a request. Every field is known, or the refusal names it.

Owns how JSON becomes a request's model, and the texts of refusals. Must not know which
fields there are.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from charonia.checkpoint_files import is_one_of
from charonia.errors import shown
from charonia.gateway.errors import ApiError, invalid

INT32_MAX = 2**31 - 1
MAX_VALUES = 2**16
"""Limit for a field that is not a prompt."""
TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}}
"""The JSON schema of a list of token ids."""
_MAX_PATH = 100
R = TypeVar("R", bound="Fields")
_UNION_PART = re.compile(r"int|str|(list|dict|literal)\[.*")


class Fields(BaseModel):
    """A part of a request, with exactly these fields and types.

    Attributes:
        unserved: further fields of OpenAI's and vLLM's that are not served, with the values that
            ask for nothing and are accepted; null always is.
        long: fields of any length; they check themselves and stop at the first fault.
        limits: keywords of JSON schema for fields whose values are checked elsewhere: they describe
            what is accepted there.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    long: ClassVar[frozenset[str]] = frozenset()
    limits: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe limits and the unserved fields too. See pydantic."""
        found = handler(core_schema)
        properties = handler.resolve_ref_schema(found)["properties"]
        for name, keywords in cls.limits.items():
            properties[name].update(keywords)
        for name, accepted in sorted(cls.unserved.items()):
            properties[name] = {
                "enum": [*_different(accepted), None],
                "description": "Not served. Values that ask for nothing are accepted.",
            }
        return found


def read(kind: type[R], body: bytes) -> R:
    """Read a request.

    Raises:
        ApiError: it is not a JSON object, or has a field that is unknown, not served or wrong.
    """
    try:
        values = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(
            f"the request's body is not valid JSON: {error}", code="invalid_json"
        ) from None
    return read_values(kind, values, "the request's body")


def read_values(kind: type[R], values: Any, what: str) -> R:
    """Read a request from decoded JSON.

    Args:
        what: what it is called in a refusal.

    Raises:
        ApiError: see `read`.
    """
    if not isinstance(values, dict):
        raise invalid(f"{what} must be a JSON object, but is {shown(values)}")
    given = {}
    for name, value in values.items():
        if name not in kind.unserved:
            if name not in kind.model_fields:
                raise _unknown(name)
            if name not in kind.long:
                _check_size(name, value)
            given[name] = value
        elif value is not None and not is_one_of(value, kind.unserved[name]):
            raise _not_served(name, value, kind.unserved[name])
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from None


def _different(values: Sequence[Any]) -> list[Any]:
    """Return the different ones among values: 1 and 1.0 are the same JSON."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def are_token_ids(values: Sequence[Any]) -> bool:
    """Return whether all values can be token ids."""
    return all(type(one) is int and 0 <= one <= INT32_MAX for one in values)


def _check_size(name: str, value: Any) -> None:
    """Bound a value, because pydantic reports every wrong value within it. Raises ApiError."""
    todo, num_values = [value], 0
    while todo:
        one = todo.pop()
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        num_values += len(inner)
        if num_values > MAX_VALUES:
            raise invalid(f"{name} must have at most {MAX_VALUES} values", name)
        todo.extend(inner)


def _unknown(path: str) -> ApiError:
    path = path[:_MAX_PATH]
    return invalid(f"Unrecognized request argument supplied: {path}", path, "unknown_parameter")


def _not_served(name: str, value: Any, accepted: tuple[Any, ...]) -> ApiError:
    words = " or ".join(shown(one) for one in accepted)
    but = f", accepted is {words}" if accepted else ""
    return invalid(f"{name} = {shown(value)} is not supported{but}", name, "unsupported_parameter")


def _refusal(error: ValidationError) -> ApiError:
    """Report the first fault. For a field of several types, report the complaint of each type."""
    found = error.errors(include_url=False)
    first = found[0]
    path = _path(first["loc"])
    name = path.split(".")[0].split("[")[0]
    if first["type"] == "extra_forbidden":
        return _unknown(path)
    if first["type"] == "missing":
        return invalid(f"{path} must be given, but is not", path, "missing_required_parameter")
    reasons = dict.fromkeys(
        one["msg"][:1].lower() + one["msg"][1:]
        for one in found
        if _path(one["loc"]).split(".")[0].split("[")[0] == name
    )
    return invalid(f"{path}: {', or '.join(reasons)}; it is {shown(first['input'])}", name)


def _path(location: tuple[int | str, ...]) -> str:
    """Write a path as in `messages[0].content`, without pydantic's entries for union types."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _UNION_PART.fullmatch(part):
            path += f".{part}" if path else part
    return path[:_MAX_PATH]
