"""Prepares the model repository that one run of Triton loads.

Owns finding and copying model_repository/, and the overrides of `charonia serve`: `--model`,
`--draft-model`, `--dtype`, `--set` and the like. All are checked here, before a server starts or
its engine is replaced. Must not know processes.

Two files of the copy are changed, and models may be added, see `proxy_models`::

    engine/1/model.json     the engine's arguments (EngineArgs), with absolute paths
    scheduler/config.pbtxt  its `parameters` (SchedulerArgs), only where one is overridden
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf import text_format

from charonia.config import (
    PATH_PARAMETERS,
    EngineArgs,
    SchedulerArgs,
    make_paths_absolute,
    with_demo_model,
)
from charonia.core.gate.tenants import Tenants
from charonia.data.model.spec import ModelSpec
from charonia.errors import CheckpointError, ConfigError, LaunchError
from charonia.launch.server.discovery import default_repository
from charonia.launch.server.proxy_models import add_facade, add_name
from charonia.model_config import read_config
from charonia.sampling_defaults import SamplingDefaults
from charonia.serving.messages.reload import LEFT_OF_RELOADS
from charonia.sockets.local import SOCKET_SUFFIX
from charonia.supervision.models.repairs import LOAD_MARK
from charonia.text.draft import check_draft_tokenizer
from charonia.text.tokenizer import Tokenizer
from charonia.tracing.endpoint import check_endpoint

DEFAULT_SCHEDULER = "scheduler"
LINK_FROM_BYTES = 2**20  # larger files, which are weights, are linked instead of copied


@dataclass(frozen=True, kw_only=True)
class RepositoryOptions:
    """Overrides of the repository that is served.

    Attributes:
        source: the model repository to copy; None takes the project's own.
        model: directory of a checkpoint. It brings its own tokenizer and sampling defaults, and
            drops the draft model of model.json. None takes the model of the repository's
            model.json, or the demo pair if it names none.
        draft_model: directory of the draft model's checkpoint.
        dtype: of weights and KV cache; None takes that of model.json.
        tensor_parallel_size, pipeline_parallel_size: how many ranks each layer, and the sequence of
            layers, is split among; None takes those of model.json.
        served_model_names: additional names of the scheduler.
        facades: conventions of other servers to offer too, of `proxy_models.FACADES`.
        is_facade_decoupled: whether the models of facades can stream.
        settings: `KEY=VALUE` of engine arguments (VALUE as JSON, else a string), or
            `scheduler.KEY=VALUE` of the scheduler's parameters.
    """

    source: Path | None = None
    model: Path | None = None
    draft_model: Path | None = None
    dtype: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    served_model_names: Sequence[str] = ()
    facades: Sequence[str] = ()
    is_facade_decoupled: bool = True
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class PreparedRepository:
    """A model repository that Triton may load as it is. `scheduler` is that model's name."""

    path: Path
    scheduler: str
    engine_args: EngineArgs
    scheduler_args: SchedulerArgs


