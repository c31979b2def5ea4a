"""The gateway's process beside a server: started and stopped with it, and restarted when it ends.

Owns that process. Must not know what a gateway does: the process runs `charonia gateway`.

The gateway keeps running while tritonserver restarts. Meanwhile it answers that no server is
available.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from charonia.errors import LaunchError
from charonia.events import error_event
from charonia.launch.server import processes
from charonia.log_level import VARIABLE as LOG_LEVEL_VARIABLE

BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
STABLE_S = 60.0
STOP_S = 10.0
_NEEDED = ("fastapi", "httptools", "uvicorn")


class GatewayProcess:
    """A gateway's process, as a context manager.

    Args:
        server: `host:port` of the server's gRPC. tokenizer: that of the model it serves.
        model_names: see `charonia gateway`; at least one.
        address, port: to listen on; 0 takes a free port.
        drain_s: time in which its requests may finish when it drains. chat_template, api_key_file,
            otlp_traces_endpoint, trace_rate: see `charonia gateway`.
        log_level_file: with the present level of its log, see `log_level`; None is info.
        log: takes the lines of its log and of its restarts, from a thread.

    Raises:
        LaunchError: the port is in use, or a file or a package is missing. ConfigError: the API
            keys are wrong.

    Attributes:
        url: the address that it listens on. needs_key: whether requests need an API key.
    """

    def __init__(
        self,
        server: str,
        tokenizer: Path,
        model_names: Sequence[str],
        *,
        address: str,
        port: int,
        drain_s: float,
        chat_template: Path | None = None,
        api_key_file: Path | None = None,
        otlp_traces_endpoint: str | None = None,
        trace_rate: int = 1,
        log_level_file: Path | None = None,
        log: Callable[[str], None],
    ) -> None:
        if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
            raise LaunchError(
                f"the gateway needs {', '.join(missing)}: pip install 'charonia[gateway]'"
            )
        if chat_template is not None and not chat_template.is_file():
            raise LaunchError(f"no chat template {chat_template}")
        if api_key_file is not None:
            from charonia.gateway.keys import Keys

            Keys.from_file(api_key_file)
        self._reserved = None
        if port:
            try:
                processes.check_port(address, port, "gateway")
            except LaunchError as error:
                raise LaunchError(
                    f"{error}; name another one with --gateway-port, or serve with --no-gateway"
                ) from None
        else:
            self._reserved = processes.ReservedPorts(address, 1)
            (port,) = self._reserved.ports
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{port}"
        self.needs_key = api_key_file is not None
        self._command = [
            *(
                sys.executable,
                "-m",
                "charonia.launch.commands.cli",
                "gateway",
                f"--server={server}",
            ),
            *(f"--tokenizer={tokenizer}", f"--host={address}", f"--port={port}"),
            *(f"--drain-timeout={drain_s}", "--served-model-name", *model_names),
            *([] if chat_template is None else [f"--chat-template={chat_template}"]),
            *([] if api_key_file is None else [f"--api-key-file={api_key_file}"]),
            *_traces(otlp_traces_endpoint, trace_rate),
        ]
        self._environment = dict(os.environ)
        if log_level_file is not None:
            self._environment[LOG_LEVEL_VARIABLE] = str(log_level_file)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="charonia-gateway", daemon=True)

    def drain(self) -> None:
        """Let the gateway finish its requests, refuse new ones, and then end."""
        self._end(signal.SIGTERM)

    def __enter__(self) -> "GatewayProcess":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(signal.SIGTERM)  # one that does not handle signals yet ends without a traceback
        self._end(signal.SIGINT)
        self._thread.join(STOP_S)
        self._end(signal.SIGKILL)
        self._thread.join()
        if self._reserved is not None:
            self._reserved.close()

    def _end(self, number: signal.Signals) -> None:
        with self._lock:
            self._stop.set()
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(number)

    def _run(self) -> None:
        """Run the gateway, and restart it until `_stop` is set.

        The kernel kills it when this thread ends, see `start_leader`.
        """
        num_failures = 0
        while (process := self._start()) is not None:
            started = time.monotonic()
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    self._log(line.decode(errors="replace").rstrip("\n"))
            code = process.wait()
            if self._stop.is_set():
                return
            num_failures = 0 if time.monotonic() - started > STABLE_S else num_failures + 1
            self._log(error_event("gateway_restarting", code=code))
            if num_failures:
                self._stop.wait(min(BACKOFF_S * 2.0 ** (num_failures - 1), MAX_BACKOFF_S))

    def _start(self) -> "subprocess.Popen[bytes] | None":
        with self._lock:
            if self._stop.is_set():
                return None
            self._process = processes.start_leader(self._command, self._environment)
            return self._process


def _traces(endpoint: str | None, rate: int) -> list[str]:
    if endpoint is None:
        return []
    return [f"--otlp-traces-endpoint={endpoint}", f"--trace-rate={rate}"]
