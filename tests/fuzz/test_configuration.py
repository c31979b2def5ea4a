"""The operator's own files, whatever is in them: model.json and the scheduler's parameters."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.config import EngineArgs, SchedulerArgs, SpeculativeConfig
from charonia.errors import ConfigError
from support.fuzzing import (
    DEEP,
    HUGE_INTEGER,
    altered,
    at_place,
    only_clear_errors,
    places,
    texts,
    values,
)

MODEL_JSON: dict[str, Any] = {
    "model": "checkpoint",
    "dtype": "float32",
    "max_num_seqs": 8,
    "tensor_parallel_size": 2,
    "num_local_ranks": 1,
    "rendezvous": "127.0.0.1:4000",
    "rank_timeout_s": 3.5,
    "cpu_binding": "0-3,8",
    "speculative_config": {"method": "ngram", "prompt_lookup_max": 5, "adaptive": False},
}


def read(data: bytes, directory: Path) -> EngineArgs | None:
    path = directory / "model.json"
    path.write_bytes(data)
    with only_clear_errors(ConfigError):
        return EngineArgs.from_file(path)
    return None


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@given(data=altered(MODEL_JSON))
def test_model_json(directory: Path, data: bytes) -> None:
    args = read(data, directory)
    assert args is None or args.num_ranks >= 1


@given(place=st.sampled_from(places(MODEL_JSON)), value=values)
def test_a_value_of_the_engines_arguments(place: tuple[Any, ...], value: Any) -> None:
    changed = at_place(MODEL_JSON, place, value)
    if isinstance(changed, dict):
        with only_clear_errors(ConfigError):
            EngineArgs.from_dict(changed)


@given(
    st.dictionaries(st.one_of(st.sampled_from(SpeculativeConfig.__struct_fields__), texts), values)
)
def test_the_speculative_config(value: Any) -> None:
    with only_clear_errors(ConfigError):
        EngineArgs.from_dict({"model": "m", "speculative_config": value})


@given(st.dictionaries(st.one_of(st.sampled_from(SchedulerArgs.__struct_fields__), texts), texts))
def test_parameters_of_the_scheduler(parameters: dict[str, str]) -> None:
    with only_clear_errors(ConfigError):
        SchedulerArgs.from_parameters(parameters)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":' * DEEP,
        b'{"model": "m", "speculative_config": ' + b'{"a":' * DEEP,
        b'{"model": "m", "seed": ' + HUGE_INTEGER.encode() + b"}",
        b'{"model": "m", "tensor_parallel_size": ' + b"9" * 4000 + b"}",
        b'{"model": "m", "dtype": "' + b"x" * 2**20 + b'"}',
        b'{"model": "m", "' + b"x" * 2**20 + b'": 1}',
        b'{"model": "m", "rendezvous": "a:' + b"9" * 2**13 + b'"}',
        '{"model": "m", "rendezvous": "a:²"}'.encode(),
        b'{"model": "~no such user/m"}',
        b'{"model": "m\\u0000"}',
        b'{"model": "m", "rank_timeout_s": 1e308}',
    ],
    ids=range(11),
)
def test_what_once_came_through(directory: Path, data: bytes) -> None:
    assert read(data, directory) is None
