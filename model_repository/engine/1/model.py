"""The engine model; what it does is in charonia.serving.hosts.engine."""

from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from charonia.config import EngineArgs
from charonia.errors import CharoniaError
from charonia.serving.hosts import model_process
from charonia.serving.hosts.engine import EngineHost, PlanRunner, end_process
from charonia.serving.requests.tensors import refuse_all


class TritonPythonModel:
    """The model's entry point, as Triton's Python backend expects it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine."""
        log = model_process.start(args["model_name"])

        def make_runner(engine_args: EngineArgs) -> PlanRunner:
            from charonia.parallel.engine import load_engine  # late: it brings torch

            return load_engine(engine_args, log=log, on_lost=end_process)

        version_dir = Path(args["model_repository"]) / args["model_version"]
        kind = args["model_instance_kind"]
        try:
            self._host = EngineHost(make_runner, version_dir, kind, log=log)
            self._host.serve_steps()
        except CharoniaError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> list[Any]:
        """Refuse what comes through Triton."""
        return refuse_all(pb_utils, requests)

    def finalize(self) -> None:
        """Stop."""
        self._host.finalize()
