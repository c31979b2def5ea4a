"""A model in front of the scheduler; what it does is in charonia.serving.hosts.proxy."""

from typing import Any

import triton_python_backend_utils as pb_utils

from charonia.errors import CharoniaError
from charonia.serving.hosts import model_process
from charonia.serving.hosts.proxies import make_proxy


class TritonPythonModel:
    """The model's entry point, as Triton's Python backend expects it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Find out which proxy it is."""
        log = model_process.start(args["model_name"])
        try:
            self._proxy = make_proxy(pb_utils, args, log)
        except CharoniaError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> None:
        """Take requests; the answers come from other threads."""
        self._proxy.execute(requests)

    def finalize(self) -> None:
        """Stop."""
        self._proxy.finalize()
