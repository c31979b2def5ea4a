"""The postprocessor model; what it does is in charonia.serving.hosts.postprocessor."""

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from charonia.serving.hosts import model_process
from charonia.serving.hosts.postprocessor import PostprocessorHost


class TritonPythonModel:
    """The model's entry point, as Triton's Python backend expects it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Learn the scheduler's name."""
        log = model_process.start(args["model_name"])
        parameters = json.loads(args["model_config"])["parameters"]
        scheduler_model = parameters["scheduler_model"]["string_value"]
        repository = Path(args["model_repository"]).parent
        self._host = PostprocessorHost(pb_utils, scheduler_model, repository, log=log)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Hand chunks on."""
        return self._host.execute(requests)

    def finalize(self) -> None:
        """Stop."""
        self._host.finalize()
