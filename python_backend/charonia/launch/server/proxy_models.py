"""Adds models that forward requests to the scheduler, while a repository is prepared.

Owns their folders: the code is that of `generate`, and the configuration depends on the kind of
model. Must not know how they handle a request.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from charonia.errors import ConfigError
from charonia.launch.server.discovery import default_repository
from charonia.model_config import MODEL_NAME, read_config
from charonia.serving.conventions.interface import Tensor
from charonia.serving.conventions.trtllm import tables as trtllm

FACADES: Mapping[str, tuple[str, ...]] = {"tensorrt-llm": tuple(trtllm.MODELS)}
"""The models of each convention."""
_ALWAYS_UNARY = ("preprocessing", "postprocessing")


def add_name(repository: Path, name: str, scheduler: str) -> None:
    """Add a further name of the scheduler.

    Raises:
        ConfigError: the name is not valid for a model, or is in use.
    """
    if not MODEL_NAME.fullmatch(name):
        raise ConfigError(
            f"--served-model-name {name!r} is no name of a Triton model; accepted are letters,"
            " digits, '_', '-' and '.', beginning with a letter or digit"
        )
    config = _proxy_config(scheduler, is_decoupled=True)
    config.input.add(name="stream", data_type="TYPE_BOOL", dims=[1], optional=True)
    _add(repository, name, config, f"--served-model-name {name!r}", f"Another name of {scheduler}.")


def add_facade(
    repository: Path, facade: str, scheduler: str, engine: str, *, is_decoupled: bool
) -> None:
    """Add the models of another server's API convention.

    Raises:
        ConfigError: the convention is unknown, or a model's name is in use.
    """
    if facade not in FACADES:
        raise ConfigError(f"--facade {facade!r} is not known; accepted are {', '.join(FACADES)}")
    for name in FACADES[facade]:
        config = _proxy_config(scheduler, is_decoupled=is_decoupled and name not in _ALWAYS_UNARY)
        config.max_batch_size = trtllm.MAX_BATCH_SIZE
        config.parameters["convention"].string_value = name
        config.parameters["engine_model"].string_value = engine
        del config.input[:], config.output[:]
        for one in trtllm.MODELS[name].inputs:
            config.input.add(**_fields(one), optional=True)
        for one in trtllm.MODELS[name].outputs:
            config.output.add(**_fields(one))
        _add(
            repository,
            name,
            config,
            f"--facade {facade}: the model {name!r}",
            f"{name} of TensorRT-LLM's convention.",
        )


def _proxy_config(scheduler: str, *, is_decoupled: bool) -> Any:
    config = read_config(default_repository() / "generate" / "config.pbtxt")
    config.model_transaction_policy.decoupled = is_decoupled
    config.parameters["scheduler_model"].string_value = scheduler
    return config


def _fields(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": f"TYPE_{tensor.datatype}", "dims": tensor.dims}


def _add(repository: Path, name: str, config: Any, what: str, comment: str) -> None:
    """Write a model's folder."""
    if (repository / name).exists():
        raise ConfigError(f"{what} is taken already")
    version_dir = repository / name / "1"
    version_dir.mkdir(parents=True)
    shutil.copyfile(default_repository() / "generate" / "1" / "model.py", version_dir / "model.py")
    text = f"# {comment}\n{text_format.MessageToString(config)}"
    (version_dir.parent / "config.pbtxt").write_text(text, encoding="utf-8")
