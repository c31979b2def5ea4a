"""The loader model; what it does is in charonia.serving.loading."""

from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from charonia.errors import CharoniaError
from charonia.serving import model_process
from charonia.serving.loading import LOADER_SOCKET, Loader
from charonia.serving.tensors import refuse_all


class TritonPythonModel:
    """What Triton's Python backend looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Take orders."""
        log = model_process.start(args["model_name"])
        path = Path(args["model_repository"]) / args["model_version"] / LOADER_SOCKET
        try:
            self._loader = Loader(pb_utils, path, log=log)
        except CharoniaError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> list[Any]:
        """Refuse what comes through Triton."""
        return refuse_all(pb_utils, requests)

    def finalize(self) -> None:
        """Stop."""
        self._loader.close()
