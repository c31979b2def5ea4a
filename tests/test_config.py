"""Configuration: what is read as what, and that a mistake is named."""

from pathlib import Path

import pytest

from charonia.config import EngineArgs, SchedulerArgs
from charonia.errors import ConfigError


def test_the_schedulers_parameters_are_read_from_strings():
    args = SchedulerArgs.from_parameters(
        {"engine_model": "e", "max_queue_size": "7", "min_step_deadline_s": "2.5"}
    )
    assert args == SchedulerArgs(engine_model="e", max_queue_size=7, min_step_deadline_s=2.5)


@pytest.mark.parametrize(
    ("value", "is_wanted"), [("yes", True), ("True", True), ("no", False), (None, False)]
)
def test_vllms_metrics_are_asked_for_by_the_name_that_vllm_gave_it(value, is_wanted):
    parameters = {} if value is None else {"REPORT_CUSTOM_METRICS": value}
    assert SchedulerArgs.from_parameters(parameters).report_custom_metrics == is_wanted


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"report_custom_metrics": "yes"}, "unknown .*; accepted are .*, REPORT_CUSTOM_METRICS"),
        ({"max_queue_size": "0"}, "max_queue_size"),
        ({"num_sender_threads": "many"}, "num_sender_threads"),
    ],
)
def test_a_wrong_parameter_of_the_scheduler_is_named(parameters, message):
    with pytest.raises(ConfigError, match=message):
        SchedulerArgs.from_parameters(parameters)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("[1]", "not a JSON object"),
        ('{"model": "m", "max_num_seq": 1}', "unknown engine argument 'max_num_seq'"),
        ('{"model": "m", "max_num_seqs": 0}', "max_num_seqs"),
        ('{"model": "m", "tensor_parallel_size": 2}', "tensor_parallel_size = 2 is not supported"),
        ("{}", "model"),
    ],
)
def test_a_wrong_model_json_is_refused_by_name(tmp_path: Path, text, message):
    path = tmp_path / "model.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        EngineArgs.from_file(path)
    assert str(tmp_path) not in str(caught.value)


def test_paths_in_model_json_are_relative_to_it_and_the_tokenizer_is_the_models(tmp_path: Path):
    path = tmp_path / "model.json"
    path.write_text('{"model": "../m"}')
    args = EngineArgs.from_file(path)
    assert args.tokenizer_dir == Path(args.model) == tmp_path.parent / "m"
    path.write_text('{"model": "/a/m", "tokenizer": "t"}')
    assert EngineArgs.from_file(path).tokenizer_dir == tmp_path / "t"
