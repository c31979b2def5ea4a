"""Makes the proxy that a model's config.pbtxt describes.

Owns the parameters of proxies. Must not know what a proxy does.

    scheduler_model  the scheduler behind it; absent if the model needs none
    convention       "" for the scheduler's own, or a model of `trtllm.tables`
    engine_model     its tokenizer is used, by conventions that need one
    max_queue_size, max_queue_bytes  see `QueueLimit`
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from charonia.config import EngineArgs
from charonia.errors import ConfigError, shown
from charonia.serving.conventions.convention import Convention, PlainConvention
from charonia.serving.conventions.trtllm.facade import Facade, TextFacade, TokenFacade
from charonia.serving.conventions.trtllm.text import (
    Postprocessing,
    Preprocessing,
    TextHost,
    TextModel,
)
from charonia.serving.hosts.proxy import ProxyHost
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.supervision.open_calls import OpenCalls
from charonia.text.tokenizer import Tokenizer

_FACADES: Mapping[str, type[Facade]] = {
    "ensemble": TextFacade,
    "tensorrt_llm_bls": TextFacade,
    "tensorrt_llm": TokenFacade,
}
_TEXT_MODELS: Mapping[str, Callable[[Tokenizer, Path], TextModel]] = {
    "preprocessing": Preprocessing,
    "postprocessing": lambda tokenizer, model_dir: Postprocessing(tokenizer),
}


class Proxy(Protocol):
    """The methods of a Triton model."""

    def execute(self, requests: list[Any]) -> None:
        """Take requests; they are answered through their senders."""
        ...

    def finalize(self) -> None:
        """Answer what waits, and stop."""
        ...


def make_proxy(pb_utils: Any, args: Mapping[str, str], log: Callable[[str], None]) -> Proxy:
    """Make the proxy of a model.

    Args:
        args: as Triton gives them to `initialize`. log: takes one line, from any thread.

    Raises:
        CharoniaError: a parameter or the tokenizer is wrong.
    """
    config = json.loads(args["model_config"])
    is_decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
    parameters = {
        name: parameter["string_value"] for name, parameter in config["parameters"].items()
    }
    repository = Path(args["model_repository"]).parent
    queue_limit = QueueLimit.configured(config["parameters"], OpenCalls().note)
    name = parameters.get("convention", "")
    if name in _TEXT_MODELS:
        engine = _engine(parameters, repository)
        model = _TEXT_MODELS[name](_tokenizer(engine), Path(engine.model))
        return TextHost(pb_utils, model, queue_limit, log=log)
    convention: Convention
    if not name:
        convention = PlainConvention(is_decoupled=is_decoupled)
    elif name in _FACADES:
        tokenizer = _tokenizer(_engine(parameters, repository))
        convention = _FACADES[name](name, tokenizer, is_decoupled=is_decoupled)
    else:
        accepted = ", ".join((*_FACADES, *_TEXT_MODELS))
        raise ConfigError(f"convention must be one of {accepted}, but is {shown(name)}")
    return ProxyHost(
        pb_utils,
        parameters["scheduler_model"],
        repository,
        queue_limit,
        convention,
        is_decoupled=is_decoupled,
        log=log,
    )


def _engine(parameters: Mapping[str, str], repository: Path) -> EngineArgs:
    return EngineArgs.from_file(repository / parameters["engine_model"] / "1" / "model.json")


def _tokenizer(engine: EngineArgs) -> Tokenizer:
    return Tokenizer.from_dir(engine.tokenizer_dir)
