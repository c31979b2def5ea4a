"""Detokenization in portions gives, put together, what the library makes of all ids at once."""

import itertools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from charonia.errors import CheckpointError
from charonia.text.decoding import MAX_RUN_BYTES
from charonia.text.detokenizer import Detokenizer
from charonia.text.tokenizer import Tokenizer

BYTES = 3  # id of <0x00> in the sentencepiece-like tokenizers


def portions_of(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Cut ids into portions of these sizes, over and over."""
    portions, rest = [], ids
    for size in itertools.cycle(sizes):
        if not rest:
            return portions
        portions.append(rest[:size])
        rest = rest[size:]
    raise AssertionError


def byte_ids(text: str | bytes) -> list[int]:
    """Spell a text in byte tokens."""
    data = text.encode() if isinstance(text, str) else text
    return [BYTES + byte for byte in data]


@given(
    draws=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.booleans()), max_size=60),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    skip=st.booleans(),
)
@settings(max_examples=150)
def test_any_ids_in_any_portions_give_the_text_of_all_ids_at_once(
    backend: tokenizers.Tokenizer,
    tokenizer: Tokenizer,
    draws: list[tuple[float, bool]],
    sizes: list[int],
    skip: bool,
) -> None:
    # Half of the draws come from the first ids: single bytes, and so invalid UTF-8. The range
    # goes beyond the vocabulary: models pad theirs.
    ids = [int(x * (262 if is_low else tokenizer.vocab_size + 3)) for x, is_low in draws]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.add(portion) for portion in portions_of(ids, sizes))
    text += detokenizer.finish()
    assert text == backend.decode(ids, skip_special_tokens=skip)
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_nothing_is_kept_of_ids_without_a_token(tokenizer: Tokenizer) -> None:
    """A client may send any, which the scheduler would refuse."""

    def num_kept() -> int:
        return sum(len(table) for table in tokenizer.decoding._tables.values())

    before = num_kept()
    assert tokenizer.decode(range(10**6, 10**6 + 1000)) == ""
    assert num_kept() == before
    tokenizer.decode([BYTES])
    assert num_kept() > 0


def test_every_kind_of_invalid_utf8_is_replaced_as_the_library_does(
    byte_level_backend: tokenizers.Tokenizer, byte_level_ids: dict[int, int]
) -> None:
    # One byte of each class that a UTF-8 decoder tells apart, in all orders.
    classes = bytes.fromhex("41 80 8f 90 9f a0 bf c0 c2 df e0 e1 ed ef f0 f3 f4 f5 ff")
    tokenizer = Tokenizer(byte_level_backend)
    sequences = [
        [byte_level_ids[byte] for byte in sequence]
        for length in (1, 2, 3)
        for sequence in itertools.product(classes, repeat=length)
    ]
    # Four bytes, where only these leads begin as much.
    sequences += [
        [byte_level_ids[byte] for byte in sequence]
        for sequence in itertools.product(b"\xe1\xf0\xf3\xf4", b"\x80\x90\xbf", classes, classes)
    ]
    expected = byte_level_backend.decode_batch(sequences, skip_special_tokens=False)
    for ids, text in zip(sequences, expected, strict=True):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        assert "".join([detokenizer.add([id_]) for id_ in ids]) + detokenizer.finish() == text


@given(data=st.one_of(st.binary(max_size=12), st.text(max_size=6).map(str.encode)))
@settings(max_examples=150)
def test_a_byte_level_tokenizer_holds_back_an_incomplete_character_and_no_more(
    byte_level_backend: tokenizers.Tokenizer, byte_level_ids: dict[int, int], data: bytes
) -> None:
    ids = [byte_level_ids[byte] for byte in data]
    detokenizer = Detokenizer(Tokenizer(byte_level_backend), skip_special_tokens=False)
    emitted = ""
    for length, id_ in enumerate(ids, 1):
        emitted += detokenizer.add([id_])
        so_far = byte_level_backend.decode(ids[:length], skip_special_tokens=False)
        # Two of them: Python waits for the third byte of an encoded surrogate.
        assert so_far in (emitted, emitted + "\ufffd", emitted + "\ufffd" * 2)


def test_a_character_is_whole_although_a_special_token_was_skipped_inside_it(
    byte_level_backend: tokenizers.Tokenizer, byte_level_ids: dict[int, int]
) -> None:
    begin, middle, end = (byte_level_ids[byte] for byte in "日".encode())
    special = byte_level_backend.token_to_id("<|end|>")
    ids = [begin, special, middle, special, end]
    tokenizer = Tokenizer(byte_level_backend)
    skipping = Detokenizer(tokenizer)
    assert [skipping.add([id_]) for id_ in ids] == ["", "", "", "", "日"]
    showing = Detokenizer(tokenizer, skip_special_tokens=False)
    shown = [showing.add([id_]) for id_ in ids]
    assert shown == ["", "\ufffd<|end|>", "\ufffd", "<|end|>", "\ufffd"]


def test_added_tokens_with_characters_outside_the_byte_alphabet_stand_for_themselves(
    byte_level_backend: tokenizers.Tokenizer,
) -> None:
    tokenizer = Tokenizer(byte_level_backend)
    for token in ("two words", "日本 é", "<ganz größer>"):
        id_ = byte_level_backend.token_to_id(token)
        assert tokenizer.decode([id_], skip_special_tokens=False) == token


def test_the_leading_space_of_the_first_token_goes_and_no_other(
    llama2_backend: tokenizers.Tokenizer,
) -> None:
    the, end = llama2_backend.token_to_id("▁the"), llama2_backend.token_to_id("</s>")
    detokenizer = Detokenizer(Tokenizer(llama2_backend))
    assert [detokenizer.add(ids) for ids in ([end], [the], [], [the])] == ["", "the", "", " the"]


def test_a_run_of_byte_tokens_is_given_out_when_it_ends(
    llama2_backend: tokenizers.Tokenizer,
) -> None:
    the = llama2_backend.token_to_id("the")
    detokenizer = Detokenizer(Tokenizer(llama2_backend))
    assert detokenizer.add(byte_ids("😀")) == ""
    assert detokenizer.add([the]) == "😀the"
    assert detokenizer.add(byte_ids("é")) == ""
    assert detokenizer.finish() == "é"


def test_one_invalid_byte_makes_replacement_characters_of_its_whole_run(
    llama2_backend: tokenizers.Tokenizer,
) -> None:
    the = llama2_backend.token_to_id("the")
    detokenizer = Detokenizer(Tokenizer(llama2_backend))
    assert detokenizer.add(byte_ids("é")) == ""
    assert detokenizer.add(byte_ids(b"\xff")) == "\ufffd" * 3
    # The rest of the run is lost too, so there is no reason to wait for it.
    assert detokenizer.add(byte_ids("A")) == "\ufffd"
    assert detokenizer.add([the, *byte_ids("é"), the]) == "theéthe"


def test_a_long_run_of_byte_tokens_is_cut_so_that_little_is_held_back(
    llama2_backend: tokenizers.Tokenizer,
) -> None:
    # The documented exception from the library's `decode`, and as far as it goes.
    tokenizer = Tokenizer(llama2_backend)
    text = "日" * MAX_RUN_BYTES
    detokenizer = Detokenizer(tokenizer)
    num_emitted = 0
    for num_bytes, id_ in enumerate(byte_ids(text), 1):
        num_emitted += len(detokenizer.add([id_]).encode())
        assert num_bytes - num_emitted < MAX_RUN_BYTES
    assert num_emitted > 0
    ids = byte_ids(text)
    assert tokenizer.decode(ids) == llama2_backend.decode(ids) == text
    ids += byte_ids(b"\xff")
    assert llama2_backend.decode(ids) == "\ufffd" * len(ids)
    num_lost = len(ids) - len(tokenizer.decode(ids).rstrip("\ufffd").encode())
    assert 1 <= num_lost <= MAX_RUN_BYTES
    assert tokenizer.decode(ids) == text[: -(num_lost // 3)] + "\ufffd" * num_lost


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Strip(" ", 1, 0),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Replace("a", "b"), decoders.ByteLevel()]),
    ],
    ids=repr,
)
def test_a_decoder_whose_text_cannot_be_streamed_is_refused_with_its_stages(
    llama2_backend: tokenizers.Tokenizer, decoder: decoders.Decoder
) -> None:
    backend = tokenizers.Tokenizer.from_str(llama2_backend.to_str())
    backend.decoder = decoder
    with pytest.raises(CheckpointError, match=r"has the decoder .*\"type\".*accepted is ByteLevel"):
        Tokenizer(backend)


@pytest.mark.parametrize("text", ["hello world", "the quick  brown", "é漢字😀 and more"])
def test_the_bytes_of_all_tokens_are_those_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    """But for the space that some decoders take away at the beginning of a text."""
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.vocab_size + 1]
    data = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert data.decode().lstrip(" ") == whole.lstrip(" ")
    assert whole.strip()


def test_a_token_that_is_a_byte_alone_has_that_byte(
    llama2_backend: tokenizers.Tokenizer,
    byte_level_backend: tokenizers.Tokenizer,
    byte_level_ids: dict[int, int],
) -> None:
    assert Tokenizer(llama2_backend).token_bytes(BYTES + 0xE2) == b"\xe2"
    assert Tokenizer(byte_level_backend).token_bytes(byte_level_ids[0xE2]) == b"\xe2"
