"""What values of arguments may be, and how those of a file become a configuration.

Owns types that several configurations share, and the errors of names and types. Must not know any
configuration.
"""

import os
import re
from typing import Annotated, Any, TypeVar

import msgspec

from charonia.errors import ConfigError, shown

MAX_INTEGER = 2**31 - 1
MAX_SECONDS = 365 * 24 * 3600.0
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
T = TypeVar("T")
_PORT = re.compile("[0-9]{1,5}")
_MAX_REASON = 200  # characters of a text that is not ours


def is_path(text: str) -> bool:
    """Whether the system could have a path of that name."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host and _PORT.fullmatch(port)) and 0 < int(port) < 2**16


def check_names(values: dict[str, Any], cls: type, what: str) -> None:
    """Refuse names that a configuration does not have.

    Args:
        what: they are, such as "engine argument", for the error's text.

    Raises:
        ConfigError: it names the first of them, and those that there are.
    """
    accepted = [field.encode_name for field in msgspec.structs.fields(cls)]
    for name in values:
        if name not in accepted:
            raise ConfigError(f"unknown {what} {shown(name)}; accepted are {', '.join(accepted)}")


def convert(values: dict[str, Any], cls: type[T], what: str, *, strict: bool = True) -> T:
    """Make a configuration of the values of its fields.

    Args:
        what: they are, as of `check_names`.
        strict: whether a number must be one; else text that says one will do.

    Raises:
        ConfigError: an unknown name, a wrong type or a value out of range; it is named.
    """
    check_names(values, cls, what)
    try:
        return msgspec.convert(values, cls, strict=strict)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: {_shortened(str(error))}") from None


def _shortened(text: str) -> str:
    """msgspec's text, which has the value or the name as it came; what matters ends it."""
    return (
        text
        if len(text) <= _MAX_REASON
        else f"{text[: _MAX_REASON // 2]}…{text[-_MAX_REASON // 2 :]}"
    )
