"""Converts values from Python programs to the types of a Struct's fields.

Owns which values count as which type, e.g. numpy's numbers as numbers, and the texts of the errors.
Knows nothing about any field.
"""

import numbers
from collections.abc import Callable, Collection, Mapping
from functools import reduce
from operator import or_
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec

from charonia.errors import InvalidRequestError, shown


class Kind(NamedTuple):
    """A type of fields.

    Attributes:
        accepted: what it accepts, in words for an error.
        read: converts a value; raises TypeError, ValueError or OverflowError for another type.
    """

    accepted: str
    read: Callable[[Any], Any]


class Field(NamedTuple):
    """A field. `default` is not converted."""

    name: str
    default: Any
    kind: Kind


def _integer(value: Any) -> int:
    if type(value) is int:  # nearly always, and the test below is slow
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError
    return int(value)


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError
    return float(value)


def _instance(cls: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, cls):
            raise TypeError
        return value

    return read


def _items(value: Any) -> Collection[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        raise TypeError
    return value


_boolean, _mapping = _instance(bool), _instance(Mapping)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    if not value.isascii():
        value.encode()  # raises a ValueError for an unpaired surrogate
    return value


def _strings(value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else _items(value)
    return tuple(map(_string, items))


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(map(_integer, _items(value)))


def _biases(value: Any) -> dict[int, float]:
    return {_integer(key): _number(bias) for key, bias in _mapping(value).items()}


KINDS: dict[Any, Kind] = {
    int: Kind("an integer", _integer),
    float: Kind("a number", _number),
    bool: Kind("True or False", _boolean),
    str: Kind("a string of valid Unicode", _string),
    tuple[str, ...]: Kind("a string or a list of strings of valid Unicode", _strings),
    tuple[int, ...]: Kind("a list of integers", _integers),
    dict[int, float]: Kind("a dict of token ids and numbers", _biases),
}
"""Kinds by the type of the annotation."""


def fields_of(cls: type[msgspec.Struct], kinds: Mapping[Any, Kind] = KINDS) -> list[Field]:
    """The fields of a Struct.

    Args:
        kinds: the kind of every type that a field has. `T | None` takes the kind of `T`.
    """
    hints = get_type_hints(cls)
    return [
        Field(field.name, field.default, _kind(hints[field.name], kinds))
        for field in msgspec.structs.fields(cls)
    ]


def read_fields(struct: msgspec.Struct, fields: list[Field], what: str = "{}") -> None:
    """Convert each field's value in place to the field's type; only for a new Struct.

    Args:
        fields: those of its class. what: how an error names a field; {} is its name.

    Raises:
        InvalidRequestError: a value of another type; the text names it and what is accepted.
    """
    for value, (name, default, kind) in zip(msgspec.structs.astuple(struct), fields, strict=True):
        if value is default:
            continue
        try:
            read = kind.read(value)
            if read is not value:
                msgspec.structs.force_setattr(struct, name, read)
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequestError(
                f"{what.format(name)} must be {kind.accepted}, but is {shown(value)}"
            ) from None


def _kind(hint: Any, kinds: Mapping[Any, Kind]) -> Kind:
    if NoneType not in get_args(hint):
        return kinds[hint]
    accepted, read = kinds[reduce(or_, (one for one in get_args(hint) if one is not NoneType))]
    return Kind(f"{accepted} or None", lambda value: None if value is None else read(value))
