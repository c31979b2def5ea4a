"""A tokenizer's files, whatever is in them; and any text for those that can be read.

The library behind them panics on some, which Python sees as what is no Exception.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from charonia.errors import CheckpointError, InvalidRequestError
from charonia.text.tokenizer import Tokenizer
from support.fuzzing import (
    DEEP,
    altered,
    at_place,
    damaged,
    little_memory,
    only_clear_errors,
    places,
    texts,
    values,
)

SPECIAL, WORD = "<s>", "two words"
CONFIG: dict[str, Any] = {
    "added_tokens_decoder": {"7": {"content": "<b>", "special": True, "lstrip": False}},
    "eos_token": SPECIAL,
    "bos_token": {"content": SPECIAL, "special": True},
    "extra_special_tokens": {"image": "<b>"},
    "additional_special_tokens": ["<b>"],
}


def make(model: Any, decoder: Any) -> Any:
    """A tokenizer.json with a part of every kind."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(tokenizers.Regex(" +"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex("[a-c]+"), "isolated"), pre_tokenizers.Digits()]
    )
    tokenizer.decoder = decoder
    tokenizer.enable_padding()
    tokenizer.enable_truncation(5)
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.add_tokens([WORD])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL} $A", special_tokens=[(SPECIAL, tokenizer.token_to_id(SPECIAL))]
    )
    return json.loads(tokenizer.to_str())


VOCABULARY = {"a": 0, "b": 1, "ab": 2, "▁": 3, "<0x41>": 4}
PIECES = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
WHOLE = [
    make(models.BPE(VOCABULARY, [("a", "b")], byte_fallback=True), PIECES),
    make(models.BPE(VOCABULARY, []), decoders.ByteLevel()),
    make(models.Unigram([("a", -1.0), ("b", -2.0), ("▁", -2.0)], 0, False), decoders.Metaspace()),
    make(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}), decoders.WordPiece()),
    make(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"), None),
]
PLACES = [(index, place) for index, whole in enumerate(WHOLE) for place in places(whole)]
TEXTS = ["", "aab cé 日本 <s> 😀 1", f"{WORD} \n\t<0x41>x ▁"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


def read(directory: Path, tokenizer: bytes, config: bytes = b"{}") -> Tokenizer | None:
    (directory / "tokenizer.json").write_bytes(tokenizer)
    (directory / "tokenizer_config.json").write_bytes(config)
    with little_memory(), only_clear_errors(CheckpointError, secret=directory):
        return Tokenizer.from_dir(directory)
    return None


def use(tokenizer: Tokenizer | None) -> None:
    """What a request does with it."""
    if tokenizer is None:
        return
    for text in TEXTS:
        with only_clear_errors(InvalidRequestError):
            ids = tokenizer.encode(text)
            tokenizer.decode(ids, skip_special_tokens=False)
            tokenizer.encode_bad_words([f"{text}x"])
    tokenizer.decode([*range(12), tokenizer.vocab_size, 2**31 - 1])
    for token_id in range(12):
        tokenizer.token_text(token_id)


# What members of tokenizer.json are; each may stand where another one should.
PARTS = st.sampled_from(
    [
        *(part for whole in WHOLE for part in whole.values()),
        {"type": "Sequence", "decoders": []},
        {"type": "Strip", "content": "a", "start": 2**63, "stop": 0},
        {"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": True},
        {"Regex": "(a"},
        {"Regex": ""},
        {"String": ""},
    ]
)


@given(where=st.sampled_from(PLACES), part=st.one_of(values, PARTS))
def test_a_part_of_tokenizer_json(
    directory: Path, where: tuple[int, tuple[Any, ...]], part: Any
) -> None:
    index, place = where
    changed = at_place(copy.deepcopy(WHOLE[index]), place, part)
    use(read(directory, json.dumps(changed).encode()))


@given(st.sampled_from(WHOLE).flatmap(lambda whole: damaged(json.dumps(whole).encode())))
def test_a_damaged_tokenizer_json(directory: Path, data: bytes) -> None:
    use(read(directory, data))


@given(data=altered(CONFIG))
def test_tokenizer_config_json(directory: Path, data: bytes) -> None:
    use(read(directory, json.dumps(WHOLE[0]).encode(), data))


@given(st.sampled_from(places(CONFIG)), st.one_of(values, st.sampled_from(list(CONFIG.values()))))
def test_a_part_of_tokenizer_config_json(directory: Path, place: Any, part: Any) -> None:
    data = json.dumps(at_place(CONFIG, place, part)).encode()
    use(read(directory, json.dumps(WHOLE[0]).encode(), data))


@pytest.fixture(scope="module")
def readable(directory: Path) -> list[Tokenizer | None]:
    """Those of the whole files."""
    return [read(directory, json.dumps(whole).encode()) for whole in WHOLE]


@settings(max_examples=30)
@given(text=texts)
def test_any_text(readable: list[Tokenizer | None], text: str) -> None:
    for tokenizer in readable:
        assert tokenizer is not None
        with only_clear_errors(InvalidRequestError):
            tokenizer.decode(tokenizer.encode(text))


def changed(index: int, part: Any, *place: Any) -> bytes:
    """One of the whole files with a part replaced."""
    return json.dumps(at_place(WHOLE[index], place, part)).encode()


FILES = {
    "deep": b'{"version": "1.0", "decoder": ' + b'{"type": "Sequence", "decoders": [' * DEEP,
    "brackets": b"[" * DEEP,
    "a merge of tokens that are none": changed(0, [["a", "x"]], "model", "merges"),
    "a merge shorter than its prefix, a panic": changed(
        0, "x" * 90, "model", "continuing_subword_prefix"
    ),
    "a template of a token that it does not list, a panic": changed(
        0, {}, "post_processor", "special_tokens"
    ),
    "an id beyond 32 bits": changed(0, 2**32, "model", "vocab", "a"),
    "an unknown token that is none": changed(2, 7, "model", "unk_id"),
    "a broken expression": changed(
        0, {"Regex": "(a"}, "pre_tokenizer", "pretokenizers", 0, "pattern"
    ),
}


@pytest.mark.parametrize("data", FILES.values(), ids=FILES.keys())
def test_a_tokenizer_json_that_is_none(directory: Path, data: bytes) -> None:
    assert read(directory, data) is None


CONFIGS = {
    "deep": b'{"a":' * DEEP,
    "an id of many digits": {"added_tokens_decoder": {"9" * 5000: "<b>"}},
    "an id that is no ASCII": {"added_tokens_decoder": {"\u0667": "<b>"}},
    "half a character": {"added_tokens_decoder": {"7": "\ud800"}},
    "a number of tokens": {"extra_special_tokens": 5},
    "a long token": {"eos_token": {"content": 5, "x": "x" * 2**20}},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_tokenizer_config_json_that_is_none(directory: Path, config: Any) -> None:
    data = config if isinstance(config, bytes) else json.dumps(config).encode()
    assert read(directory, json.dumps(WHOLE[0]).encode(), data) is None


@pytest.mark.parametrize("index", [3, 4])
def test_a_text_of_unknown_words_for_a_tokenizer_that_has_no_word_for_them(
    directory: Path, index: int
) -> None:
    vocabulary = {"a": 0, "##b": 1}
    tokenizer = read(directory, changed(index, vocabulary, "model", "vocab"))
    assert tokenizer is not None
    with pytest.raises(InvalidRequestError, match="cannot be tokenized"):
        tokenizer.encode("x")
