"""Parses sampling parameters as clients write them: numbers and booleans may be strings.

Owns the names, type coercion, and the names that Triton adds. Must not know tensors;
`SamplingParams` checks the ranges.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from charonia.errors import InvalidRequestError, shown
from charonia.protocol import (
    INT32_MAX,
    WITHOUT_BEAM_SEARCH,
    CacheRange,
    SamplingParams,
    check_no_beam_search,
)
from charonia.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from charonia.tracing.traceparent import TRACEPARENT

_INTEGER = re.compile(r"[+-]?\d{1,20}")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_NOT_OURS = ("id", "timeout")
_NOT_OURS_PREFIX = "sequence_"


def parse_sampling_params(
    values: Mapping[str, Any], defaults: SamplingDefaults = NO_DEFAULTS
) -> SamplingParams:
    """Coerce and check parameters. Null is the default; names that Triton adds are ignored.

    Parameters of beam search that turn it off, such as `use_beam_search` false, are ignored, too.

    Args:
        defaults: of the present model, before those of `SamplingParams`.

    Raises:
        InvalidRequestError: an unknown name, or a value of the wrong type or out of range.
        NotSupportedError: something that charonia does not do.
    """
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name in _NOT_OURS or name.startswith(_NOT_OURS_PREFIX):
            continue
        if name in WITHOUT_BEAM_SEARCH:
            _check_no_beam_search(name, value)
            continue
        coerce = _COERCIONS.get(name)
        if coerce is None:
            raise InvalidRequestError(
                f"unknown sampling parameter {shown(name)}; accepted are {', '.join(_COERCIONS)}"
            )
        if value is not None:
            arguments[name] = coerce(name, value)
    return defaults.fill(arguments)


OF_REQUESTS = ("tenant", "priority", "deadline_ms")
"""Parameters of scheduling: the request's own parameters may have them, too."""


def without_headers(
    parameters: Mapping[str, Any], is_forwarded: Callable[[str], bool]
) -> dict[str, Any]:
    """A request's own parameters, without those that are forwarded headers.

    A header may have the name of a parameter: HTTP's `priority` (RFC 9218) is not a number. The
    trace context is left out in any case, see `traceparent_of`.

    Args:
        is_forwarded: whether Triton forwards a header of this name as a parameter.
    """
    return {
        name: value
        for name, value in parameters.items()
        if name.lower() != TRACEPARENT
        and (not is_forwarded(name) or (name in _KNOWN and not _is_header(name, value)))
    }


def tenant_of_header(parameters: Mapping[str, Any], header: str) -> str:
    """The tenant in a header, which Triton forwards as a parameter; "" without one.

    gRPC turns the names of headers into lower case; HTTP keeps them.

    Raises:
        InvalidRequestError: the header is given twice, so it is ambiguous.
    """
    values = [value for name, value in parameters.items() if name.lower() == header.lower()]
    if len(values) > 1:
        raise InvalidRequestError(f"the header {header} is given more than once")
    return _string(f"the header {header}", values[0]) if values else ""


def parse_timeout(value: Any) -> int:
    """`timeout` of the request's own parameters, in microseconds; 0 is none.

    Raises:
        InvalidRequestError: it is not an integer of at least 0.
    """
    timeout_us = _integer("timeout", value)
    if timeout_us < 0:
        raise _ill_typed("timeout", value, "microseconds, at least 0")
    return timeout_us


def _ill_typed(name: str, value: Any, accepted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {accepted}, but is {shown(value)}")


def _integer(name: str, value: Any) -> int:
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        value = int(value.strip())
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**64:
        raise _ill_typed(name, value, "an integer")
    return value


def _token_id(name: str, value: Any) -> int:
    token_id = _integer(name, value)
    if abs(token_id) > INT32_MAX:  # it must fit into the engine's tensors
        raise _ill_typed(name, value, f"an integer from 0 to {INT32_MAX}")
    return token_id


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _ill_typed(name, value, "a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise _ill_typed(name, value, "a number") from None


def _boolean(name: str, value: Any) -> bool:
    flag = _BOOLEANS.get(str(value).strip().lower())
    if flag is None:
        raise _ill_typed(name, value, "true or false")
    return flag


def _check_no_beam_search(name: str, value: Any) -> None:
    without = WITHOUT_BEAM_SEARCH[name]
    with contextlib.suppress(InvalidRequestError):
        if _BY_TYPE[type(without)](name, value) == without:
            return
    check_no_beam_search(name, value)


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _ill_typed(name, value, "a string")
    _check_unicode(name, value)
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise _ill_typed(name, value, "a string or a list of strings")
    for item in values:
        _check_unicode(name, item)
    return tuple(values)


def _integers(name: str, value: Any) -> tuple[int, ...]:
    accepted = "a list of integers"
    values = _json_value(name, value, accepted)
    if not isinstance(values, list):
        raise _ill_typed(name, value, accepted)
    return tuple(_token_id(f"each of {name}", item) for item in values)


def _biases(name: str, value: Any) -> dict[int, float]:
    accepted = "an object of token ids and numbers"
    values = _json_value(name, value, accepted)
    if not isinstance(values, dict):
        raise _ill_typed(name, value, accepted)
    return {
        _token_id(f"each token id of {name}", token_id): _number(
            f"{name} of {shown(token_id)}", bias
        )
        for token_id, bias in values.items()
    }


def _cache_priority(name: str, value: Any) -> int | tuple[CacheRange, ...]:
    accepted = "an integer or a list of ranges"
    values = _json_value(name, value, accepted)
    if not isinstance(values, list):
        if isinstance(values, int | float):
            return _integer(name, values)
        raise _ill_typed(name, value, accepted)
    return tuple(_cache_range(name, item) for item in values)


def _cache_range(name: str, value: Any) -> CacheRange:
    if not isinstance(value, dict) or not value.keys() <= _OF_RANGES.keys():
        accepted = f"an object with {', '.join(_OF_RANGES)}, of which priority must be there"
        raise _ill_typed(f"each range of {name}", value, accepted)
    fields = {
        field: _OF_RANGES[field](f"{field} of {name}", item)
        for field, item in value.items()
        if item is not None
    }
    if "priority" not in fields:
        raise _ill_typed(f"priority of {name}", None, "an integer")
    return CacheRange(**fields)


def _json_value(name: str, value: Any, accepted: str) -> Any:
    """Parse JSON in a string: the request's own parameters cannot be lists or objects."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise _ill_typed(name, value, accepted) from None


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _ill_typed(name, text, "valid Unicode, without unpaired surrogates") from None


_OF_RANGES: dict[str, Callable[[str, Any], Any]] = {
    "start": _integer,
    "end": _integer,
    "priority": _integer,
    "ttl_s": _number,
}
_BY_TYPE: dict[Any, Callable[[str, Any], Any]] = {
    int: _integer,
    int | None: _integer,
    float: _number,
    bool: _boolean,
    str: _string,
    tuple[str, ...]: _strings,
    tuple[int, ...]: _integers,
    tuple[int, ...] | None: _integers,
    dict[int, float]: _biases,
    int | tuple[CacheRange, ...] | None: _cache_priority,
    float | None: _number,
}
_COERCIONS = {name: _BY_TYPE[kind] for name, kind in get_type_hints(SamplingParams).items()}
PARAMETER_NAMES = frozenset(_COERCIONS)
_KNOWN = PARAMETER_NAMES | {*_NOT_OURS}


def _is_header(name: str, value: Any) -> bool:
    is_text = isinstance(value, str) and not _INTEGER.fullmatch(value.strip())
    return name in ("priority", "timeout") and is_text
