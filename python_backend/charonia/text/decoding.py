"""Text from token ids, a few at a time.

Owns the decoder of a tokenizer.json: the contribution of each token to the text, and the streams
that put the contributions together. Knows nothing about files, requests or stop strings.

A decoder is a chain of stages. The accepted chains can produce text while tokens still arrive; `?`
marks an optional stage, `*` a repeated one::

    token ─► piece                               pieces ─► text
    ByteLevel                                    one UTF-8 decoder, Fuse?
    (Replace | Metaspace | WordPiece)*           ByteFallback?, (Fuse, left Strip?)?

The output of the stages on the left depends only on the token and whether it is the first of the
text. So each token's piece is computed once, by the library itself, and kept.

A stream produces exactly what `tokenizers` makes of all ids at once, with one exception.
`ByteFallback` turns every byte of a run of byte tokens into U+FFFD if any of them is invalid. So
nothing of a run could be returned before its end, and a run can be as long as the output. Here a
run that is valid so far is cut after `MAX_RUN_BYTES` bytes, and its whole characters are returned.
The rest is treated as a run of its own.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import tokenizers
from tokenizers import decoders

from charonia.errors import CheckpointError

MAX_RUN_BYTES = 64

# Stage names, each followed by a space.
_PIECE_CHAIN = re.compile(
    "(?P<per_token>((Replace|Metaspace|WordPiece) )*)"
    "(?P<bytes>ByteFallback )?"
    "(Fuse (?P<strip>Strip )?)?"
)
_ACCEPTED = (
    "ByteLevel, or any of Replace, Metaspace and WordPiece, then ByteFallback, then Fuse, "
    "then Strip on the left"
)
_REPLACEMENT = "\ufffd"
# What `ByteFallback` accepts as a byte. It allows a sign, because Rust's integer parser does.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f+][0-9A-Fa-f])>")
# Put before a token so that it is not the first one; the anchor's text is cut off again.
_ANCHOR = "a"

T = TypeVar("T")
# Text, a byte of a run of byte tokens, or None if the token is left out.
Piece = str | int | None


class TextStream(Protocol):
    """The text of one growing list of token ids."""

    def add(self, ids: Sequence[int]) -> str:
        """Take the next ids and return the text that is complete now."""
        ...

    def finish(self) -> str:
        """Return what was held back. Nothing may be added afterwards."""
        ...


class Decoding(Protocol):
    """The decoder of one tokenizer. Its streams share the piece of each token."""

    def stream(self, skip_special_tokens: bool) -> TextStream:
        """Begin a text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes in a text that has begun; empty for an id without a token.

        The bytes of all tokens, in order, are the bytes of the text, even if a token is not a whole
        character.
        """
        ...


def decoding_of(tokenizer: tokenizers.Tokenizer) -> Decoding:
    """Read the decoder of a tokenizer. Its vocabulary must not change afterwards.

    Raises:
        CheckpointError: it has a chain of stages that is not accepted; the text names them.
    """
    vocabulary = _Vocabulary(tokenizer)
    if tokenizer.decoder is None:
        return _PieceDecoding(
            vocabulary, lambda token, is_first: token if is_first else f" {token}"
        )
    stages = list(_flat(json.loads(tokenizer.decoder.__getstate__())))
    names = [stage["type"] for stage in stages]
    if names in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return _ByteLevelDecoding(vocabulary)
    chain = _PIECE_CHAIN.fullmatch("".join(f"{name} " for name in names))
    no_strip: dict[str, Any] = {"content": "", "start": 0, "stop": 0}
    strip = stages[-1] if chain and chain["strip"] else no_strip
    if chain is None or strip["stop"]:
        raise CheckpointError(
            f"tokenizer.json has the decoder {json.dumps(stages)}, accepted is {_ACCEPTED}"
        )
    return _PieceDecoding(
        vocabulary,
        _per_token(stages[: chain["per_token"].count(" ")]),
        has_byte_tokens=chain["bytes"] is not None,
        strip=strip["content"],
        num_strip=strip["start"],
    )


def _flat(stage: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if stage["type"] != "Sequence":
        yield stage
    for inner in stage.get("decoders", ()):
        yield from _flat(inner)


def _per_token(stages: list[dict[str, Any]]) -> Callable[[str, bool], str]:
    """Return the function (token, is_first) -> text of these stages."""
    decoder = decoders.Sequence([])
    decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": stages}).encode())
    num_anchor_chars = len(decoder.decode([_ANCHOR]))

    def text_of(token: str, is_first: bool) -> str:
        if is_first:
            return decoder.decode([token])
        return decoder.decode([_ANCHOR, token])[num_anchor_chars:]

    return text_of


class _Vocabulary:
    """The token of an id, as the library's `decode` sees it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._id_to_token = tokenizer.id_to_token
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)

    def token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """Return the token; None if it is skipped, or the id has no token.

        A model's vocabulary is often padded, so ids without a token do get sampled.
        """
        token = self._id_to_token(token_id)
        return None if skip_special_tokens and token in self._special else token

    def __contains__(self, token_id: int) -> bool:
        return self._id_to_token(token_id) is not None