def prepare_repository(target: Path, options: RepositoryOptions) -> PreparedRepository:
    """Copy a model repository to `target`, which must not exist, and apply the overrides.

    Raises:
        LaunchError: the repository or a checkpoint does not exist, or cannot be served.
        ConfigError: a key is unknown or a value out of range; the message names it.
        CheckpointError: the checkpoint's configuration is not supported.
    """
    source = (options.source or default_repository()).absolute()
    engine_settings, scheduler_settings = split_settings(options.settings)
    scheduler, config = _find_scheduler(source)
    for name in PATH_PARAMETERS:
        if name in scheduler_settings:
            scheduler_settings[name] = os.path.normpath(Path.cwd() / scheduler_settings[name])
    scheduler_args = _override_parameters(config, scheduler_settings)
    _check_tenants(scheduler_args, source / scheduler)
    if scheduler_args.otlp_traces_endpoint is not None:
        check_endpoint(scheduler_args.otlp_traces_endpoint)
    model_json = source / scheduler_args.engine_model / "1" / "model.json"
    values = _engine_values(model_json, options, engine_settings)
    engine_args = EngineArgs.from_dict(values)
    check_checkpoint(engine_args)
    scheduler_args.check_engine(engine_args)

    # Sockets and load marks belong to the run that made them.
    ignore = shutil.ignore_patterns("__pycache__", f"*{SOCKET_SUFFIX}", LOAD_MARK, *LEFT_OF_RELOADS)
    shutil.copytree(source, target, ignore=ignore, copy_function=_copy_or_link)
    (target / model_json.relative_to(source)).write_text(
        json.dumps(values, indent=2) + "\n", encoding="utf-8"
    )
    if scheduler_settings:
        text = text_format.MessageToString(config)
        (target / scheduler / "config.pbtxt").write_text(text, encoding="utf-8")
    for name in options.served_model_names:
        add_name(target, name, scheduler)
    for facade in options.facades:
        add_facade(
            target,
            facade,
            scheduler,
            scheduler_args.engine_model,
            is_decoupled=options.is_facade_decoupled,
        )
    return PreparedRepository(target, scheduler, engine_args, scheduler_args)


@dataclass(frozen=True)
class EngineChange:
    """A change of the engine of a repository that is being served.

    Attributes:
        values: the new content of model.json. scheduler: name of the scheduler's model.
    """

    before: EngineArgs
    after: EngineArgs
    values: dict[str, Any]
    scheduler: str

    def differences(self) -> dict[str, tuple[Any, Any]]:
        """The arguments that change, by name: old and new value.

        If the old and the new value are both objects, each key that changes is listed. Otherwise an
        object shows its keys that differ from the defaults.
        """
        return dict(_differences(self.before, self.after))


