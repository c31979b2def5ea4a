"""One tritonserver: starts it, waits until it is ready, stops it, and cleans up.

Owns the command line of tritonserver and its log. Must not know what the models do, or when a
server should be restarted (see `supervision/server/`).
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType

import httpx
import psutil
from tritonclient.utils import InferenceServerException

from charonia.errors import CrashError, LaunchError, LostError, NotReadyError
from charonia.launch.server import processes
from charonia.launch.server.discovery import PACKAGE_PARENT, default_repository, find_tritonserver
from charonia.launch.server.guard import make_guard
from charonia.launch.server.header_options import header_options
from charonia.launch.server.logs import (
    UsageFilter,
    crash_reason,
    failure_reason,
    is_interesting,
)
from charonia.launch.server.runtime_dir import LOG_LEVEL_FILE, SERVER_FILE, RuntimeDir
from charonia.launch.server.stacks import stack_limit
from charonia.local_calls import grpc_client, http_client
from charonia.log_level import VARIABLE as LOG_LEVEL_VARIABLE
from charonia.metrics.merged_page import MergedPage
from charonia.metrics.page_server import PageServer
from charonia.metrics.snapshot import read_metrics
from charonia.server_options import keyed_name
from charonia.serving.hosts.cores import VARIABLE
from charonia.serving.hosts.model_process import STACKS_SIGNAL
from charonia.serving.messages.handover import HANDOVER_SOCKET, step_down
from charonia.supervision.process_table import Stops
from charonia.supervision.server.judge import STOPPED_S

DEFAULT_ADDRESS = "127.0.0.1"
KEY_HEADER = "charonia-key"
RESTRICTED = "shared-memory,trace,logging"
MODEL_CONTROL = "model-repository"
"""API that is also restricted if no guard protects loading and unloading models."""
END_REQUESTS_S = 2.5  # for the scheduler to end all requests before a shutdown
INDEX_S = 0.5  # for tritonserver to say what it is loading, before a shutdown
EXIT_TIMEOUT_S = 6  # for tritonserver to unload the project's own models
EXIT_PER_MODEL_S = 0.5  # for each additional one: they are unloaded one by one
STOP_S = 1.0  # after the exit timeout; then the server is killed
STACKS_S = 1.0  # for a process to log what its threads are doing
LOG_TAIL_LINES = 200
_CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
OPEN_LINE = "Started GRPCInferenceService"
"""Logged by tritonserver when clients can connect; all models are loaded by then."""
MAX_INPUT_OPTION = "http-max-input-size"
MAX_HTTP_INPUT_BYTES = 2**26
"""Maximum size of a body, if tritonserver can limit it. The longest prompt has 2**24 bytes, and at
most three times as many with all non-ASCII characters escaped."""


_FOR_CHARONIA_TO_CHOOSE = (
    "allow-grpc",
    "allow-http",
    "allow-metrics",
    "disable-auto-complete-config",
    "log-file",
    "model-store",
    "reuse-grpc-port",
    "reuse-http-port",
    "strict-model-config",
)
"""Options that charonia does not set, but that it would not work with."""
_SHM_PREFIX = "shm-region-prefix-name"


def check_further_option(option: str, taken: Collection[str]) -> None:
    """Check that an option may be passed to tritonserver, which accepts shortened names, too.

    Raises:
        LaunchError: it is not `--NAME=VALUE`, or its name is among `taken`. `--backend-config` may
            be repeated, so only our own setting of it is refused.
    """
    given, equals, value = option.removeprefix("--").partition("=")
    if not option.startswith("--") or not given or not equals:
        raise LaunchError(f"option {option!r} of tritonserver is not --NAME=VALUE")
    if given == "backend-config" and _SHM_PREFIX not in value:
        return
    if any(name.startswith(given) for name in taken):
        raise LaunchError(f"option {option!r} of tritonserver is for charonia to choose")


class TritonServer:
    """A tritonserver that serves a model repository, as a context manager.

    It can be started again after `stop` or `kill`, with the same ports and key. The metrics page is
    served from the first start until `close`; it is an error while tritonserver does not run.

    Args:
        repository: a model repository that Triton may load as it is.
        address: to listen on. http_port, grpc_port, metrics_port: 0 takes a free port.
        runtime: the directory of this run; None creates one. `close` closes it.
        cores: for everything but the engine, see `cores`; None leaves them to the operating system.
        further_options: additional options of tritonserver, `--name=value` each.
        on_log: takes the server's log, line by line, from a thread.

    Raises:
        LaunchError: an option does not have that form, or is set by the launcher.

    Attributes:
        stack_limit: of its threads. guard: the preloaded library, see `guard`.
    """

    def __init__(
        self,
        repository: Path,
        *,
        address: str = DEFAULT_ADDRESS,
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        runtime: RuntimeDir | None = None,
        cores: frozenset[int] | None = None,
        further_options: Sequence[str] = (),
        on_log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.repository = repository.absolute()
        self.address = address
        self.http_port = http_port
        self.grpc_port = grpc_port
        self.metrics_port = metrics_port
        self._triton_metrics_port = 0
        self._further_options = tuple(further_options)
        self._page = MergedPage(self.repository, self._triton_metrics_url)
        self._page_server: PageServer | None = None
        self._cores = cores
        self._on_log = on_log
        self._tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        self._pump: threading.Thread | None = None
        self._is_open = False  # whether clients could connect since it was started
        self._stops = Stops()
        self.stack_limit = stack_limit()
        self._installation = find_tritonserver()
        self._runtime = runtime or RuntimeDir()
        self.guard = make_guard(self._installation, self.runtime_dir)
        self._backends = self._installation.link_backends(self.runtime_dir / "backends")
        self._command()  # raises if an option is wrong
        self._reserved = self._reserve_ports()

    def _reserve_ports(self) -> list[processes.ReservedPorts]:
        """Choose the ports that were not given. They stay reserved across restarts."""
        given = {self.http_port, self.grpc_port, self.metrics_port}
        ours = processes.ReservedPorts(self.address, 3 + len(given))
        tritons = processes.ReservedPorts(DEFAULT_ADDRESS, 1 + len(given))
        free = (port for port in ours.ports if port not in given)
        self.http_port = self.http_port or next(free)
        self.grpc_port = self.grpc_port or next(free)
        self.metrics_port = self.metrics_port or next(free)
        self._triton_metrics_port = next(port for port in tritons.ports if port not in given)
        return [ours, tritons]

    @property
    def runtime_dir(self) -> Path:
        """The directory of this run, see `RuntimeDir`."""
        return self._runtime.path

    @property
    def api_key(self) -> str:
        """The key to the restricted endpoints, see `api_headers` and `control_name`."""
        return self._runtime.api_key

    @property
    def http_url(self) -> str:
        """`host:port`, as tritonclient wants it."""
        return f"{self._host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """`host:port`, as tritonclient wants it."""
        return f"{self._host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """The URL of the metrics page: the metrics of tritonserver and the schedulers in one."""
        return f"http://{self._host}:{self.metrics_port}/metrics"

    def _triton_metrics_url(self) -> str | None:
        """URL of tritonserver's own metrics page; None while it does not run."""
        if not self.is_running:
            return None
        return f"http://{DEFAULT_ADDRESS}:{self._triton_metrics_port}/metrics"

    @property
    def _host(self) -> str:
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)
        return f"[{reachable}]" if ":" in reachable else reachable

    @property
    def api_headers(self) -> dict[str, str]:
        """Headers, or metadata of gRPC, that a client must send to the restricted endpoints."""
        return {KEY_HEADER: self.api_key, f"triton-grpc-protocol-{KEY_HEADER}": self.api_key}

    def control_name(self, model: str) -> str:
        """The name of a model in a call to load or unload it, which also needs `api_headers`."""
        return model if self.guard.preload is None else keyed_name(self.api_key, model)

    @property
    def is_running(self) -> bool:
        """True if the tritonserver process is alive."""
        process = self._process  # `kill` may clear it in another thread
        return process is not None and process.poll() is None

    @property
    def pid(self) -> int | None:
        """Pid of tritonserver; None before `start` and after `stop`."""
        process = self._process
        return process.pid if process else None

    @property
    def log_tail(self) -> list[str]:
        """The last lines of its log since it was started."""
        return list(self._tail)

    def pids(self, model: str) -> list[int]:
        """Pids of the model's Python processes, without their child processes."""
        return [process.pid for process in self.model_processes(model)]

    def model_processes(self, model: str) -> list[psutil.Process]:
        """The model's Python processes, one per instance."""
        return self.stubs().get(model, [])

    def stubs(self) -> dict[str, list[psutil.Process]]:
        """The processes of all Python models, by model."""
        if not self._process:
            return {}
        found: dict[str, list[psutil.Process]] = {}
        folder = f"{self.repository}/"
        members = processes.session_members(self._process.pid)
        for process, path in processes.find_arguments(members, folder):
            model = path.partition(folder)[2].partition("/")[0]
            found.setdefault(model, []).append(process)
        return found

    def model_states(self, timeout_s: float) -> dict[str, str]:
        """The state of each model, by tritonserver's index; empty if it does not answer.

        The call uses gRPC, because clients can keep HTTP's few threads busy.
        """
        with grpc_client(self.grpc_url) as client, contextlib.suppress(InferenceServerException):
            index = client.get_model_repository_index(
                headers=self.api_headers, client_timeout=timeout_s
            )
            return {entry.name: str(entry.state) for entry in index.models}
        return {}

    def metrics(self) -> dict[str, float] | None:
        """Charonia's metrics by name; None if the page cannot be read."""
        return read_metrics(self.metrics_url)

    def start(self) -> None:
        """Start tritonserver; returns at once. The kernel kills it when the calling thread ends.

        Raises:
            LaunchError: a port is in use, or the guard cannot be loaded any more.
        """
        assert self._process is None, "it is already started"
        for what, port in {"HTTP": self.http_port, "gRPC": self.grpc_port}.items():
            processes.check_port(self.address, port, what)
        if self._page_server is None:
            listener = processes.listen(self.address, self.metrics_port, "metrics")
            self._page_server = PageServer(listener, self._page.read, self._on_log)
        self._tail.clear()
        self._is_open = False
        addresses = {"http_url": self.http_url, "grpc_url": self.grpc_url}
        (self.runtime_dir / SERVER_FILE).write_text(json.dumps(addresses), encoding="utf-8")
        environment = self._installation.environment()
        environment[LOG_LEVEL_VARIABLE] = str(self.runtime_dir / LOG_LEVEL_FILE)
        self.guard.add_to(environment, self.api_key)
        self.guard.check(self._installation.binary, environment)
        if self._cores is not None:
            environment[VARIABLE] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        self._process = processes.start_leader(
            self._command(), environment, self._cores, PACKAGE_PARENT, self.stack_limit.num_bytes
        )
        self._pump = threading.Thread(target=self._pump_log, args=(self._process,), daemon=True)
        self._pump.start()

    def wait_ready(
        self,
        timeout: float = 120.0,
        stop: threading.Event | None = None,
        stopped_s: float = STOPPED_S,
    ) -> None:
        """Wait until Triton and all models are ready and its metrics can be read, or `stop` is set.

        Raises:
            LostError: tritonserver ended, or was stopped, after clients could reach it.
            LaunchError: it ended or was stopped earlier; with the reason from its log.
            NotReadyError: it was not ready in time. The text has its last line, and a note has the
                end of its log with the stacks of its models' threads.
        """
        deadline = time.monotonic() + timeout
        while not self._says_ready():
            self.raise_if_lost(stopped_s)
            if stop is not None and stop.is_set():
                return
            if time.monotonic() > deadline:
                raise self._not_ready(timeout, stop or threading.Event())
            time.sleep(0.05)
        self._is_open = True

    def _not_ready(self, timeout: float, stop: threading.Event) -> NotReadyError:
        said = f"; it said last: {self._tail[-1]}" if self._tail else ""
        error = NotReadyError(f"tritonserver was not ready within {timeout:g} s{said}")
        for process in [each for stubs in self.stubs().values() for each in stubs]:
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                if processes.catches(process.pid, STACKS_SIGNAL):  # it would end other processes
                    process.send_signal(STACKS_SIGNAL)
        stop.wait(STACKS_S)
        error.add_note("\n".join(self._tail))
        return error

    def raise_if_lost(self, stopped_s: float = STOPPED_S) -> None:
        """Raise as `wait_ready` does if tritonserver has ended, or was stopped for that long."""
        if not self.is_running:
            if self._pump is not None:
                self._pump.join(timeout=2.0)
            reason = self.explain_end()
        elif self.pid is not None and self._stops.seconds(self.pid, time.monotonic()) > stopped_s:
            reason = "tritonserver was stopped"
        else:
            return
        raise self._kind_of_loss()(reason)

    def _kind_of_loss(self) -> type[LaunchError]:
        if self._is_open:
            return LostError
        code = self._process.returncode if self._process else None
        return CrashError if code is not None and -code in _CRASHES else LaunchError

    def explain_end(self) -> str:
        """Explain in one line why tritonserver ended, by the end of its log."""
        code = self._process.returncode if self._process else None
        lines = list(self._tail)
        if code is not None and code < 0:
            said = crash_reason(lines)
            return f"tritonserver was ended by {signal.Signals(-code).name}{said and f': {said}'}"
        reason = None if self._is_open else failure_reason(lines)
        reason = reason or next(filter(is_interesting, lines), "it said nothing")
        return f"tritonserver ended with exit code {code}: {reason}"

    def stop(self) -> None:
        """Stop tritonserver: in order at first, by SIGKILL after a timeout.

        This takes at most 10 s, and 0.5 s more for each model beyond the project's own. Requests
        are ended first, because once tritonserver is told to stop it does not continue the streams
        of ensembles, nor end them, and waits for them in vain. It does not stop before a model is
        loaded either, so a load in progress is made to fail. If it does not end in order, that is
        logged.
        """
        try:
            if self.is_running:
                self._end()
        finally:
            self.kill()

    def _end(self) -> None:
        assert self._process is not None
        for path in self.repository.glob(f"*/*/{HANDOVER_SOCKET}"):
            step_down(path, END_REQUESTS_S)
        for model, state in self.model_states(INDEX_S).items():
            if state == "LOADING":
                self._end_load(model)
        self._process.terminate()
        try:
            # Before tritonserver has installed its handler, the signal ends it directly.
            timeout_s = self._exit_timeout_s + STOP_S
            if self._process.wait(timeout=timeout_s) not in (0, -signal.SIGTERM):
                self._on_log(self.explain_end())
        except subprocess.TimeoutExpired:
            self._on_log(f"tritonserver did not end within {timeout_s:g} s and is killed")

    @property
    def _exit_timeout_s(self) -> int:
        num_models = len(list(self.repository.glob("*/config.pbtxt")))
        further = max(0, num_models - len(list(default_repository().glob("*/config.pbtxt"))))
        return EXIT_TIMEOUT_S + math.ceil(EXIT_PER_MODEL_S * further)

    def _end_load(self, model: str) -> None:
        """Make a load fail: kill the newest process of the model.

        Older processes belong to the instance that is being replaced, and end by themselves.
        """
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):  # there may be no process yet
            max(self.model_processes(model), key=psutil.Process.create_time).kill()

    def kill(self) -> None:
        """SIGKILL tritonserver and all its processes, and remove their shared memory."""
        if self._process is None:
            return
        processes.kill_session(self._process.pid)
        self._process.wait()
        if self._pump is not None:
            self._pump.join(timeout=2.0)  # a process outside the session may still hold the pipe
        self._process = None
        processes.remove_shared_memory(self._runtime.shm_prefix)

    def close(self) -> None:
        """Stop tritonserver and the metrics page, and remove the files of this run."""
        try:
            self.stop()
        finally:
            if self._page_server is not None:
                self._page_server.close()
            self._page.close()
            for reserved in self._reserved:
                reserved.close()
            self._runtime.close()

    def __enter__(self) -> "TritonServer":
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _command(self) -> list[str]:
        closed = RESTRICTED if self.guard.preload is not None else f"{MODEL_CONTROL},{RESTRICTED}"
        options: dict[str, object] = {
            "model-repository": self.repository,
            "backend-directory": self._backends,
            "cache-directory": self._installation.root / "caches",
            "model-control-mode": "explicit",
            "load-model": "*",
            "http-address": self.address,
            "grpc-address": self.address,
            "metrics-address": DEFAULT_ADDRESS,
            "http-port": self.http_port,
            "grpc-port": self.grpc_port,
            "metrics-port": self._triton_metrics_port,
            "http-restricted-api": f"{closed}:{KEY_HEADER}={self.api_key}",
            "grpc-restricted-protocol": f"{closed}:{KEY_HEADER}={self.api_key}",
            "backend-config": f"python,{_SHM_PREFIX}={self._runtime.shm_prefix}",
            "exit-timeout-secs": self._exit_timeout_s,
        }
        if MAX_INPUT_OPTION in self._installation.options:
            options[MAX_INPUT_OPTION] = MAX_HTTP_INPUT_BYTES
        for option in self._further_options:
            check_further_option(option, {*options, *_FOR_CHARONIA_TO_CHOOSE})
        flags = [f"--{name}={value}" for name, value in options.items()]
        binary = str(self._installation.binary)
        further = [*self._further_options, *header_options(self._further_options)]
        return [binary, "--disable-auto-complete-config", *flags, *further]

    def _says_ready(self) -> bool:
        """Return whether all models are ready, and the metrics page can be read.

        tritonserver opens its port for metrics after those for requests.
        """
        pages = (f"http://{self.http_url}/v2/health/ready", self._triton_metrics_url())
        with http_client() as client, contextlib.suppress(httpx.HTTPError):
            return all(page is not None and client.get(page).status_code == 200 for page in pages)
        return False

    def _pump_log(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        usage = UsageFilter()
        for raw in process.stdout:
            line = raw.decode("utf-8", errors="replace").rstrip("\n")
            if usage.drops(line):
                continue
            self._tail.append(line)
            self._is_open |= OPEN_LINE in line
            self._on_log(line)
        process.stdout.close()
