"""Small tokenizers of every kind that can be streamed, built on the spot."""

from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from charonia.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "größer als das Café naïve Übung",
    "日本語の文章をトークンに分ける 日本 日本語",
    "emoji 😀😁😂 👩‍👩‍👧 and математика ελληνικά",
]


def byte_level() -> tokenizers.Tokenizer:
    """As in Llama 3 and Qwen; merges end in the middle of characters, added tokens of all sorts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<with space>", "<ganz größer>", "ÿ"])
    tokenizer.add_tokens(["two words", "日本 é", "éé", AddedToken("plain", normalized=False)])
    return tokenizer


def byte_level_in_sequence() -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Sequence([decoders.ByteLevel()]), decoders.Fuse()]
    )
    return tokenizer


def _sentencepiece(decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "▁",
        "▁▁",
        "▁the",
        "the",
        "a",
        "b",
        "▁a",
        "é",
        "日",
        "本",
        "don",
        "'",
        "t",
        ".",
        " .",
    ]
    pieces += ["##b", "##▁", "<0x+A>", "<0xZZ>", "<0xé>", " ", "a▁b▁"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|▁extra|>"])
    tokenizer.add_tokens(["▁added words", "<0x41>x"])
    return tokenizer


def llama2() -> tokenizers.Tokenizer:
    """As in Llama 2 and Mistral: byte fallback, and one leading space goes."""
    return _sentencepiece(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    )


def llama2_stripping_three() -> tokenizers.Tokenizer:
    return _sentencepiece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)])
    )


def gemma() -> tokenizers.Tokenizer:
    return _sentencepiece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    )


def byte_fallback_alone() -> tokenizers.Tokenizer:
    return _sentencepiece(decoders.ByteFallback())


def metaspace() -> tokenizers.Tokenizer:
    return _sentencepiece(decoders.Metaspace())


def metaspace_with_bytes() -> tokenizers.Tokenizer:
    return _sentencepiece(decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()]))


def metaspace_without_prefix() -> tokenizers.Tokenizer:
    return _sentencepiece(decoders.Metaspace(prepend_scheme="never"))


def wordpiece() -> tokenizers.Tokenizer:
    return _sentencepiece(decoders.WordPiece(cleanup=True))


def replaced_by_regex() -> tokenizers.Tokenizer:
    return _sentencepiece(decoders.Replace(tokenizers.Regex("[ab]+|▁"), "<*>"))


def fuse_alone() -> tokenizers.Tokenizer:
    return _sentencepiece(decoders.Fuse())


def no_decoder() -> tokenizers.Tokenizer:
    return _sentencepiece(None)


BYTE_LEVEL: list[Callable[[], tokenizers.Tokenizer]] = [byte_level, byte_level_in_sequence]
OTHERS: list[Callable[[], tokenizers.Tokenizer]] = [
    llama2,
    llama2_stripping_three,
    gemma,
    byte_fallback_alone,
    metaspace,
    metaspace_with_bytes,
    metaspace_without_prefix,
    wordpiece,
    replaced_by_regex,
    fuse_alone,
    no_decoder,
]


@pytest.fixture(scope="session", params=BYTE_LEVEL + OTHERS, ids=lambda make: make.__name__)
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    """A tokenizer of the library: the oracle."""
    return request.param()


@pytest.fixture(scope="session")
def tokenizer(backend: tokenizers.Tokenizer) -> Tokenizer:
    """The same one, ours."""
    return Tokenizer(backend)


@pytest.fixture(scope="session")
def byte_level_backend() -> tokenizers.Tokenizer:
    return byte_level()


@pytest.fixture(scope="session")
def byte_level_ids(byte_level_backend: tokenizers.Tokenizer) -> dict[int, int]:
    """Token id of each byte: printable ones are their own character, the others follow 0xFF."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(char): char for char in alphabet if ord(char) < 256}
    others = [byte for byte in range(256) if byte not in own]
    char_of = own | dict(zip(others, alphabet[len(own) :], strict=True))
    return {byte: byte_level_backend.token_to_id(char) for byte, char in char_of.items()}


@pytest.fixture(scope="session")
def llama2_backend() -> tokenizers.Tokenizer:
    return llama2()
