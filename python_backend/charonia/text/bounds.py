"""Bounds the length of a text by its number of tokens, so that longer texts are refused unread.

Owns what each stage of a tokenizer can do to the length of a text. Knows nothing about requests.

Each stage has a limit: the most bytes of its input that one byte, or one token, of its output can
stand for. A stage that may drop text, or make one token of any number of characters, has no limit,
and neither has a stage that is unknown here::

    text ─► normalizer ─► added tokens ─► pre-tokenizer ─► model ─► template
            by 1 to 6     no stripping    drops nothing     the longest token   adds tokens only
"""

import json
from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

_UNICODE_SHRINK = 6
"""Bytes of input for one byte of output. NFKC makes two bytes of a mathematical u (four bytes) with
two marks (four); a Kelvin sign (three bytes) has one byte in lower case. None above 4 is known."""
_SHRINKS = {
    "Prepend": 1,
    "ByteLevel": 1,
    "NFC": _UNICODE_SHRINK,
    "NFD": _UNICODE_SHRINK,
    "NFKC": _UNICODE_SHRINK,
    "NFKD": _UNICODE_SHRINK,
    "Lowercase": _UNICODE_SHRINK,
}
_KEEPING = ("ByteLevel", "Metaspace", "Digits")  # UnicodeScripts drops white space at the start
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
_MAX_CHARACTER_BYTES = 4


def max_bytes_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """The most bytes of a text that one of its tokens can stand for; None if there is no limit.

    A text of more than n times as many bytes has more than n tokens.
    """
    spec = json.loads(backend.to_str())
    shrink = _shrink(spec["normalizer"])
    added = spec["added_tokens"]
    if shrink is None or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    if not all(_keeps_everything(stage) for stage in _flat(spec["pre_tokenizer"], "pretokenizers")):
        return None
    stages = [*_flat(spec["normalizer"], "normalizers")]
    stages += _flat(spec["pre_tokenizer"], "pretokenizers")
    has_bytes = any(stage["type"] == "ByteLevel" for stage in stages)
    longest = _longest_token(spec["model"], has_bytes=has_bytes)
    if longest is None:
        return None
    normalize = backend.normalizer.normalize_str if backend.normalizer else str
    contents = [form(token["content"]) for token in added for form in (str, normalize)]
    return shrink * max(longest, *(len(content.encode()) for content in contents), 1)


def _flat(stage: dict[str, Any] | None, parts: str) -> Iterable[dict[str, Any]]:
    if stage is not None and stage["type"] == "Sequence":
        for inner in stage[parts]:
            yield from _flat(inner, parts)
    elif stage is not None:
        yield stage


def _shrink(normalizer: dict[str, Any] | None) -> int | None:
    """The most bytes of a text for one byte of a normalizer's output; None without a limit."""
    shrink = 1
    for stage in _flat(normalizer, "normalizers"):
        if stage["type"] == "Replace":
            pattern = stage["pattern"].get("String")
            if not pattern or len(stage["content"].encode()) < len(pattern.encode()):
                return None
        elif stage["type"] in _SHRINKS:
            shrink *= _SHRINKS[stage["type"]]
        else:
            return None
    return shrink


def _keeps_everything(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _KEEPING


def _longest_token(model: dict[str, Any], *, has_bytes: bool) -> int | None:
    """Bytes of the longest token; None if one token may stand for any number of characters.

    Args:
        has_bytes: whether the model's characters are bytes, in the byte-level alphabet.
    """
    if model["type"] == "BPE":
        vocabulary = model["vocab"]
    elif model["type"] == "Unigram":
        vocabulary = {piece for piece, _ in model["vocab"]}
    else:  # an unknown word, however long, is one token
        return None
    has_byte_tokens = model["byte_fallback"] and all(one in vocabulary for one in _BYTE_TOKENS)
    if model["type"] == "Unigram":  # it makes one token of a run of unknown characters
        return _longest(vocabulary) if has_byte_tokens else None
    if model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return None
    if has_bytes and all(one in vocabulary for one in pre_tokenizers.ByteLevel.alphabet()):
        return max(map(len, vocabulary))
    if has_byte_tokens:
        return _longest(vocabulary)
    if model["unk_token"] in vocabulary and not model["fuse_unk"]:
        return max(_longest(vocabulary), _MAX_CHARACTER_BYTES)
    return None  # unknown characters are dropped, or a run of them is one token


def _longest(vocabulary: Iterable[str]) -> int:
    return max(len(token.encode()) for token in vocabulary)
