"""/tokenize and /detokenize say what the checkpoint's tokenizer says."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from support.checkpoints import EOS_TOKEN, EOS_TOKEN_ID, VOCAB_SIZE
from support.gateway import Gateway

TEXTS = ["def f(x):\n", "Grüße, いろは 🐚", f"before{EOS_TOKEN}after", " \t"]


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def detokenized(gateway: Gateway, ids: list[int]) -> str:
    """The text of token ids, as the gateway says."""
    reply = gateway.http.post("/detokenize", json={"tokens": ids})
    assert reply.status_code == 200, reply.text
    answer: dict[str, str] = reply.json()
    assert answer.keys() == {"prompt"}
    return answer["prompt"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_has_the_tokenizers_ids_and_they_are_the_text_again(
    gateway: Gateway, tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text).ids
    found = gateway.http.post("/tokenize", json={"prompt": text}).json()
    assert (found["tokens"], found["count"]) == (ids, len(ids))
    assert found["token_strs"] is None
    asked = {"prompt": text, "return_token_strs": True}
    names = [tokenizer.id_to_token(token_id) for token_id in ids]
    assert gateway.http.post("/tokenize", json=asked).json() == found | {"token_strs": names}
    assert detokenized(gateway, ids) == text


def test_any_ids_have_the_tokenizers_text(gateway: Gateway, tokenizer: Tokenizer) -> None:
    """Special tokens are written out, and a part of a character is U+FFFD."""
    ids = tokenizer.encode("𝄞").ids
    assert len(ids) > 1
    for some in ([], ids[:1], [EOS_TOKEN_ID], [EOS_TOKEN_ID, *ids], list(range(VOCAB_SIZE))):
        assert detokenized(gateway, some) == tokenizer.decode(some, skip_special_tokens=False)
    assert detokenized(gateway, ids[:1]) == "\ufffd"
    assert detokenized(gateway, [EOS_TOKEN_ID, *ids]) == f"{EOS_TOKEN}𝄞"


def test_ids_that_the_model_lacks_have_no_text(gateway: Gateway, tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("a").ids, tokenizer.encode("b").ids
    assert detokenized(gateway, [*a, VOCAB_SIZE, 2**31 - 1, *b]) == "ab"
