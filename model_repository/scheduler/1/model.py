"""The scheduler model; what it does is in charonia.serving.hosts.scheduler."""

from typing import Any

import triton_python_backend_utils as pb_utils

from charonia.errors import CharoniaError
from charonia.serving.hosts import model_process
from charonia.serving.hosts.scheduler import SchedulerHost


class TritonPythonModel:
    """The model's entry point, as Triton's Python backend expects it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start serving; the engine may come later."""
        log = model_process.start(args["model_name"])
        try:
            self._host = SchedulerHost(pb_utils, args, log=log)
        except CharoniaError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> None:
        """Take requests in; the responses come from other threads."""
        self._host.execute(requests)

    def finalize(self) -> None:
        """Answer what is still live."""
        self._host.finalize()
