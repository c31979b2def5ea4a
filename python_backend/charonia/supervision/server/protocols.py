"""What supervision needs of a server, which is given to it as an argument.

Owns these protocols. Must not know what starts or stops a server.
"""

import threading
from pathlib import Path
from typing import Protocol

import psutil


class RunningServer(Protocol):
    """A tritonserver that runs, or has run, and the processes of its models.

    Attributes:
        repository: its models' folders. http_url, grpc_url: `host:port`.
        api_headers: open what is restricted.
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
        """Whether the tritonserver process lives."""

    @property
    def pid(self) -> int | None:
        """Of tritonserver, where there is one."""

    def explain_end(self) -> str:
        """Why tritonserver ended, in one line."""

    def stubs(self) -> dict[str, list[psutil.Process]]:
        """The processes of all Python models, by model."""

    def model_states(self, timeout_s: float) -> dict[str, str]:
        """The state of each model, as tritonserver has it; of none when it says nothing."""

    def control_name(self, model: str) -> str:
        """What a model is called in a call to load or unload it."""

    def metrics(self) -> dict[str, float] | None:
        """What charonia's metrics are, by name; None where they cannot be read."""


class Server(RunningServer, Protocol):
    """A tritonserver that can be started, again and again."""

    def start(self) -> None:
        """Start it; returns at once."""

    def wait_ready(self, timeout: float, stop: threading.Event | None, stopped_s: float) -> None:
        """Wait until it says that it is ready, or `stop` is set.

        Raises:
            LaunchError: it ended, was stopped for longer than `stopped_s`, or is not ready in time.
        """

    def raise_if_lost(self, stopped_s: float) -> None:
        """Raise as `wait_ready` does where it has ended, or was stopped."""

    def stop(self) -> None:
        """End it in order."""

    def kill(self) -> None:
        """End it, and all its processes, at once."""
