"""The tokenizer model; what it does is in charonia.serving.hosts.tokenizer."""

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from charonia.errors import CharoniaError
from charonia.serving.hosts import model_process
from charonia.serving.hosts.tokenizer import TokenizerHost
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.supervision.open_calls import OpenCalls


class TritonPythonModel:
    """The model's entry point, as Triton's Python backend expects it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the tokenizer that the engine's model.json names."""
        log = model_process.start(args["model_name"])
        parameters = json.loads(args["model_config"])["parameters"]
        engine_model = parameters["engine_model"]["string_value"]
        model_file = Path(args["model_repository"]).parent / engine_model / "1" / "model.json"
        try:
            self._host = TokenizerHost(
                pb_utils, model_file, QueueLimit.configured(parameters, OpenCalls().note), log=log
            )
        except CharoniaError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> None:
        """Tokenize prompts; the answers to long ones come from another thread."""
        self._host.execute(requests)

    def finalize(self) -> None:
        """Stop."""
        self._host.finalize()
