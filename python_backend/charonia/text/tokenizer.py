"""A checkpoint's tokenizer: text to token ids, and single tokens back.

Owns reading the tokenizer's files of a checkpoint in Hugging Face format. Knows nothing about
requests; the detokenizer handles text that arrives token by token.

The tokenizer is tokenizer.json. As in transformers, the other files only make tokens special or add
some: those in `added_tokens_decoder` (tokenizer_config.json) and named ones, such as `eos_token`
(also in special_tokens_map.json, if there is no `added_tokens_decoder`). A token that is special in
tokenizer.json stays so. One that is added there as an ordinary token becomes special if it is
named, and in `added_tokens_decoder` if there is one; not if it is only in a list without names
(`additional_special_tokens`). With `split_special_tokens` a text has no special tokens: they are
spelled like other words. Only the template of tokenizer.json adds tokens around a prompt;
`add_bos_token` is ignored, as in transformers. Unlike there, a named token that is not in the
vocabulary is left out, because no model could have an embedding for it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from charonia.errors import CharoniaError, CheckpointError, InvalidRequestError, shown
from charonia.text.bounds import max_bytes_per_token
from charonia.text.decoding import Decoding, decoding_of
from charonia.text.special_tokens import (
    CONFIG_FILE,
    NAMED_TOKENS,
    SPECIAL_TOKENS_FILE,
    read_token_config,
)

_TOKENIZER_FILE = "tokenizer.json"
_LISTED_TOKENS = ("additional_special_tokens", "extra_special_tokens")
_TOKEN_ID = re.compile("[0-9]{1,10}")
_MAX_REASON = 200  # characters of the library's own error text
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


class Tokenizer:
    """Text to ids and back.

    Args:
        backend: a tokenizer of the `tokenizers` library; it must not be changed afterwards.

    Attributes:
        vocab_size: number of tokens, with added ones. A model's vocabulary may be padded beyond it.
        special_ids: ids of tokens that `skip_special_tokens` leaves out.
        decoding: for detokenizers.

    Raises:
        CheckpointError: the decoder cannot be streamed; the text names its stages.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # `encode` would apply both, but the tokenizer must not limit the length of a prompt.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.decoding: Decoding = decoding_of(backend)
        # A call may ask for thousands, and the vocabulary does not change.
        self._token_texts = lru_cache(maxsize=self.vocab_size)(self._decode_alone)

    @classmethod
    def from_dir(cls, path: Path) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json and special_tokens_map.json of a checkpoint.

        Raises:
            CheckpointError: there is no tokenizer.json, or a file is invalid.
        """
        try:
            data = (path / _TOKENIZER_FILE).read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"the checkpoint has no {_TOKENIZER_FILE}") from None
        except OSError as error:
            raise CheckpointError(f"{_TOKENIZER_FILE} cannot be read: {error.strerror}") from None
        config = read_token_config(path)
        with _library_errors(CheckpointError, f"{_TOKENIZER_FILE} cannot be read"):
            backend = tokenizers.Tokenizer.from_buffer(data)
        with _library_errors(CheckpointError, f"{CONFIG_FILE} does not fit {_TOKENIZER_FILE}"):
            _add_tokens(backend, config)
            backend.encode_special_tokens = _splits_special_tokens(config)
        with _library_errors(CheckpointError, f"{_TOKENIZER_FILE} makes no sense"):
            tokenizer = cls(backend)
            backend.encode("")  # applies the template
        return tokenizer

    @cached_property
    def max_bytes_per_token(self) -> int | None:
        """The most bytes of a text for one of its tokens; None if there is no limit."""
        return max_bytes_per_token(self._backend)

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        check_length: Callable[[int], object] = lambda num_ids: None,
    ) -> list[int]:
        """Return the ids of a text.

        Args:
            add_special_tokens: also add the tokens of the tokenizer's template, e.g. a BOS.
            check_length: called with the number of ids before they are made a list; it may raise
                to prevent that.

        Raises:
            InvalidRequestError: the text has unpaired surrogates, so it is not valid Unicode; or
                it has characters without a token, and there is no token for unknown ones.
        """
        (encoding,) = self._encode_all([text], add_special_tokens)
        check_length(len(encoding))
        return encoding.ids

    def _encode_all(self, texts: list[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        with _library_errors(InvalidRequestError, "the text cannot be tokenized"):
            try:
                # Use one batch call, even for a single text: `encode` would hold the interpreter's
                # lock, 1 s per MB of text, and each further call waits for the lock once more.
                return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            except TypeError:
                wrong = next(filter(_has_surrogates, texts))
                raise InvalidRequestError(
                    f"text must be valid Unicode, but {shown(wrong)} has unpaired surrogates"
                ) from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of all `ids`; ids without a token are left out."""
        stream = self.decoding.stream(skip_special_tokens)
        return stream.add(ids) + stream.finish()

    def tokens(self) -> dict[int, str]:
        """Every token as the vocabulary spells it, by its id."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return {id_: token for token, id_ in vocabulary.items()}

    def token_text(self, token_id: int) -> str:
        """Return one token decoded alone, with U+FFFD if it is not a whole character.

        A special token is shown by its content, an id without a token as "".
        """
        return self._token_texts(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes in a text that has begun, special or not: see `Decoding`."""
        return self.decoding.token_bytes(token_id)

    def _decode_alone(self, token_id: int) -> str:
        if token_id in self.special_ids:
            return self._backend.id_to_token(token_id) or ""
        return self.decode([token_id])

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the id sequences that spell words which must not be generated.

        As in vLLM, each word is spelled at the beginning of a text and after a space. vLLM drops
        the second spelling if its number of tokens differs, and so misses words that are one token
        in mid-text and several at the beginning. Here it is dropped only if it ends with the first
        spelling, which then bans it already. A word of white space is taken as it is.

        Raises:
            InvalidRequestError: a word has no tokens, or is not valid Unicode.
        """
        if not words:
            return []
        spellings = [_spellings(word) for word in words]
        encodings = iter(self._encode_all([*chain.from_iterable(spellings)], False))
        return [
            ids
            for word, texts in zip(words, spellings, strict=True)
            for ids in _banned(word, [encoding.ids for encoding in islice(encodings, len(texts))])
        ]


def _spellings(word: str) -> list[str]:
    bare = word.lstrip()
    return [bare, f" {bare}"] if bare else [word]


def _banned(word: str, spelled: list[list[int]]) -> list[list[int]]:
    """The spellings of a word that must be banned."""
    ids, *others = spelled
    if not ids:
        raise InvalidRequestError(f"bad_words must have tokens, but {shown(word)} has none")
    return [ids, *(other for other in others if other[-len(ids) :] != ids)]


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


@contextmanager
def _library_errors(kind: type[CharoniaError], what: str) -> Iterator[None]:
    """Convert the library's errors, which have no type of their own, to a typed error.

    The library panics on some files and texts. A panic is a BaseException, not an Exception.
    """
    try:
        yield
    except CharoniaError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {str(error)[:_MAX_REASON]}") from None


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add tokens and make some special, as a configuration says."""
    by_id = _add_tokens_by_id(backend, config)
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    named, others = _special_entries(config)
    for entry in named:
        token = _added_token(entry, is_special=True)
        if token.content in added:
            if "added_tokens_decoder" in config and token.content not in by_id:
                continue
            token = added[token.content]
            token.special = True
        _make_special(backend, token)
    for entry in others:
        token = _added_token(entry, is_special=True)
        if token.content not in added:
            _make_special(backend, token)


