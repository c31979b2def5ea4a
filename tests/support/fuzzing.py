"""Hostile input for decoders, and what may come of it.

Owns the strategies that tests/fuzz shares, the one statement of what an error may say, and a limit
on memory. Must not know any decoder.
"""

import contextlib
import json
import re
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from hypothesis import strategies as st

from charonia.errors import CharoniaError

MAX_MESSAGE = 2000  # characters
_NEVER_SAID = re.compile(r"Traceback|File \"|\.py\b|/(?:tmp|root|home|usr|opt|proc|dev|var)/")

DEEP = 100_000
"""Brackets; a thousand are too many for a parser that calls itself."""
HUGE_INTEGER = "9" * 100_000
"""More digits than Python turns into a number."""

MANY, FEW = 40, 4

numbers = st.one_of(
    st.integers(-2, 300),
    st.sampled_from([2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63), 10**400]),
    st.floats(),
)
texts = st.one_of(
    # Hypothesis also takes constants of the code, which messages may quote.
    st.text(max_size=20).filter(lambda text: not _NEVER_SAID.search(text)),
    st.sampled_from(
        ["", "\ud800", "\0", "../x", "/etc/passwd", "1e999", "nan", "true", "١٢", " 1"]
    ),
    st.sampled_from(["x" * 2**20, "[" * DEEP, HUGE_INTEGER]),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=6,
)
"""Values that JSON can say, and those that Python's reader makes of more than JSON can say."""
literals = st.one_of(
    values.map(json.dumps),
    st.sampled_from(["1e999", "NaN", "-Infinity", HUGE_INTEGER, "[" * DEEP, '{"a":' * DEEP]),
)
"""A value as text, valid or not."""


@contextlib.contextmanager
def only_clear_errors(*kinds: type[CharoniaError], secret: Path | None = None) -> Iterator[None]:
    """Accept only errors of these kinds, with a short text that reveals nothing.

    Args:
        secret: a path that no message may show.
    """
    try:
        yield
    except kinds as error:
        text = str(error)
        assert text.encode(), "an error without a message"
        assert len(text) <= MAX_MESSAGE, f"{len(text)} characters: {text[:200]}"
        assert not _NEVER_SAID.search(text), text
        assert secret is None or str(secret) not in text, text


@contextlib.contextmanager
def little_memory(num_bytes: int = 2**30) -> Iterator[None]:
    """Limit the address space that may be added here, whatever a header announces."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def altered(whole: Mapping[str, Any]) -> st.SearchStrategy[bytes]:
    """A JSON object with some members replaced, added, doubled or left out; or its bytes damaged.

    Member by member is enough: what a decoder makes of a member shows before it reads the next.
    """
    names = st.one_of(st.sampled_from(sorted(whole)), texts)
    changes = st.lists(st.tuples(names, literals), min_size=1, max_size=3)
    left_out = st.sets(st.sampled_from(sorted(whole)), max_size=1)
    return st.one_of(
        st.builds(lambda cut, added: _object(whole, cut, added), left_out, changes),
        damaged(json.dumps(whole).encode()),
        literals.map(lambda text: text.encode("utf-8", "surrogatepass")),
    )


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """Bytes of which some are replaced, or the end cut off, or followed by others."""

    def damage(replaced: dict[int, int], end: int, tail: bytes) -> bytes:
        some = bytearray(data)
        for place, byte in replaced.items():
            some[place] = byte
        return bytes(some[:end]) + tail

    places = st.integers(0, len(data) - 1)
    return st.builds(
        damage,
        st.dictionaries(places, st.integers(0, 255), max_size=4),
        st.one_of(st.just(len(data)), places),
        st.binary(max_size=8),
    )


def _object(whole: Mapping[str, Any], cut: set[str], added: list[tuple[str, str]]) -> bytes:
    members = [(name, json.dumps(value)) for name, value in whole.items() if name not in cut]
    # Those added come last, so they count where a name comes twice.
    text = ",".join(f"{json.dumps(name)}:{value}" for name, value in members + added)
    return f"{{{text}}}".encode()


def at_place(whole: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A JSON value with one part of it, at any depth, replaced."""
    if not place:
        return value
    if isinstance(whole, dict):
        return whole | {place[0]: at_place(whole[place[0]], place[1:], value)}
    return [*whole[: place[0]], at_place(whole[place[0]], place[1:], value), *whole[place[0] + 1 :]]


def places(whole: Any) -> list[tuple[Any, ...]]:
    """The parts of a JSON value; few of a long list, so that a vocabulary hides nothing else."""
    if not isinstance(whole, dict | list):
        return [()]
    members = list(whole.items() if isinstance(whole, dict) else enumerate(whole))
    if len(members) > MANY:
        members = members[:FEW]
    return [(), *((key, *rest) for key, part in members for rest in places(part))]
