"""The interface of a server that supervision needs. The server is passed as an argument.

Owns these protocols. Must not know how a server is started or stopped.
"""

import threading
from pathlib import Path
from typing import Protocol

import psutil


class RunningServer(Protocol):
    """A tritonserver that is running or has run, and the processes of its models.

    Attributes:
        repository: the model repository. http_url, grpc_url: `host:port`.
        api_headers: grant access to the restricted endpoints.
    """

    repository: Path

    @property
    def http_url(self) -> str: ...
    @property
    def grpc_url(self) -> str: ...
    @property
    def api_headers(self) -> dict[str, str]: ...

    @property
    def is_running(self) -> bool:
        """True if the tritonserver process is alive."""

    @property
    def pid(self) -> int | None:
        """Pid of tritonserver; None if it is not running."""

    def explain_end(self) -> str:
        """Explain in one line why tritonserver ended."""

    def stubs(self) -> dict[str, list[psutil.Process]]:
        """The processes of all Python models, by model."""

    def model_states(self, timeout_s: float) -> dict[str, str]:
        """The state of each model, by tritonserver; empty if it does not answer."""

    def control_name(self, model: str) -> str:
        """The name of a model in a call to load or unload it."""

    def metrics(self) -> dict[str, float] | None:
        """Charonia's metrics by name; None if they cannot be read."""


class Server(RunningServer, Protocol):
    """A tritonserver that can be started repeatedly."""

    def start(self) -> None:
        """Start it; returns at once."""

    def wait_ready(self, timeout: float, stop: threading.Event | None, stopped_s: float) -> None:
        """Wait until it is ready, or `stop` is set.

        Raises:
            LaunchError: it ended, was stopped for longer than `stopped_s`, or was not ready in
                time.
        """

    def raise_if_lost(self, stopped_s: float) -> None:
        """Raise as `wait_ready` does if it has ended or was stopped."""

    def stop(self) -> None:
        """Shut it down in order."""

    def kill(self) -> None:
        """Kill it and all its processes."""
