"""What a checkpoint's generation_config.json says of sampling parameters."""

import json
from pathlib import Path
from typing import Any

import pytest

from charonia.config import EngineArgs
from charonia.errors import CheckpointError, InvalidRequestError
from charonia.protocol import SamplingParams
from charonia.sampling_defaults import FILE_NAME, NO_DEFAULTS, SamplingDefaults

# As published with Qwen2.5's instruction models.
QWEN = {
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.37.0",
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / FILE_NAME).write_text(json.dumps(QWEN), encoding="utf-8")
    return tmp_path


def test_a_request_gets_the_checkpoints_defaults_where_it_says_nothing(checkpoint: Path) -> None:
    defaults = SamplingDefaults.of_engine(EngineArgs(model=str(checkpoint)))
    assert defaults.fill({"top_p": 1.0, "max_tokens": 99}) == SamplingParams(
        temperature=0.7, top_p=1.0, top_k=20, repetition_penalty=1.05, max_tokens=99
    )


@pytest.mark.parametrize("word", ["none", "vllm"])
def test_they_can_be_turned_off(checkpoint: Path, word: str) -> None:
    args = EngineArgs(model=str(checkpoint), generation_config=word)
    assert SamplingDefaults.of_engine(args) == NO_DEFAULTS


def test_they_can_come_from_another_directory(checkpoint: Path, tmp_path: Path) -> None:
    args = EngineArgs(model=str(tmp_path / "missing"), generation_config=str(checkpoint))
    assert SamplingDefaults.of_engine(args).values["top_k"] == 20


def test_an_older_checkpoint_has_them_in_its_config_json(tmp_path: Path) -> None:
    config = {"vocab_size": 9, "temperature": 0.5, "max_new_tokens": 7, "num_beams": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    args = EngineArgs(model=str(tmp_path))
    defaults = SamplingDefaults.of_engine(args)
    assert defaults.fill({}) == SamplingParams(temperature=0.5, max_tokens=7)
    assert defaults.unused == {}
    (tmp_path / FILE_NAME).write_text("{}", encoding="utf-8")
    assert SamplingDefaults.of_engine(args).fill({}) == SamplingParams()


def test_a_checkpoint_needs_none_but_a_named_directory_does(tmp_path: Path) -> None:
    without = SamplingDefaults.of_engine(EngineArgs(model=str(tmp_path)))
    assert without.fill({}) == SamplingParams()
    assert without.describe() == []
    named = EngineArgs(model=str(tmp_path), generation_config=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read"):
        SamplingDefaults.of_engine(named)


def test_max_new_tokens_is_a_default_and_a_limit_as_in_vllm() -> None:
    defaults = SamplingDefaults.of_file({"max_new_tokens": 100})
    assert [defaults.fill(given).max_tokens for given in ({}, {"max_tokens": 7})] == [100, 7]
    assert defaults.fill({"max_tokens": 1000}).max_tokens == 100
    with pytest.raises(InvalidRequestError, match="min_tokens must be from 0 to max_tokens"):
        defaults.fill({"min_tokens": 101})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"temperature": "hot"}, "temperature must be a number, but is 'hot'"),
        ({"temperature": -1}, "temperature must be from 0.0 to 1000000.0, but is -1.0"),
        ({"top_k": 2.5}, "top_k must be an integer, but is 2.5"),
        ({"top_p": True}, "top_p must be a number, but is True"),
        ({"max_new_tokens": 0}, "max_tokens must be at least 1, but is 0"),
        ({"max_new_tokens": "9"}, "max_tokens must be an integer, but is '9'"),
        (
            {"no_repeat_ngram_size": 3},
            'no_repeat_ngram_size = 3 is not supported; "generation_config": "none" leaves the file'
            " out",
        ),
    ],
)
def test_a_value_that_no_request_may_have_is_refused(content: Any, problem: str) -> None:
    with pytest.raises(CheckpointError) as error:
        SamplingDefaults.of_file(content)
    assert str(error.value) == f"the checkpoint's {FILE_NAME}: {problem}"


def test_the_log_says_what_counts_and_what_does_not() -> None:
    content = QWEN | {"num_beams": 1, "typical_p": 0.9, "min_p": None, "_from_model_config": True}
    used, unused = SamplingDefaults.of_file(content).describe()
    assert "temperature = 0.7, top_p = 0.8, top_k = 20, repetition_penalty = 1.05" in used
    assert unused == f"of {FILE_NAME} this has no effect: typical_p = 0.9"
    assert NO_DEFAULTS.describe() == []