def _add_tokens_by_id(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> set[str]:
    """Add the tokens of `added_tokens_decoder`; return their contents."""
    entries = config.get("added_tokens_decoder", {})
    if not isinstance(entries, dict) or not all(map(_TOKEN_ID.fullmatch, entries)):
        raise CheckpointError(f"{CONFIG_FILE}: added_tokens_decoder must map token ids to tokens")
    special = {one.content for one in backend.get_added_tokens_decoder().values() if one.special}
    contents = set()
    for id_, entry in sorted((int(id_), entry) for id_, entry in entries.items()):
        token = _added_token(entry, is_special=False)
        if token.content in special:  # the library does not forget that
            token.special = True
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != id_:
            raise CheckpointError(
                f"{CONFIG_FILE}: token {shown(token.content)} has id {id_}, but "
                f"{backend.token_to_id(token.content)} in {_TOKENIZER_FILE}"
            )
        contents.add(token.content)
    return contents


def _special_entries(config: dict[str, Any]) -> tuple[list[object], list[object]]:
    """The entries of special tokens that have names, and of those that have none."""
    named = [config[name] for name in NAMED_TOKENS if config.get(name) is not None]
    others: list[object] = []
    for name in _LISTED_TOKENS:
        entries = config.get(name) or []
        if isinstance(entries, dict):
            named += entries.values()
        elif isinstance(entries, list):
            others += entries
        else:
            raise CheckpointError(
                f"{CONFIG_FILE}: {name} must list tokens, but is {shown(entries)}"
            )
    return named, others


def _make_special(backend: tokenizers.Tokenizer, token: AddedToken) -> None:
    if backend.token_to_id(token.content) is not None:
        backend.add_special_tokens([token])


def _splits_special_tokens(config: dict[str, Any]) -> bool:
    value = config.get("split_special_tokens")
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(
            f"{CONFIG_FILE}: split_special_tokens must be true or false, but is {shown(value)}"
        )
    return bool(value)


def _added_token(entry: object, *, is_special: bool) -> AddedToken:
    """Read a token of a configuration: its content, or an object with that and flags."""
    if isinstance(entry, str):
        return AddedToken(entry, special=is_special)
    if isinstance(entry, dict) and isinstance(entry.get("content"), str):
        flags = {name: bool(entry[name]) for name in _TOKEN_FLAGS if name in entry}
        is_special = is_special or bool(entry.get("special", False))
        return AddedToken(entry["content"], special=is_special, **flags)
    raise CheckpointError(
        f"{CONFIG_FILE} or {SPECIAL_TOKENS_FILE}: a token must be a string or an object with "
        f"content, but is {shown(entry)}"
    )
