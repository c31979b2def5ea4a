"""Triton's model control, for one running server: what state a model is in, and loading it anew.

Owns these calls. Must not know when a model counts as lost.

All goes over gRPC: a load over HTTP disturbs the streams of other connections, and HTTP's few
threads can be kept busy by clients.
"""

import contextlib
import threading
from collections.abc import Iterable

import psutil
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from charonia.launch.background import in_background
from charonia.launch.errors import LaunchError
from charonia.launch.server import TritonServer

_POLL_S = 0.05
_ANSWER_S = 2.0


class ModelControl:
    """Over one server, which must be running.

    Args:
        stop: once set, no call is waited for any more.
    """

    def __init__(self, server: TritonServer, stop: threading.Event) -> None:
        self._server = server
        self._stop = stop

    def is_loaded(self, model: str) -> bool | None:
        """Whether a model is loaded at this moment; None when tritonserver does not answer."""
        with self._client() as client:
            try:
                return bool(client.is_model_ready(model, client_timeout=_ANSWER_S))
            except InferenceServerException:
                return None

    def is_served(self, model: str) -> bool:
        """Whether Triton means to serve a model: nobody has unloaded it, or is loading it now."""
        with self._client() as client, contextlib.suppress(InferenceServerException):
            index = client.get_model_repository_index(
                headers=self._server.api_headers, client_timeout=_ANSWER_S
            )
            return any(entry.name == model and entry.state == "READY" for entry in index.models)
        return True

    def replace(
        self,
        model: str,
        processes: Iterable[psutil.Process],
        *,
        timeout_s: float,
    ) -> None:
        """Kill what is left of a model, unload it and load it again.

        Raises:
            LaunchError: it could not be loaded within `timeout_s` seconds.
        """
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # ends stopped ones, too
        answer = in_background(lambda: self._reload(model, timeout_s))
        while not answer.done():
            if self._stop.wait(_POLL_S) or not self._server.is_running:
                raise LaunchError(f"{model} could not be loaded again: tritonserver ended")
        try:
            answer.result()
        except InferenceServerException as error:
            raise LaunchError(f"{model} could not be loaded again: {error.message()}") from None

    def _reload(self, model: str, timeout_s: float) -> None:
        with self._client() as client:
            for call in (client.unload_model, client.load_model):
                call(model, headers=self._server.api_headers, client_timeout=timeout_s)

    def _client(self) -> contextlib.closing[tritonclient.grpc.InferenceServerClient]:
        return contextlib.closing(tritonclient.grpc.InferenceServerClient(self._server.grpc_url))