def _differences(before: msgspec.Struct, after: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(after):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if isinstance(old, msgspec.Struct) and isinstance(new, msgspec.Struct):
            for key, change in _differences(old, new):
                yield f"{field.name}.{key}", change
        elif old != new:
            yield field.name, (_said(old), _said(new))


def _said(value: Any) -> Any:
    """A value as its file would have it, without defaults."""
    if not isinstance(value, msgspec.Struct):
        return value
    said = ((field, getattr(value, field.name)) for field in msgspec.structs.fields(value))
    return {field.name: one for field, one in said if one != field.default}


def change_engine(repository: Path, options: RepositoryOptions) -> EngineChange:
    """Apply overrides to the engine of a prepared repository, without changing a file.

    Raises:
        LaunchError, ConfigError, CheckpointError: as `prepare_repository`. Changing a parameter of
            the scheduler is a ConfigError, because the scheduler keeps running.
    """
    engine_settings, scheduler_settings = split_settings(options.settings)
    if scheduler_settings:
        names = ", ".join(f"scheduler.{name}" for name in scheduler_settings)
        raise ConfigError(f"{names} cannot change while the server runs; start it anew for that")
    scheduler, config = _find_scheduler(repository)
    scheduler_args = _override_parameters(config, {})
    model_json = repository / scheduler_args.engine_model / "1" / "model.json"
    values = _engine_values(model_json, options, engine_settings)
    after = EngineArgs.from_dict(values)
    check_checkpoint(after)
    scheduler_args.check_engine(after)
    return EngineChange(EngineArgs.from_file(model_json), after, values, scheduler)


def check_checkpoint(args: EngineArgs) -> None:
    """Check that the checkpoints exist and are supported, and that there is a tokenizer.

    Raises:
        LaunchError: a directory or a file in it is missing.
        CheckpointError: config.json or generation_config.json is not supported.
        ConfigError: the draft model has another tokenizer.
    """
    _check_model(Path(args.model))
    SamplingDefaults.of_engine(args)
    if not (args.tokenizer_dir / "tokenizer.json").is_file():
        raise LaunchError(f"no tokenizer.json in {args.tokenizer_dir}")
    speculative = args.speculative_config
    if speculative is not None and speculative.model is not None:
        _check_model(Path(speculative.model))
        check_draft_tokenizer(Tokenizer.from_dir(args.tokenizer_dir), Path(speculative.model))


def _check_model(directory: Path) -> None:
    if not directory.is_dir():
        raise LaunchError(f"no checkpoint directory {directory}")
    try:
        ModelSpec.from_dir(directory)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {directory}: {error}") from None
    if not any(directory.glob("*.safetensors")):
        raise LaunchError(f"checkpoint {directory} has no *.safetensors file")


def _engine_values(
    model_json: Path, options: RepositoryOptions, settings: dict[str, Any]
) -> dict[str, Any]:
    """The new content of model.json: its values, the command line's overrides, absolute paths."""
    try:
        values = json.loads(model_json.read_text(encoding="utf-8"))
    except OSError as error:
        raise LaunchError(f"{model_json} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{model_json} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{model_json} is not a JSON object")
    make_paths_absolute(values, model_json.parent)
    values = with_demo_model(values)
    model = settings.get("model", options.model)
    if model is not None:
        values.pop("tokenizer", None)
        values.pop("generation_config", None)
        values["model"] = str(model)
        if "model" in (values.get("speculative_config") or {}):
            del values["speculative_config"]
    for name in ("dtype", "tensor_parallel_size", "pipeline_parallel_size"):
        if (value := getattr(options, name)) is not None:
            values[name] = value
    values |= settings
    if options.draft_model is not None:
        _add_draft_model(values, options.draft_model)
    make_paths_absolute(values, Path.cwd())
    return values


def _add_draft_model(values: dict[str, Any], draft_model: Path) -> None:
    config = values.get("speculative_config") or {}
    if not isinstance(config, dict) or config.get("method", "draft_model") != "draft_model":
        raise ConfigError(
            f"--draft-model together with speculative_config = {config!r}; accepted beside it is an"
            " object without another method"
        )
    values["speculative_config"] = {**config, "model": str(draft_model)}


def split_settings(settings: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Separate engine arguments (parsed) from scheduler parameters (strings)."""
    engine: dict[str, Any] = {}
    scheduler: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {setting!r} is not KEY=VALUE")
        if key.startswith("scheduler."):
            scheduler[key.removeprefix("scheduler.")] = value
        else:
            engine[key] = _json_or_string(value)
    return engine, scheduler


def _json_or_string(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _find_scheduler(source: Path) -> tuple[str, Any]:
    """Find the scheduler, whose folder may have been renamed; return its name and configuration.

    It is the decoupled model that names an engine, or that has the default name.
    """
    for path in sorted(source.glob("*/config.pbtxt")):
        config = read_config(path)
        names_engine = "engine_model" in config.parameters
        is_decoupled = config.model_transaction_policy.decoupled
        if "scheduler_model" in config.parameters:
            continue  # it forwards to a scheduler
        if is_decoupled and (names_engine or path.parent.name == DEFAULT_SCHEDULER):
            return path.parent.name, config
    raise LaunchError(
        f"{source} is not charonia's model repository: no decoupled model has the parameter "
        "engine_model"
    )


def _override_parameters(config: Any, settings: dict[str, str]) -> SchedulerArgs:
    """Set parameters of `config`, and check all of charonia's parameters."""
    for key, value in settings.items():
        config.parameters[key].string_value = value
    ours = {key: parameter.string_value for key, parameter in config.parameters.items()}
    return SchedulerArgs.from_parameters(ours)


def _check_tenants(args: SchedulerArgs, directory: Path) -> None:
    """Read the tenants' file, so that an error in it is reported before the start."""
    if args.tenants_file is not None:
        Tenants(directory / args.tenants_file, has_shares=args.fair_share, log=lambda _: None)


def _copy_or_link(source: str, target: str) -> None:
    if os.path.getsize(source) < LINK_FROM_BYTES:
        shutil.copyfile(source, target)
    else:
        os.symlink(source, target)
