"""Triton's model control, for one running server: what state a model is in, and loading it anew.

Owns these calls, and knowing whether the calls that were open in a model have ended. Must not know
when a model counts as lost.

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


class Replacement:
    """A model that was loaded again in place of one whose processes were lost.

    Triton ends what waits for a dead process with an error, but not the calls of a model that
    answers later through its response senders (`generate`): only the server's own end does. It
    keeps the lost model as long as such calls are open, and says in its log when it lets it go.
    """

    def __init__(self, server: TritonServer, model: str, num_open: int, at: float) -> None:
        self.model = model
        self.at = at
        self._server = server
        # The log does not say which of several lost ones was let go of: all of them must be.
        self._num_needed = server.num_unloads(model) + num_open + 1

    @property
    def is_complete(self) -> bool:
        """Whether no call is open in the lost model any more."""
        return self._server.num_unloads(self.model) >= self._num_needed


class ModelControl:
    """Over one server, which must be running.

    Args:
        stop: once set, no call is waited for any more.
    """

    def __init__(self, server: TritonServer, stop: threading.Event) -> None:
        self._server = server
        self._stop = stop

    def is_live(self) -> bool:
        """Whether tritonserver answers at all."""
        with self._client() as client:
            try:
                return bool(client.is_server_live(client_timeout=_ANSWER_S))
            except InferenceServerException:
                return False

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
        num_open: int = 0,
        now: float,
        timeout_s: float,
    ) -> Replacement:
        """Kill what is left of a model, unload it and load it again.

        Args:
            num_open: replacements of the model before that are not complete.

        Raises:
            LaunchError: it could not be loaded within `timeout_s` seconds.
        """
        replacement = Replacement(self._server, model, num_open, now)
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
        return replacement

    def _reload(self, model: str, timeout_s: float) -> None:
        with self._client() as client:
            for call in (client.unload_model, client.load_model):
                call(model, headers=self._server.api_headers, client_timeout=timeout_s)

    def _client(self) -> contextlib.closing[tritonclient.grpc.InferenceServerClient]:
        return contextlib.closing(tritonclient.grpc.InferenceServerClient(self._server.grpc_url))
