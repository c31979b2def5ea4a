"""Numbers and addresses on the command line. Each error says what would be accepted."""

import argparse
import contextlib
from collections.abc import Callable
from math import inf
from typing import TypeVar
from urllib.parse import urlsplit

from charonia.errors import shown

_MAX_INTEGER = 2**31 - 1
N = TypeVar("N", int, float)


def _number(kind: type[N], text: str, accepted: str, is_accepted: Callable[[N], bool]) -> N:
    """Read a number. Raises itself: for a ValueError argparse would show a function's name."""
    with contextlib.suppress(ValueError):
        value = kind(text)
        if is_accepted(value):
            return value
    raise argparse.ArgumentTypeError(f"{shown(text)} is not {accepted}")


def seconds(text: str) -> float:
    """A number of seconds from 0 on."""
    return _number(float, text, "a number of seconds from 0 on", lambda value: 0 <= value < inf)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    accepted = f"a number from 1 to {_MAX_INTEGER}"
    return _number(int, text, accepted, lambda value: 1 <= value <= _MAX_INTEGER)


def count(text: str) -> int:
    """A whole number from 0 on."""
    accepted = f"a number from 0 to {_MAX_INTEGER}"
    return _number(int, text, accepted, lambda value: 0 <= value <= _MAX_INTEGER)


def positive_float(text: str) -> float:
    """A number above 0."""
    return _number(float, text, "a number above 0", lambda value: 0 < value < inf)


def share(text: str) -> float:
    """A share from 0 to below 1."""
    return _number(float, text, "a share from 0 to below 1", lambda value: 0 <= value < 1)


def number_range(text: str) -> tuple[int, int]:
    """A range A:B of whole numbers, or one of them alone."""
    first, _, last = text.partition(":")
    low, high = positive(first), positive(last or first)
    if low > high:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a range A:B with A up to B")
    return low, high


def port(text: str) -> int:
    """A port; 0 takes a free one."""
    accepted = "a port from 0 to 65535; 0 takes a free one"
    return _number(int, text, accepted, lambda value: 0 <= value < 65536)


def address(text: str) -> str:
    """A server's HOST:PORT, or HOST alone. An IPv6 address is in brackets."""
    with contextlib.suppress(ValueError):  # a port that is none, or a name that is no host's
        parts = urlsplit(f"//{text}")
        _ = parts.port
        host = (parts.hostname or "").encode("idna")
        if host and parts.netloc == text and text.isprintable() and not set(text) & set("@ "):
            return text
    raise argparse.ArgumentTypeError(f"{shown(text)} is not HOST:PORT")
