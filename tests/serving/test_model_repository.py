"""The model repository: what its files promise about each other."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from charonia.config import SchedulerArgs
from charonia.serving.parameters import PARAMETER_NAMES
from charonia.serving.postprocessor_host import PREFIX
from charonia.serving.schema import RETURN_FLAGS
from charonia.serving.tensors import OUTPUT_TYPES

REPOSITORY = Path(__file__).parents[2] / "model_repository"
MODELS = ("llm", "tokenizer", "scheduler", "engine", "postprocessor", "generate")
INTERNAL_INPUTS = {"request_key", "prompt_text", "probe"}
INTERNAL_OUTPUTS = {"request_key"}
PUBLIC_INPUTS = {
    "text_input",
    "input_ids",
    "stream",
    "sampling_parameters",
    "exclude_input_in_output",
    "cancel",
    *RETURN_FLAGS,
}


def read(model: str) -> Any:
    text = (REPOSITORY / model / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def tensors(described: Any) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {one.name: (one.data_type, tuple(one.dims)) for one in described}


def test_these_are_the_models() -> None:
    assert {path.parent.name for path in REPOSITORY.glob("*/config.pbtxt")} == set(MODELS)


@pytest.mark.parametrize("path", sorted(REPOSITORY.rglob("*.py")), ids=lambda p: p.parts[-3])
def test_a_model_file_is_thin(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("model", ["llm", "scheduler", "generate"])
def test_no_input_shares_its_name_with_a_sampling_parameter(model: str) -> None:
    # HTTP generate turns any key that names an input into that tensor.
    assert not {one.name for one in read(model).input} & PARAMETER_NAMES


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        ("llm", PUBLIC_INPUTS, set()),
        ("scheduler", PUBLIC_INPUTS | INTERNAL_INPUTS, INTERNAL_OUTPUTS),
        ("generate", PUBLIC_INPUTS - {"stream"}, set()),
    ],
)
def test_the_public_models_have_the_same_tensors(
    model: str, inputs: set[str], outputs: set[str]
) -> None:
    config, scheduler = read(model), read("scheduler")
    assert tensors(config.input).keys() == inputs
    assert tensors(config.output).keys() == OUTPUT_TYPES.keys() | outputs
    assert tensors(config.input).items() <= tensors(scheduler.input).items()
    assert tensors(config.output).items() <= tensors(scheduler.output).items()
    assert all(one.optional for one in config.input)


def test_the_ensemble_connects_every_tensor_of_its_steps() -> None:
    llm = read("llm")
    for step in llm.ensemble_scheduling.step:
        model = read(step.model_name)
        inputs = {one.name for one in model.input}
        outputs = {one.name for one in model.output}
        if step.model_name == "scheduler":
            inputs -= {"text_input", "probe"}  # it gets ids, and is asked itself
        assert set(step.input_map) == inputs
        assert set(step.output_map) == outputs


def test_the_postprocessor_hands_every_output_on() -> None:
    config = read("postprocessor")
    handed_on = {f"{PREFIX}{name}": kind for name, kind in tensors(config.output).items()}
    assert handed_on.items() <= tensors(config.input).items()
    assert tensors(config.input).keys() == handed_on.keys() | {"request_key"}
    assert tensors(config.output).keys() == OUTPUT_TYPES.keys()
    assert all(one.optional for one in config.input)
    assert config.instance_group[0].count == 1


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
