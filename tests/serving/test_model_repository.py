"""The model repository: what its files promise about each other."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from charonia.config import SchedulerArgs
from charonia.errors import LaunchError
from charonia.launch.commands import interface_files
from charonia.serving.conventions import interface
from charonia.serving.conventions.parameters import PARAMETER_NAMES

REPOSITORY = Path(__file__).parents[2] / "model_repository"
DATATYPES = {value: name.removeprefix("TYPE_") for name, value in model_config_pb2.DataType.items()}
MODELS = ("llm", "tokenizer", "scheduler", "engine", "postprocessor", "generate")


def read(model: str) -> Any:
    text = (REPOSITORY / model / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_these_are_the_models() -> None:
    assert {path.parent.name for path in REPOSITORY.glob("*/config.pbtxt")} == set(MODELS)


@pytest.mark.parametrize("path", sorted(REPOSITORY.rglob("*.py")), ids=lambda p: p.parts[-3])
def test_a_model_file_is_thin(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("model", ["llm", "scheduler", "generate"])
def test_no_input_shares_its_name_with_a_sampling_parameter(model: str) -> None:
    # HTTP generate turns any key that names an input into that tensor.
    assert not {one.name for one in read(model).input} & PARAMETER_NAMES


def test_the_files_say_what_the_interface_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert interface_files.main(["--check"]) == 0, capsys.readouterr().out


def test_every_marked_place_is_in_a_file() -> None:
    files = [*REPOSITORY.glob("*/config.pbtxt"), REPOSITORY / "README.md"]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    for key in interface_files.places():
        assert f" {key}: written by `make interface`" in text


def test_a_place_is_written_anew_and_an_unknown_one_refused() -> None:
    text = "a\n  # x: written by `make interface`\nold\n  # end\nb\n"
    expected = text.replace("old", "new\nmore")
    assert interface_files.write_places(text, {"x": lambda: ["new", "more"]}) == expected
    with pytest.raises(LaunchError, match="nothing to write for 'x'; known are y"):
        interface_files.write_places(text, {"y": list})


@pytest.mark.parametrize("model", interface.MODELS)
def test_triton_reads_the_tensors_that_the_interface_names(model: str) -> None:
    config, expected = read(model), interface.MODELS[model]
    for found, tensors in ((config.input, expected.inputs), (config.output, expected.outputs)):
        assert [(one.name, DATATYPES[one.data_type], list(one.dims)) for one in found] == [
            (one.name, one.datatype, list(one.dims)) for one in tensors
        ]
    assert all(one.optional for one in config.input)


def test_the_ensemble_connects_every_tensor_of_its_steps() -> None:
    known = {one.name for one in read("llm").input}
    for step in read("llm").ensemble_scheduling.step:
        model = read(step.model_name)
        inputs = {one.name for one in model.input}
        if step.model_name == "scheduler":
            inputs -= {"text_input", "probe"}  # it gets ids, and is asked itself
        assert set(step.input_map) == inputs
        assert set(step.output_map) == {one.name for one in model.output}
        assert set(step.input_map.values()) <= known
        known |= set(step.output_map.values())
    assert {one.name for one in read("llm").output} <= known


def test_the_postprocessor_keeps_the_order_of_chunks() -> None:
    assert read("postprocessor").instance_group[0].count == 1


def test_each_model_has_its_kind() -> None:
    decoupled = {m for m in MODELS if read(m).model_transaction_policy.decoupled}
    assert decoupled == {"scheduler"}
    assert read("llm").platform == "ensemble"
    group = read("engine").instance_group[0]
    assert (group.kind, group.count) == (group.KIND_MODEL, 1)
    assert read("tokenizer").instance_group[0].count == 2


def test_models_are_named_by_configuration() -> None:
    parameters = {m: {k: v.string_value for k, v in read(m).parameters.items()} for m in MODELS}
    scheduler = parameters["scheduler"]
    scheduler.pop("FORCE_CPU_ONLY_INPUT_TENSORS")
    assert SchedulerArgs.from_parameters(scheduler).engine_model == "engine"
    assert parameters["tokenizer"]["engine_model"] == "engine"
    assert parameters["generate"]["scheduler_model"] == "scheduler"
    assert parameters["postprocessor"]["scheduler_model"] == "scheduler"


def test_the_meaning_of_an_argument_is_what_its_docstring_says() -> None:
    docstring = """What it is.

    Not: an attribute.

    Attributes:
        one: None is
            nothing. two: not an entry.
        three, four: True or None."""
    assert interface_files.meanings_of(inspect.cleandoc(docstring)) == {
        ("one",): "null is nothing. two: not an entry.",
        ("three", "four"): "true or null.",
    }
