"""A model in front of the scheduler; what it does is in charonia.serving.front_host."""

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from charonia.errors import CharoniaError
from charonia.serving import model_process
from charonia.serving.convention import PlainConvention
from charonia.serving.front_host import FrontHost
from charonia.serving.ledger import Ledger
from charonia.serving.open_calls import OpenCalls


class TritonPythonModel:
    """What Triton's Python backend looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Learn the scheduler's name."""
        log = model_process.start(args["model_name"])
        config = json.loads(args["model_config"])
        parameters = config["parameters"]
        scheduler_model = parameters["scheduler_model"]["string_value"]
        repository = Path(args["model_repository"]).parent
        is_decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        try:
            ledger = Ledger.configured(parameters, OpenCalls().note)
        except CharoniaError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._host = FrontHost(
            pb_utils,
            scheduler_model,
            repository,
            ledger,
            PlainConvention(is_decoupled=is_decoupled),
            is_decoupled=is_decoupled,
            log=log,
        )

    def execute(self, requests: list[Any]) -> None:
        """Hand requests in; the answers come from another thread."""
        self._host.execute(requests)

    def finalize(self) -> None:
        """Stop."""
        self._host.finalize()
