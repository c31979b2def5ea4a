"""Types of arguments, and the conversion of a file's values to a configuration.

Owns the types that several configurations share, and the errors about names and types. Knows
nothing about any configuration.
"""

import os
import re
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import inspect

from charonia.errors import ConfigError, shown

MAX_INTEGER = 2**31 - 1
MAX_SECONDS = 365 * 24 * 3600.0
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
Quantization = Literal["int8", "w8a8"]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
T = TypeVar("T")
_PORT = re.compile("[0-9]{1,5}")
_WORDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.DictType: "an object",
    inspect.NoneType: "null",
    inspect.StructType: "an object",
}


def is_path(text: str) -> bool:
    """Return whether the operating system could have a path of that name."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def is_address(text: str) -> bool:
    """Return whether it is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host and _PORT.fullmatch(port)) and 0 < int(port) < 2**16


def convert(values: dict[str, Any], cls: type[T], what: str, *, strict: bool = True) -> T:
    """Convert the values of its fields to a configuration.

    Args:
        cls: a Struct. what: what its fields are called in errors, such as "engine argument".
        strict: False also accepts a number as text.

    Raises:
        ConfigError: an unknown name, a wrong type or a value out of range. It names the value and
            what is accepted.
    """
    _check_names(values, cls, what)
    try:
        return msgspec.convert(values, cls, strict=strict)
    except (ValueError, RecursionError):
        raise ConfigError(_fault(values, cls, "", strict=strict)) from None


def _check_names(values: dict[str, Any], cls: type, what: str) -> None:
    accepted = [field.encode_name for field in msgspec.structs.fields(cls)]
    for name in values:
        if name not in accepted:
            raise ConfigError(f"unknown {what} {shown(name)}; accepted are {', '.join(accepted)}")


def _fault(value: Any, kind: Any, name: str, *, strict: bool) -> str:
    """Describe the fault of a value, or of a value inside it; "" if there is none.

    Args:
        kind: its type, as in the annotation of a field.
    """
    options = _options(kind)
    for option in options if isinstance(value, dict) else ():
        if isinstance(option, inspect.StructType):
            return _fault_of_fields(value, option.cls, name, strict=strict)
        if isinstance(option, inspect.DictType):
            item = get_args(kind)[1]
            faults = (
                _fault(value[key], item, f"{name}[{shown(key)}]", strict=strict) for key in value
            )
            return next(filter(None, faults), "")
    try:
        msgspec.convert(value, kind, strict=strict)
    except (ValueError, RecursionError):
        *others, last = [word for option in options for word in _words(option)]
        accepted = f"{', '.join(others)} or {last}" if others else last
        return f"{name} must be {accepted}, but is {shown(value)}"
    return ""


def _fault_of_fields(values: dict[str, Any], cls: Any, name: str, *, strict: bool) -> str:
    _check_names(values, cls, f"key of {name}")
    for field in msgspec.structs.fields(cls):
        full_name = f"{field.encode_name} of {name}" if name else field.encode_name
        if field.encode_name not in values:
            if field.required:
                return f"{full_name} must be given"
        elif fault := _fault(values[field.encode_name], field.type, full_name, strict=strict):
            return fault
    try:
        msgspec.convert(values, cls, strict=strict)
    except ValueError as error:  # the configuration's own
        reason = str(error.__cause__ or error)
        return f"{name}: {reason}" if name else reason
    return ""


def _options(kind: Any) -> tuple[inspect.Type, ...]:
    """The types that a value may have."""
    found = inspect.type_info(kind)
    return found.types if isinstance(found, inspect.UnionType) else (found,)


def _words(kind: inspect.Type) -> list[str]:
    """Describe the values that a type accepts, in words for an error."""
    match kind:
        case inspect.LiteralType():
            return [repr(value) for value in kind.values]
        case inspect.IntType():
            return [f"an integer{_range(kind)}"]
        case inspect.FloatType():
            return [f"a number{_range(kind)}"]
        case inspect.StrType():
            return ["a string" if kind.pattern is None else f"a string like {kind.pattern}"]
    return [_WORDS[type(kind)]]


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    """The range of a number that is bounded on both sides, or on none."""
    if kind.ge is None and kind.gt is None:
        return ""
    low = (
        f" above {_plain(kind.gt)} and at most"
        if kind.ge is None
        else f" from {_plain(kind.ge)} to"
    )
    return f"{low} {_plain(kind.le)}" if kind.lt is None else f"{low} below {_plain(kind.lt)}"


def _plain(bound: float | None) -> str:
    """A bound as people write it: an integer with all of its digits."""
    return str(bound) if isinstance(bound, int) else f"{bound:.10g}"
