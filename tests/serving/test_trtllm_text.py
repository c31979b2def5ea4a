"""The models that turn text into TensorRT-LLM's tensors and back."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.errors import InvalidRequestError
from charonia.serving.conventions.trtllm.rows import Row, pack_words
from charonia.serving.conventions.trtllm.text import Postprocessing, Preprocessing
from charonia.serving.requests.raw_request import RawRequest
from support.trtllm import TOKENIZER, raw_request


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), max_size=6))
def test_packed_words_are_the_same_words(words: list[list[int]]) -> None:
    packed = pack_words(words)
    assert packed.shape == (2, sum(map(len, words)))
    assert Row({"stop_words_list": packed}).word_list("stop_words_list") == words


def test_preprocessing_gives_what_tensorrt_llm_takes(tmp_path: Any) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    model = Preprocessing(TOKENIZER, tmp_path)
    rows = [
        {"QUERY": "abc", "STOP_WORDS_DICT": ["a", "bc"], "BAD_WORDS_DICT": ["x", ""]},
        {"QUERY": "a", "STOP_WORDS_DICT": ["", "q"], "BAD_WORDS_DICT": ["", ""]},
    ]
    raw = raw_request("preprocessing", [row | {"REQUEST_OUTPUT_LEN": 9} for row in rows])
    outputs = model.answer(raw)
    ids = [TOKENIZER.encode(str(row["QUERY"])) for row in rows]
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[len(one)] for one in ids]
    for row, one in zip(outputs["INPUT_ID"].tolist(), ids, strict=True):
        assert row == one + [3] * (len(row) - len(one))
    assert outputs["OUT_END_ID"].tolist() == outputs["OUT_PAD_ID"].tolist() == [[3], [3]]
    assert outputs["REQUEST_OUTPUT_LEN"].tolist() == [[9], [9]]
    assert outputs["EMBEDDING_BIAS"].shape == (2, 0)
    words = [
        Row({"w": words}).word_list("w")
        for words in (*outputs["STOP_WORDS_IDS"], *outputs["BAD_WORDS_IDS"])
    ]
    assert [["".join(map(TOKENIZER.token_text, ids)) for ids in one] for one in words] == [
        ["a", "bc"],
        ["q"],
        ["x"],
        [],
    ]


@pytest.mark.parametrize("words", [["a" * (2**18 + 1)], [""] * (2**18 + 1)])
def test_preprocessing_takes_only_so_many_words_in_a_batch(tmp_path: Any, words: list[str]) -> None:
    row = {"QUERY": "a" * 2**19, "STOP_WORDS_DICT": words}
    with pytest.raises(InvalidRequestError, match="STOP_WORDS_DICT must have at most 262144"):
        Preprocessing(TOKENIZER, tmp_path).answer(raw_request("preprocessing", [row]))


def test_preprocessing_takes_the_clients_ends_and_biases(tmp_path: Any) -> None:
    row = {
        "QUERY": "a",
        "END_ID": 7,
        "PAD_ID": 8,
        "EMBEDDING_BIAS_WORDS": ["b"],
        "EMBEDDING_BIAS_WEIGHTS": [2.5],
    }
    outputs = Preprocessing(TOKENIZER, tmp_path).answer(raw_request("preprocessing", [row]))
    assert (outputs["OUT_END_ID"].item(), outputs["OUT_PAD_ID"].item()) == (7, 8)
    (biased,) = TOKENIZER.encode("b", add_special_tokens=False)
    bias = outputs["EMBEDDING_BIAS"]
    assert bias.shape == (1, TOKENIZER.vocab_size)
    assert (bias[0, biased], np.count_nonzero(bias)) == (2.5, 1)
    plain = Preprocessing(TOKENIZER, tmp_path).answer(
        raw_request("preprocessing", [{"QUERY": "a"}])
    )
    assert plain["OUT_END_ID"].item() == -1


def test_postprocessing_decodes_what_counts_and_hands_the_rest_on() -> None:
    ids = TOKENIZER.encode("größer", add_special_tokens=False)
    tensors = {
        "TOKENS_BATCH": np.array([[ids], [ids]], dtype=np.int32),
        "SEQUENCE_LENGTH": np.array([[len(ids)], [2]], dtype=np.int32),
        "CUM_LOG_PROBS": np.array([[0.5], [1.5]], dtype=np.float32),
    }
    model = Postprocessing(TOKENIZER)
    outputs = model.answer(RawRequest(tensors, {}))
    assert outputs["OUTPUT"].tolist() == ["größer".encode(), TOKENIZER.decode(ids[:2]).encode()]
    assert outputs["OUT_CUM_LOG_PROBS"].tolist() == [[0.5], [1.5]]
    wrong = tensors | {"SEQUENCE_LENGTH": np.array([[len(ids) + 1], [2]], dtype=np.int32)}
    with pytest.raises(InvalidRequestError, match="SEQUENCE_LENGTH must have 1 numbers"):
        model.answer(RawRequest(wrong, {}))
    with pytest.raises(InvalidRequestError, match="TOKENS_BATCH must have token ids from 0"):
        model.answer(RawRequest(tensors | {"TOKENS_BATCH": tensors["TOKENS_BATCH"] - 4096}, {}))
    del tensors["SEQUENCE_LENGTH"]
    with pytest.raises(InvalidRequestError, match="SEQUENCE_LENGTH is not present"):
        model.answer(RawRequest(tensors, {}))