class _Table(dict[int, T]):
    """Values by token id, computed on first use.

    Those of ids without a token are not kept: clients may ask for any number of them.
    """

    def __init__(self, vocabulary: _Vocabulary, compute: Callable[[int], T]) -> None:
        self._vocabulary = vocabulary
        self._compute = compute

    def __missing__(self, token_id: int) -> T:
        value = self._compute(token_id)
        if token_id in self._vocabulary:
            self[token_id] = value
        return value


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's map)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class _ByteLevelDecoding:
    def __init__(self, vocabulary: _Vocabulary) -> None:
        alphabet = _byte_alphabet()

        def bytes_of(token_id: int, skip_special_tokens: bool) -> bytes:
            token = vocabulary.token(token_id, skip_special_tokens) or ""
            try:
                return bytes([alphabet[char] for char in token])
            except KeyError:  # an added token with a character outside: it stands for itself
                return token.encode()

        self._tables = {
            skip: _Table(vocabulary, partial(bytes_of, skip_special_tokens=skip))
            for skip in (False, True)
        }

    def stream(self, skip_special_tokens: bool) -> TextStream:
        return _ByteLevelStream(self._tables[skip_special_tokens])

    def token_bytes(self, token_id: int) -> bytes:
        return self._tables[False][token_id]


class _ByteLevelStream:
    """Python replaces invalid UTF-8 just as Rust does: each maximal subpart by one U+FFFD."""

    def __init__(self, table: _Table[bytes]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: Sequence[int]) -> str:
        table = self._table
        return self._utf8.decode(b"".join([table[token_id] for token_id in ids]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceDecoding:
    def __init__(
        self,
        vocabulary: _Vocabulary,
        text_of: Callable[[str, bool], str],
        *,
        has_byte_tokens: bool = False,
        strip: str = "",
        num_strip: int = 0,
    ) -> None:
        def piece_of(token_id: int, skip_special_tokens: bool, is_first: bool) -> Piece:
            token = vocabulary.token(token_id, skip_special_tokens)
            if token is None:
                return None
            text = text_of(token, is_first)
            byte = _BYTE_TOKEN.fullmatch(text) if has_byte_tokens else None
            return int(byte[1], 16) if byte else text

        self._tables = {
            (skip, is_first): _Table(
                vocabulary, partial(piece_of, skip_special_tokens=skip, is_first=is_first)
            )
            for skip in (False, True)
            for is_first in (False, True)
        }
        self._strip = strip
        self._num_strip = num_strip

    def stream(self, skip_special_tokens: bool) -> TextStream:
        return _PieceStream(
            self._tables[skip_special_tokens, True],
            self._tables[skip_special_tokens, False],
            self._strip,
            self._num_strip,
        )

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._tables[False, False][token_id]
        if isinstance(piece, int):
            return bytes([piece])
        return (piece or "").encode()


class _PieceStream:
    def __init__(
        self, first: _Table[Piece], later: _Table[Piece], strip: str, num_strip: int
    ) -> None:
        self._table = first
        self._later = later
        self._run = _ByteRun()
        self._strip = strip
        self._num_strip = num_strip  # characters that may still be stripped at the beginning

    def add(self, ids: Sequence[int]) -> str:
        text = []
        for token_id in ids:
            piece = self._table[token_id]
            if piece is None:
                continue
            self._table = self._later
            if isinstance(piece, int):
                text.append(self._run.add(piece))
            else:
                text.append(self._run.end())
                text.append(piece)
        return self._stripped("".join(text))

    def finish(self) -> str:
        return self._stripped(self._run.end())

    def _stripped(self, text: str) -> str:
        if self._num_strip and text:
            kept = text[: self._num_strip].lstrip(self._strip) + text[self._num_strip :]
            num_cut = len(text) - len(kept)
            self._num_strip = self._num_strip - num_cut if not kept else 0
            return kept
        return text


class _ByteRun:
    """Byte tokens that follow each other, as `ByteFallback` joins them."""

    def __init__(self) -> None:
        self._held = bytearray()  # bytes of a run that is valid so far
        self._is_broken = False

    def add(self, byte: int) -> str:
        if self._is_broken:
            return _REPLACEMENT
        self._held.append(byte)
        try:
            text, num_bytes = codecs.utf_8_decode(self._held, "strict", False)
        except UnicodeDecodeError:
            self._is_broken = True
            return _REPLACEMENT * len(self._held)
        if len(self._held) < MAX_RUN_BYTES:
            return ""
        del self._held[:num_bytes]
        return text

    def end(self) -> str:
        """Return what is held: the text, or one U+FFFD per byte if a character is incomplete."""
        held, is_broken = bytes(self._held), self._is_broken
        self._held.clear()
        self._is_broken = False
        try:
            return "" if is_broken else held.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(held)
