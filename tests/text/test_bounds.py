"""A text has no more bytes than its tokens can stand for; some tokenizers have no bound."""

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from charonia.config import DEMO_CHECKPOINT
from charonia.text import tokenizer as tokenizer_module
from charonia.text.bounds import max_bytes_per_token
from text.conftest import byte_level

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["a", "ab", "the", " the", "▁the", "▁", "é", "日本", "😀", "\u0130", "\u212a", "ǖ", "각"]


def bpe(*, pieces: list[str] = WORDS, **options: Any) -> Tokenizer:
    """Single characters of all pieces, and one merge; whatever the options say beside."""
    characters = sorted({character for piece in pieces for character in piece})
    tokens = ["<unk>", *characters, *(["th"] if "t" in characters else [])]
    if options.get("byte_fallback"):
        tokens += BYTE_TOKENS
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [("t", "h")] if "th" in vocabulary else []
    return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))


def unigram(*, byte_fallback: bool) -> Tokenizer:
    pieces = [("<unk>", 0.0), *((word, -1.0) for word in WORDS)]
    if byte_fallback:
        pieces += [(token, -2.0) for token in BYTE_TOKENS]
    return Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))


def word_level() -> Tokenizer:
    return Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))


def word_piece() -> Tokenizer:
    return Tokenizer(models.WordPiece({"<unk>": 0, "a": 1}, unk_token="<unk>"))


def llama2() -> Tokenizer:
    tokenizer = bpe(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.add_tokens(["two words"])
    return tokenizer


def unicode_forms(form: Any) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = byte_level()
        tokenizer.normalizer = form
        return tokenizer

    return make


def demo() -> Tokenizer:
    return tokenizer_module.Tokenizer.from_dir(DEMO_CHECKPOINT)._backend


BOUNDED: dict[str, tuple[Callable[[], Tokenizer], int | None]] = {
    "the demo's": (demo, 41),
    "byte level": (byte_level, None),
    "byte fallback": (llama2, None),
    "unknown characters one by one": (lambda: bpe(unk_token="<unk>"), 5),
    "unigram with bytes": (lambda: unigram(byte_fallback=True), 6),
    "NFKC": (unicode_forms(normalizers.NFKC()), None),
    "NFC in lower case": (
        unicode_forms(normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
        None,
    ),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_more_bytes_than_its_tokens_can_stand_for(name: str) -> None:
    make, expected = BOUNDED[name]
    tokenizer = make()
    bound = max_bytes_per_token(tokenizer)
    assert bound is not None
    assert expected in (None, bound)
    pieces = [*tokenizer.get_vocab(), *WORDS, "\U0001d42e\u0308\u0304", "ￗ", "ㅤ", "\u0344", "  "]
    texts = st.lists(st.sampled_from(pieces) | st.text(max_size=3), max_size=40).map("".join)

    @settings(max_examples=80, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        num_bytes = len(text.encode())
        assert num_bytes <= bound * len(tokenizer.encode(text, add_special_tokens=False).ids)

    check()


def test_no_character_shrinks_more_than_is_allowed_for() -> None:
    changing = [
        character
        for character in map(chr, range(0x30000))  # beyond that nothing changes
        if character.lower() != character or unicodedata.normalize("NFKD", character) != character
    ]
    for form in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"):
        normalize = getattr(normalizers, form)().normalize_str
        for character in changing:
            if not 0xD800 <= ord(character) < 0xE000:
                assert len(character.encode()) <= 4 * len(normalize(character).encode())


def changed(change: Callable[[Tokenizer], object]) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = byte_level()
        change(tokenizer)
        return tokenizer

    return make


def normalized(normalizer: Any) -> Callable[[], Tokenizer]:
    return changed(lambda tokenizer: setattr(tokenizer, "normalizer", normalizer))


def split(*stages: Any) -> Callable[[], Tokenizer]:
    whole = pre_tokenizers.Sequence([*stages, pre_tokenizers.ByteLevel()])
    return changed(lambda tokenizer: setattr(tokenizer, "pre_tokenizer", whole))


UNBOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "words": word_level,
    "word pieces": word_piece,
    "unigram joins unknown characters": lambda: unigram(byte_fallback=False),
    "unknown characters are dropped": bpe,
    "unknown characters are joined": lambda: bpe(unk_token="<unk>", fuse_unk=True),
    "a prefix": lambda: bpe(pieces=["a"], unk_token="<unk>", continuing_subword_prefix="##"),
    "a suffix": lambda: bpe(pieces=["a"], unk_token="<unk>", end_of_word_suffix="</w>"),
    "stripping": normalized(normalizers.Strip()),
    "replacing by nothing": normalized(normalizers.Replace(" ", "")),
    "replacing what matches": normalized(normalizers.Replace(Regex(" +"), " ")),
    "an unknown stage": normalized(normalizers.Sequence([normalizers.StripAccents()])),
    "white space goes": split(pre_tokenizers.Whitespace()),
    "what splits goes": split(pre_tokenizers.Split(" ", "removed")),
    "white space at the start goes": split(pre_tokenizers.UnicodeScripts()),
    "an added token swallows spaces": changed(
        lambda tokenizer: tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    ),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_few_tokens_may_stand_for_any_text_there_is_no_bound(name: str) -> None:
    assert max_bytes_per_token(UNBOUNDED[name]()) is None


def test_splitting_that_drops_nothing_keeps_the_bound() -> None:
    stages = (pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.Digits())
    assert max_bytes_per_token(split(*stages)()) == max_bytes_per_token(byte_level())


def test_a_tokenizer_knows_its_bound_and_looks_at_the_length_before_it_lists_ids() -> None:
    tokenizer = tokenizer_module.Tokenizer(byte_level())
    assert tokenizer.max_bytes_per_token == max_bytes_per_token(byte_level())

    def refuse(num_ids: int) -> None:
        raise OverflowError(num_ids)

    with pytest.raises(OverflowError):
        tokenizer.encode("the fox", check_length=refuse)
