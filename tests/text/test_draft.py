"""A draft model must have the model's tokenizer, of which it may know more or less."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from charonia.errors import CheckpointError, ConfigError
from charonia.text.draft import check_draft_tokenizer
from charonia.text.tokenizer import Tokenizer

WORDS = ["<s>", "hello", "world", "<pad>"]


def backend(words: list[str]) -> tokenizers.Tokenizer:
    vocabulary = {word: i for i, word in enumerate(words)}
    return tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))


def check(directory: Path, draft: list[str], added: tuple[str, ...] = ()) -> None:
    other = backend(draft)
    other.add_special_tokens([*added])
    other.save(str(directory / "tokenizer.json"))
    check_draft_tokenizer(Tokenizer(backend(WORDS)), directory)


@pytest.mark.parametrize("draft", [WORDS, WORDS[:2], [*WORDS, "more"]])
def test_a_shorter_or_longer_list_of_the_same_tokens_fits(tmp_path: Path, draft: list[str]) -> None:
    check(tmp_path, draft)
    check(tmp_path, draft, added=("<pad>",) if "<pad>" in draft else ())


def test_a_special_token_may_have_another_name(tmp_path: Path) -> None:
    own, other = backend(WORDS[:3]), backend(WORDS[:3])
    own.add_special_tokens(["<reserved_2>"])
    other.add_special_tokens(["<pad_right>"])
    other.save(str(tmp_path / "tokenizer.json"))
    check_draft_tokenizer(Tokenizer(own), tmp_path)


@pytest.mark.parametrize(
    ("draft", "added", "message"),
    [
        (["<s>", "world", "hello"], (), "token 1 is 'world' there, but 'hello' for the model"),
        (["<s>", "hello"], ("<eos>",), "token 2 is '<eos>' there, but 'world' for the model"),
    ],
)
def test_the_first_token_that_differs_is_named(
    tmp_path: Path, draft: list[str], added: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, draft, added)


def test_a_draft_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the draft model: .* no tokenizer\.json"):
        check_draft_tokenizer(Tokenizer(backend(WORDS)), tmp_path)
