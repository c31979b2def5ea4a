"""Reading a checkpoint's tokenizer, encoding, single tokens and bad words."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from charonia.errors import CheckpointError, InvalidRequestError
from charonia.text.tokenizer import Tokenizer

WORDS = ["<s>", "</s>", "hello", "world", "<tool>", "<pad>"]


def save(directory: Path, **files: object) -> Path:
    """Write a checkpoint's tokenizer of words, and other files by their names."""
    vocab = {word: i for i, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.enable_truncation(3)
    backend.enable_padding(length=7, pad_id=5, pad_token="<pad>")
    backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}.json").write_text(text, encoding="utf-8")
    return directory


def test_a_prompt_is_neither_truncated_nor_padded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(save(tmp_path))
    assert tokenizer.encode("hello world hello world") == [2, 3, 2, 3]
    assert tokenizer.encode("hello") == [2]
    assert tokenizer.vocab_size == len(WORDS)
    assert tokenizer.special_ids == frozenset()


def test_named_special_tokens_of_the_configuration_are_special(tmp_path: Path) -> None:
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False, "normalized": False},
        "unk_token": None,
        "additional_special_tokens": ["<tool>"],
        "extra_special_tokens": {"image_token": "<no such token>"},
    }
    tokenizer = Tokenizer.from_dir(save(tmp_path, tokenizer_config=config))
    assert tokenizer.special_ids == {0, 1, 4}
    assert tokenizer.vocab_size == len(WORDS)
    assert tokenizer.decode([0, 2, 4, 3, 1]) == "hello world"
    assert tokenizer.decode([2, 1], skip_special_tokens=False) == "hello </s>"


def test_the_special_tokens_map_counts_where_the_configuration_lists_no_tokens(
    tmp_path: Path,
) -> None:
    directory = save(tmp_path, special_tokens_map={"eos_token": "</s>"})
    assert Tokenizer.from_dir(directory).special_ids == {1}
    save(tmp_path, tokenizer_config={"added_tokens_decoder": {}})
    assert Tokenizer.from_dir(directory).special_ids == frozenset()


def test_tokens_listed_by_id_are_added(tmp_path: Path) -> None:
    entries = {
        "6": {"content": "<more>", "special": True},
        "4": {"content": "<tool>", "special": False, "lstrip": True},
    }
    # A token that is listed as an ordinary one stays so in a list without names.
    config = {"added_tokens_decoder": entries, "additional_special_tokens": ["<tool>"]}
    tokenizer = Tokenizer.from_dir(save(tmp_path, tokenizer_config=config))
    assert tokenizer.special_ids == {6}
    assert tokenizer.encode("hello<more>world <tool>") == [2, 6, 3, 4]
    assert tokenizer.vocab_size == 7


