"""The demo models' tokenizer keeps every byte and treats Python's layout well."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from charonia.demo.vocabulary import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    encode_documents,
    save_tokenizer,
    train_tokenizer,
)

TEXTS = [
    "class Queue(object):\n    def get(self):\n        return self._items.pop()\n" * 9,
    "for index in range(100):\n    if index:\n        print(index)\n" * 9,
]
TOKENIZER = train_tokenizer(TEXTS)


def test_the_same_texts_give_the_same_tokenizer() -> None:
    assert train_tokenizer(TEXTS).to_str() == TOKENIZER.to_str()


@given(st.text())
def test_decoding_gives_back_any_text(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_indentation_is_a_token_of_its_own_wherever_a_prompt_ends() -> None:
    whole = TOKENIZER.encode("class Queue(object):\n    def get(self):\n").tokens
    for end in ("class Queue(object):", "class Queue(object):\n", "class Queue(object):\n    "):
        begin = TOKENIZER.encode(end).tokens
        assert whole[: len(begin)] == begin


def test_a_document_ends_with_the_end_of_text_and_begins_with_nothing() -> None:
    (document,) = encode_documents(TOKENIZER, [TEXTS[0]])
    assert document.count(END_OF_TEXT_ID) == 1
    assert document[-1] == END_OF_TEXT_ID == TOKENIZER.token_to_id(END_OF_TEXT)
    assert TOKENIZER.decode(document) == TEXTS[0]


@pytest.mark.parametrize("text", [TEXTS[0], "größer → 🐚\n\n\n\tx = '  '\n", "a" * 50])
def test_transformers_reads_the_saved_tokenizer_alike(tmp_path: Path, text: str) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(TOKENIZER, tmp_path, model_max_length=64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(text)["input_ids"] == TOKENIZER.encode(text).ids
    assert (loaded.bos_token_id, loaded.eos_token_id) == (END_OF_TEXT_ID, END_OF_TEXT_ID)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).to_str() == TOKENIZER.to_str()
