import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from charonia.config import DEMO_CHECKPOINT, DEMO_DRAFT_CHECKPOINT, EngineArgs
from charonia.errors import CharoniaError, CheckpointError, ConfigError, LaunchError
from charonia.launch.commands.cli import build_parser
from charonia.launch.server.discovery import default_repository
from charonia.launch.server.repository import (
    LINK_FROM_BYTES,
    PreparedRepository,
    RepositoryOptions,
    change_engine,
    check_checkpoint,
    prepare_repository,
)
from charonia.model_config import read_config
from charonia.serving.conventions.interface import INPUTS, OUTPUTS
from charonia.serving.conventions.trtllm import tables as trtllm
from charonia.serving.messages.reload import NewModelFile
from charonia.supervision.models.repairs import LOAD_MARK


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "prepared"


def prepare(source: Path, target: Path, *settings: str, **options: Any) -> PreparedRepository:
    return prepare_repository(
        target, RepositoryOptions(source=source, settings=settings, **options)
    )


def model_json(repository: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((repository / "engine/1/model.json").read_text("utf-8"))
    return values


def scheduler_parameters(repository: Path) -> dict[str, str]:
    text = (repository / "scheduler/config.pbtxt").read_text("utf-8")
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    return {key: value.string_value for key, value in config.parameters.items()}


@pytest.fixture
def source(repository: Path, checkpoint_dir: Path) -> Path:
    """The stand-ins, with a checkpoint where their model.json says."""
    (repository.parent / "checkpoint").symlink_to(checkpoint_dir)
    return repository


def test_without_overrides_only_paths_change(source: Path, target: Path) -> None:
    prepared = prepare(source, target)
    assert prepared.path == target
    assert prepared.engine_args.max_num_seqs == 8
    assert prepared.scheduler_args.max_queue_size == 7
    assert model_json(target) == {"model": f"{source.parent}/checkpoint", "max_num_seqs": 8}
    for file in ("scheduler/config.pbtxt", "scheduler/1/model.py", "engine/config.pbtxt"):
        assert (target / file).read_bytes() == (source / file).read_bytes()


def test_the_source_stays_as_it_is(source: Path, target: Path, checkpoint_dir: Path) -> None:
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    prepare(source, target, "seed=5", "scheduler.max_queue_size=9", model=checkpoint_dir)
    assert before == {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}


def test_what_a_run_keeps_for_itself_is_not_taken_from_another(source: Path, target: Path) -> None:
    """A run that ended in the middle of a reload has left its model.json in two versions."""
    model_file = source / "engine/1/model.json"
    NewModelFile(model_file, model_file.read_bytes()).install()
    (model_file.parent / LOAD_MARK).write_text("1 1\n", encoding="ascii")
    before = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    prepare(source, target)
    after = {path.relative_to(target) for path in target.rglob("*") if path.is_file()}
    left_out = sorted(path.name for path in before - after)
    assert left_out == sorted(["model.json.before", LOAD_MARK])


def test_settings_are_json_or_else_strings(source: Path, target: Path) -> None:
    prepared = prepare(
        source, target, "max_model_len=256", "enable_prefix_caching=false", "device=cpu"
    )
    assert prepared.engine_args.max_model_len == 256
    assert prepared.engine_args.enable_prefix_caching is False
    assert prepared.engine_args.device == "cpu"


def test_a_relative_model_is_one_of_the_working_directory(
    source: Path, target: Path, checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint_dir.parent)
    prepare(source, target, model=Path(checkpoint_dir.name), dtype="float32")
    assert model_json(target)["model"] == str(checkpoint_dir)
    assert model_json(target)["dtype"] == "float32"


def test_a_model_brings_its_own_tokenizer(source: Path, target: Path, checkpoint_dir: Path) -> None:
    path = source / "engine/1/model.json"
    path.write_text(json.dumps({"model": "a", "tokenizer": "b"}), encoding="utf-8")
    prepared = prepare(source, target, model=checkpoint_dir)
    assert prepared.engine_args.tokenizer_dir == checkpoint_dir


def write_model_json(source: Path, **values: Any) -> None:
    path = source / "engine/1/model.json"
    path.write_text(json.dumps(model_json(source) | values), encoding="utf-8")


def test_a_draft_model_is_set_beside_what_is_configured(
    source: Path, target: Path, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = checkpoint(seed=1, vocab_size=400)
    monkeypatch.chdir(draft.parent)
    setting = 'speculative_config={"num_speculative_tokens": 3}'
    prepare(source, target, setting, model=checkpoint(), draft_model=Path(draft.name))
    assert model_json(target)["speculative_config"] == {
        "num_speculative_tokens": 3,
        "model": str(draft),
    }


@pytest.mark.parametrize("config", ["ngram", '{"method": "ngram"}', "[1]"])
def test_a_draft_model_beside_another_method_is_refused(
    source: Path, target: Path, checkpoint_dir: Path, config: str
) -> None:
    with pytest.raises(ConfigError, match="--draft-model together with speculative_config = "):
        prepare(source, target, f"speculative_config={config}", draft_model=checkpoint_dir)


@pytest.mark.parametrize("is_setting", [True, False])
def test_a_draft_model_that_was_meant_for_another_model_is_not_served(
    source: Path, target: Path, checkpoint_dir: Path, is_setting: bool
) -> None:
    write_model_json(source, speculative_config={"model": "its draft"})
    if is_setting:
        prepared = prepare(source, target, f"model={checkpoint_dir}")
    else:
        prepared = prepare(source, target, model=checkpoint_dir)
    assert prepared.engine_args.speculative_config is None


def test_a_drafter_without_a_model_serves_any_model(
    source: Path, target: Path, checkpoint_dir: Path
) -> None:
    write_model_json(source, speculative_config={"method": "suffix"})
    config = prepare(source, target, model=checkpoint_dir).engine_args.speculative_config
    assert config is not None
    assert config.method == "suffix"


def test_speculation_can_be_turned_off(source: Path, target: Path, checkpoint_dir: Path) -> None:
    write_model_json(source, speculative_config={"model": str(checkpoint_dir)})
    prepared = prepare(source, target, "speculative_config=null")
    assert prepared.engine_args.speculative_config is None


def test_without_a_model_the_demo_pair_is_served(source: Path, target: Path) -> None:
    (source / "engine/1/model.json").write_text("{}", encoding="utf-8")
    args = prepare(source, target).engine_args
    assert args.model == str(DEMO_CHECKPOINT)
    assert args.speculative_config is not None
    assert args.speculative_config.model == str(DEMO_DRAFT_CHECKPOINT)


def test_a_draft_model_that_does_not_fit_is_refused(
    source: Path, target: Path, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    with pytest.raises(CharoniaError, match="no checkpoint directory"):
        prepare(source, target, model=checkpoint(), draft_model=draft)
    shutil.copytree(checkpoint(), draft)
    shutil.copy(DEMO_CHECKPOINT / "tokenizer.json", draft)
    with pytest.raises(ConfigError, match="the draft model has another tokenizer: token "):
        prepare(source, target, model=checkpoint(), draft_model=draft)


def test_scheduler_parameters_are_set_in_its_configuration(source: Path, target: Path) -> None:
    prepared = prepare(
        source, target, "scheduler.num_sender_threads=3", "scheduler.max_queue_size=9"
    )
    assert prepared.scheduler_args.num_sender_threads == 3
    assert scheduler_parameters(target) == {"max_queue_size": "9", "num_sender_threads": "3"}


def test_weights_inside_the_repository_are_not_copied(source: Path, target: Path) -> None:
    weights = source / "engine/1/weights.bin"
    weights.write_bytes(bytes(LINK_FROM_BYTES))
    prepare(source, target)
    assert (target / "engine/1/weights.bin").resolve() == weights


def test_a_renamed_scheduler_is_found(source: Path, target: Path) -> None:
    config = source / "scheduler/config.pbtxt"
    engine_model = 'parameters { key: "engine_model" value { string_value: "engine" } }'
    config.write_text(config.read_text("utf-8") + engine_model, encoding="utf-8")
    (source / "scheduler").rename(source / "planner")
    prepared = prepare(source, target, "scheduler.max_queue_size=9")
    assert prepared.scheduler == "planner"
    assert prepared.scheduler_args.max_queue_size == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("max_num_sequences=8",),
            "unknown engine argument 'max_num_sequences'; accepted are model",
        ),
        (("max_num_seqs=0",), "max_num_seqs"),
        (("max_num_seqs=many",), "max_num_seqs"),
        (("scheduler.queue=8",), "unknown scheduler parameter 'queue'; accepted are engine_model"),
        (("scheduler.max_queue_size=long",), "max_queue_size"),
        (("max_num_seqs",), "'max_num_seqs' is not KEY=VALUE"),
        (("=8",), "'=8' is not KEY=VALUE"),
    ],
)
def test_a_wrong_setting_is_named(
    source: Path, target: Path, settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(source, target, *settings)
    assert not target.exists()


@pytest.mark.parametrize("name", ["tenants_file", "record_dir", "semantic_cache_model"])
def test_a_path_of_the_scheduler_begins_where_the_command_was_given(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(source.parent)
    file = source.parent / "named.json"
    file.write_text("{}", encoding="utf-8")
    needed = ("scheduler.answer_cache_bytes=1000", "scheduler.semantic_cache_threshold=0.9")
    prepared = prepare(source, target, f"scheduler.{name}=./named.json", *needed)
    assert getattr(prepared.scheduler_args, name) == str(file)
    assert scheduler_parameters(target)[name] == str(file)


def test_the_commands_about_tenants_work_with_the_file_beside_them(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (default_repository() / "README.md").read_text("utf-8")
    section = page.partition("\n## Tenants\n")[2].partition("\n## ")[0]
    (file,) = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    commands = re.findall(r"^    charonia (.*)$", section.replace("\\\n", ""), re.MULTILINE)
    assert len(commands) == 2
    monkeypatch.chdir(tmp_path)
    Path("tenants.json").write_text(file, encoding="utf-8")
    for index, command in enumerate(commands):
        options = build_parser().parse_args(shlex.split(command))
        prepare(source, tmp_path / str(index), *options.settings)


def test_tenants_that_are_wrong_are_told_of_at_once(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    with pytest.raises(ConfigError, match=r"tenants\.json cannot be read"):
        prepare(source, target, "scheduler.tenants_file=tenants.json")
    (source.parent / "tenants.json").write_text('{"default": {"weight": 2}}', encoding="utf-8")
    with pytest.raises(ConfigError, match="weight of 'default' has no effect"):
        prepare(source, target, "scheduler.tenants_file=tenants.json")
    prepare(source, target, "scheduler.tenants_file=tenants.json", "scheduler.fair_share=true")


def test_a_target_between_tokens_needs_prompts_that_can_be_cut(source: Path, target: Path) -> None:
    settings = ("scheduler.inter_token_target_ms=20", "enable_chunked_prefill=false")
    with pytest.raises(
        ConfigError, match=r"inter_token_target_ms = 20\.0 has no effect with enable"
    ):
        prepare(source, target, *settings, "max_num_batched_tokens=4096", "max_model_len=512")
    args = prepare(source, target, settings[0]).scheduler_args
    assert args.inter_token_target_ms == 20.0
    with pytest.raises(ConfigError, match="inter_token_target_ms"):
        change_engine(target, RepositoryOptions(settings=settings[1:]))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_checkpoint_without_its_files_is_refused(
    source: Path, target: Path, checkpoint_dir: Path, missing: str
) -> None:
    (checkpoint_dir / missing).unlink()
    with pytest.raises(CharoniaError, match=missing.replace("model.", r"\*\.")):
        prepare(source, target)


def test_a_missing_checkpoint_directory_is_named(source: Path, target: Path) -> None:
    with pytest.raises(LaunchError, match=r"no checkpoint directory /no/such/directory$"):
        prepare(source, target, model=Path("/no/such/directory"))


def test_an_unsupported_architecture_is_named(
    source: Path, target: Path, checkpoint_dir: Path
) -> None:
    config = json.loads((checkpoint_dir / "config.json").read_text("utf-8"))
    config["architectures"] = ["MambaForCausalLM"]
    (checkpoint_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        prepare(source, target)


def test_a_folder_that_is_no_model_repository_is_refused(tmp_path: Path, target: Path) -> None:
    with pytest.raises(LaunchError, match="is not charonia's model repository"):
        prepare(tmp_path, target)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("engine/1/model.json", "{", "is not JSON"),
        ("engine/1/model.json", "[]", "is not a JSON object"),
        ("scheduler/config.pbtxt", "nonsense: {", "is not a model configuration"),
    ],
)
def test_a_broken_file_is_named(
    source: Path, target: Path, file: str, content: str, message: str
) -> None:
    (source / file).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{file} {message}"):
        prepare(source, target)


def test_a_repository_without_model_json_is_refused(source: Path, target: Path) -> None:
    (source / "engine/1/model.json").unlink()
    with pytest.raises(LaunchError, match=r"model\.json cannot be read"):
        prepare(source, target)


def test_the_ranks_are_options_of_their_own(source: Path, target: Path) -> None:
    prepared = prepare(source, target, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert prepared.engine_args.num_ranks == 4
    assert model_json(target)["tensor_parallel_size"] == 2


def test_a_change_of_the_engine_is_checked_and_told_and_writes_nothing(
    source: Path, target: Path, checkpoint_dir: Path
) -> None:
    prepare(source, target, "max_num_seqs=8")
    before = model_json(target)
    change = change_engine(target, RepositoryOptions(settings=("max_num_seqs=4",), dtype="float32"))
    assert change.differences() == {"max_num_seqs": (8, 4), "dtype": ("auto", "float32")}
    assert change.values == before | {"max_num_seqs": 4, "dtype": "float32"}
    assert change.scheduler == "scheduler"
    assert model_json(target) == before
    with pytest.raises(ConfigError, match=r"scheduler\.max_queue_size cannot change"):
        change_engine(target, RepositoryOptions(settings=("scheduler.max_queue_size=1",)))


def test_of_an_argument_that_is_an_object_what_changes_is_told(source: Path, target: Path) -> None:
    prepare(source, target, 'speculative_config={"method": "ngram"}')

    def differences(config: str) -> dict[str, tuple[Any, Any]]:
        options = RepositoryOptions(settings=(f"speculative_config={config}",))
        return change_engine(target, options).differences()

    assert differences('{"method": "ngram", "prompt_lookup_max": 4}') == {
        "speculative_config.prompt_lookup_max": (None, 4)
    }
    assert differences("null") == {"speculative_config": ({"method": "ngram"}, None)}


def test_a_copy_of_the_repository_finds_its_checkpoint(tmp_path: Path) -> None:
    copy = shutil.copytree(default_repository(), tmp_path / "elsewhere")
    args = EngineArgs.from_file(copy / "engine" / "1" / "model.json")
    assert args.model == str(DEMO_CHECKPOINT)
    check_checkpoint(args)


def test_a_generation_config_that_cannot_be_served_is_refused(
    source: Path, target: Path, checkpoint_dir: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(checkpoint_dir, tmp_path / "changed")
    (model / "generation_config.json").write_text('{"top_p": 2}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="top_p must be above 0 and at most 1, but is 2"):
        prepare(source, target, model=model)


def test_the_scheduler_gets_a_second_name(source: Path, target: Path) -> None:
    prepare(source, target, served_model_names=["llama", "Llama-3.1"])
    for name in ("llama", "Llama-3.1"):
        text = (target / name / "config.pbtxt").read_text("utf-8")
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
        assert config.model_transaction_policy.decoupled
        assert config.parameters["scheduler_model"].string_value == "scheduler"
        assert {one.name for one in config.input} == {one.name for one in INPUTS}
        assert {one.name for one in config.output} == {one.name for one in OUTPUTS}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("meta-llama/Llama", "'meta-llama/Llama' is no name of a Triton model"),
        ("", "'' is no name of a Triton model"),
        ("..", "'..' is no name of a Triton model"),
        ("engine", "'engine' is taken already"),
    ],
)
def test_a_second_name_that_cannot_be_is_refused(
    source: Path, target: Path, name: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"--served-model-name {problem}"):
        prepare(source, target, served_model_names=[name])


def test_a_second_name_is_not_taken_for_the_scheduler(tmp_path: Path, target: Path) -> None:
    source = shutil.copytree(default_repository(), tmp_path / "source")
    (source / "scheduler").rename(source / "smollm")
    prepared = prepare(source, target, served_model_names=["scheduler"])
    assert prepared.scheduler == "smollm"
    assert change_engine(target, RepositoryOptions()).scheduler == "smollm"


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_a_facade_adds_its_models(source: Path, target: Path, is_decoupled: bool) -> None:
    prepare(source, target, facades=["tensorrt-llm"], is_facade_decoupled=is_decoupled)
    for name, tensors in trtllm.MODELS.items():
        config = read_config(target / name / "config.pbtxt")
        is_unary = name in ("preprocessing", "postprocessing")
        assert config.model_transaction_policy.decoupled == (is_decoupled and not is_unary)
        assert config.max_batch_size == trtllm.MAX_BATCH_SIZE
        assert config.parameters["convention"].string_value == name
        assert [one.name for one in config.input] == [one.name for one in tensors.inputs]
        assert [tuple(one.dims) for one in config.output] == [one.dims for one in tensors.outputs]
        assert (target / name / "1" / "model.py").is_file()


def test_a_facade_that_cannot_be_is_refused(tmp_path: Path, source: Path, target: Path) -> None:
    with pytest.raises(
        ConfigError, match="--facade 'vllm' is not known; accepted are tensorrt-llm"
    ):
        prepare(source, target, facades=["vllm"])
    taken = tmp_path / "taken"
    with pytest.raises(ConfigError, match="the model 'tensorrt_llm' is taken already"):
        prepare(source, taken, served_model_names=["tensorrt_llm"], facades=["tensorrt-llm"])