def test_a_special_token_stays_one_although_it_is_listed_as_an_ordinary_one(
    tmp_path: Path,
) -> None:
    from transformers import PreTrainedTokenizerFast

    save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["<tool>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"added_tokens_decoder": {"4": {"content": "<tool>", "special": False}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer.from_dir(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = [2, 4, 3]
    assert tokenizer.encode("hello<tool>world") == ids
    assert theirs.encode("hello<tool>world") == ids
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert tokenizer.special_ids == {4}


LISTED = {"content": "<tool>", "special": False}


@pytest.mark.parametrize(
    ("config", "is_special"),
    [
        ({"eos_token": "<tool>"}, True),
        ({"extra_special_tokens": {"image_token": "<tool>"}}, True),
        ({"eos_token": "<tool>", "added_tokens_decoder": {"4": LISTED}}, True),
        ({"eos_token": "<tool>", "added_tokens_decoder": {"4": LISTED | {"rstrip": True}}}, True),
        ({"eos_token": "<tool>", "added_tokens_decoder": {"1": {"content": "</s>"}}}, False),
        ({"additional_special_tokens": ["<tool>"]}, False),
        ({"added_tokens_decoder": {"4": LISTED}}, False),
    ],
    ids=str,
)
def test_an_ordinary_added_token_is_special_where_it_is_so_in_transformers(
    tmp_path: Path, config: dict[str, Any], is_special: bool
) -> None:
    from transformers import PreTrainedTokenizerFast

    save(tmp_path, tokenizer_config=config)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.no_padding()  # transformers would take its token for a named one
    backend.add_tokens(["<tool>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = tokenizer.encode("hello <tool> world")
    assert ids == theirs.encode("hello <tool> world")
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert tokenizer.special_ids == ({4} if is_special else set())


@pytest.mark.parametrize("splits", [False, True])
def test_a_checkpoint_may_have_special_tokens_in_texts_spelled_as_words(
    tmp_path: Path, splits: bool
) -> None:
    from transformers import PreTrainedTokenizerFast

    from support.checkpoints import EOS_TOKEN, EOS_TOKEN_ID, make_tokenizer

    backend, begin = make_tokenizer(), EOS_TOKEN_ID
    backend.post_processor = processors.TemplateProcessing(
        f"{EOS_TOKEN} $A", None, [(EOS_TOKEN, begin)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    config = json.dumps({"split_special_tokens": splits})
    (tmp_path / "tokenizer_config.json").write_text(config, encoding="utf-8")
    tokenizer = Tokenizer.from_dir(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = f"the {EOS_TOKEN} sea"
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text)
    assert ids.count(begin) == (1 if splits else 2)
    assert tokenizer.decode(ids) == (text if splits else "the  sea")


def test_the_template_goes_around_a_prompt_unless_it_is_not_wanted(tmp_path: Path) -> None:
    directory = save(tmp_path, tokenizer_config={"add_bos_token": False})
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(directory)
    assert tokenizer.encode("hello") == [0, 2, 1]
    assert tokenizer.encode("hello", add_special_tokens=False) == [2]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer": "{}"}, "tokenizer.json cannot be read: .*Model missing"),
        ({"tokenizer_config": "{"}, "tokenizer_config.json is not JSON"),
        ({"tokenizer_config": []}, r"tokenizer_config.json must be a JSON object, but is \[\]"),
        ({"special_tokens_map": "1"}, "special_tokens_map.json must be a JSON object, but is 1"),
        ({"tokenizer_config": {"bos_token": 7}}, "a token must be a string or .* but is 7"),
        (
            {"tokenizer_config": {"additional_special_tokens": [{"text": "x"}]}},
            "a token must be a string or an object with content, but is",
        ),
        ({"tokenizer_config": {"added_tokens_decoder": []}}, "must map token ids to tokens"),
        (
            {"tokenizer_config": {"extra_special_tokens": 5}},
            "extra_special_tokens must list tokens",
        ),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": "y"}}}, "must map token ids"),
        ({"tokenizer_config": {"split_special_tokens": 1}}, "must be true or false, but is 1"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"9": "<more>"}}},
            "token '<more>' has id 9, but 6 in tokenizer.json",
        ),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused_without_a_path(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    directory = save(tmp_path, **files)
    with pytest.raises(CheckpointError, match=message) as error:
        Tokenizer.from_dir(directory)
    assert str(tmp_path) not in str(error.value)


def test_a_missing_or_unreadable_tokenizer_is_refused_without_a_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^the checkpoint has no tokenizer.json$"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match=r"^tokenizer.json cannot be read: Is a directory$"):
        Tokenizer.from_dir(tmp_path)


def test_who_interrupts_the_reading_of_a_tokenizer_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: bytes) -> None:
        raise KeyboardInterrupt

    class Library:
        from_buffer = staticmethod(interrupt)

    monkeypatch.setattr(tokenizers, "Tokenizer", Library)
    with pytest.raises(KeyboardInterrupt):
        Tokenizer.from_dir(with_empty_file(tmp_path))


def with_empty_file(directory: Path) -> Path:
    """A directory whose tokenizer.json says nothing."""
    (directory / "tokenizer.json").write_bytes(b"{}")
    return directory


def test_text_that_is_not_unicode_is_an_error_of_the_request(
    byte_level_backend: tokenizers.Tokenizer,
) -> None:
    tokenizer = Tokenizer(byte_level_backend)
    with pytest.raises(InvalidRequestError, match=r"'a\\ud800' has unpaired surrogates"):
        tokenizer.encode("a\ud800")


@given(text=st.text(max_size=20).filter(lambda text: "ÿ" not in text and "<" not in text))
def test_a_byte_level_tokenizer_gives_back_any_text(
    byte_level_backend: tokenizers.Tokenizer, text: str
) -> None:
    tokenizer = Tokenizer(byte_level_backend)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_token_alone_is_shown_with_what_is_missing_replaced(
    byte_level_backend: tokenizers.Tokenizer, byte_level_ids: dict[int, int]
) -> None:
    tokenizer = Tokenizer(byte_level_backend)
    assert tokenizer.token_text(byte_level_ids[0xE6]) == "\ufffd"
    assert tokenizer.token_text(byte_level_ids[0x20]) == " "
    assert tokenizer.token_text(byte_level_backend.token_to_id("日本 é")) == "日本 é"
    assert tokenizer.token_text(tokenizer.vocab_size) == ""


def test_a_token_that_is_shown_often_is_decoded_once(
    byte_level_backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(byte_level_backend)
    decoded: list[list[int]] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(ids) or decode(ids))
    assert len({tokenizer.token_text(7) for _ in range(3)}) == 1
    assert decoded == [[7]]


def test_a_special_token_is_shown_by_its_content(
    byte_level_backend: tokenizers.Tokenizer, llama2_backend: tokenizers.Tokenizer
) -> None:
    # "ÿ" would decode to an invalid byte, and "▁" to a space.
    for backend, token in ((byte_level_backend, "ÿ"), (llama2_backend, "<|▁extra|>")):
        assert Tokenizer(backend).token_text(backend.token_to_id(token)) == token


def test_a_bad_word_is_spelled_with_and_without_a_space_before(
    byte_level_backend: tokenizers.Tokenizer,
) -> None:
    tokenizer = Tokenizer(byte_level_backend)
    for word in ("quick", " quick"):
        sequences = tokenizer.encode_bad_words([word])
        assert [tokenizer.decode(ids) for ids in sequences] == ["quick", " quick"]
    # One token in mid-text, several at the beginning: no less banned for that.
    assert len(sequences[1]) < len(sequences[0])


def test_a_bad_word_after_a_space_is_left_out_where_the_word_alone_bans_it_already() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={" ": 0, "a": 1, "b": 2}, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode_bad_words(["ab", "  "]) == [[1, 2], [0, 0]]
    assert tokenizer.encode_bad_words([]) == []


def test_a_bad_word_without_tokens_is_an_error_of_the_request(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(save(tmp_path))
    with pytest.raises(InvalidRequestError, match="bad_words must have tokens, but '  ' has none"):
        tokenizer.encode_bad_words(["a", "  "])
    with pytest.raises(InvalidRequestError, match=r"'b\\udfff' has unpaired surrogates"):
        tokenizer.encode_bad_words(["a", "b\udfff"])
