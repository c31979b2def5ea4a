"""One tritonserver: start it, wait until it says ready, stop it, leave nothing behind.

Owns the command line of tritonserver and its log. Must not know what the models do, nor when a
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
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from charonia.errors import CrashError, LaunchError, LostError, NotReadyError
from charonia.launch.server import processes
from charonia.launch.server.discovery import PACKAGE_PARENT, default_repository, find_tritonserver
from charonia.launch.server.guard import make_guard
from charonia.launch.server.logs import crash_reason, failure_reason, is_interesting
from charonia.launch.server.runtime_dir import SERVER_FILE, RuntimeDir
from charonia.launch.server.stacks import stack_limit
from charonia.metrics.merged_page import MergedPage
from charonia.metrics.page_server import PageServer
from charonia.metrics.read_page import read_metrics
from charonia.serving.hosts.cores import VARIABLE
from charonia.serving.hosts.model_process import STACKS_SIGNAL
from charonia.supervision.models.handover import HANDOVER_SOCKET, step_down
from charonia.supervision.models.server_options import keyed_name
from charonia.supervision.process_table import Stops
from charonia.supervision.server.judge import STOPPED_S

DEFAULT_ADDRESS = "127.0.0.1"
KEY_HEADER = "charonia-key"
RESTRICTED = "shared-memory,trace,logging"
MODEL_CONTROL = "model-repository"
"""What is restricted, too, where no guard stands in front of loading and unloading models."""
END_REQUESTS_S = 2.5  # that the scheduler takes at most to end all requests, before a shutdown
INDEX_S = 0.5  # that tritonserver takes at most to say what it is loading, before a shutdown
EXIT_TIMEOUT_S = 6  # in which tritonserver unloads the project's own models, or gives up
EXIT_PER_MODEL_S = 0.5  # for each further one: it unloads them one after the other
STOP_S = 1.0  # later the server is killed
STACKS_S = 1.0  # in which a process says what its threads are doing
LOG_TAIL_LINES = 200
_CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
OPEN_LINE = "Started GRPCInferenceService"
"""What tritonserver logs when its first clients may connect; all models are loaded then."""
MAX_INPUT_OPTION = "http-max-input-size"
MAX_HTTP_INPUT_BYTES = 2**26
"""Of a body, where tritonserver can bound it. The longest prompt, 2**24 bytes, has at most three
times as many with every character beyond ASCII escaped."""


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
"""Beside what it sets itself: what else it could not work with."""
_SHM_PREFIX = "shm-region-prefix-name"


def check_further_option(option: str, taken: Collection[str]) -> None:
    """Make sure that an option can be handed to tritonserver, which takes shortened names, too.

    Raises:
        LaunchError: it is not `--NAME=VALUE`, or one of those that are `taken`. Of
            `--backend-config`, which may be there many times, one setting of ours alone is taken.
    """
    given, equals, value = option.removeprefix("--").partition("=")
    if not option.startswith("--") or not given or not equals:
        raise LaunchError(f"option {option!r} of tritonserver is not --NAME=VALUE")
    if given == "backend-config" and _SHM_PREFIX not in value:
        return
    if any(name.startswith(given) for name in taken):
        raise LaunchError(f"option {option!r} of tritonserver is for charonia to choose")


class TritonServer:
    """A tritonserver over one model repository, as a context manager.

    It may be started again after `stop` or `kill`, with the same ports and key. The page of metrics
    is served from the first start until `close`, with an error while tritonserver does not run.

    Args:
        repository: a model repository that Triton may load as it is.
        address: to listen on. http_port, grpc_port, metrics_port: 0 takes a free one.
        runtime: where what belongs to this run is kept; None makes one. `close` closes it.
        cores: for all but the engine, see `cores`; None leaves them to the operating system.
        further_options: of tritonserver, `--name=value` each.
        on_log: gets the server's log, line by line, from a thread.

    Raises:
        LaunchError: an option is not of that form, or is for the launcher to choose.

    Attributes:
        stack_limit: of its threads. guard: what stands in front of its library.
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
        self._is_open = False  # to clients, since it was started
        self._stops = Stops()
        self.stack_limit = stack_limit()
        self._installation = find_tritonserver()
        self._runtime = runtime or RuntimeDir()
        self.guard = make_guard(self._installation, self.runtime_dir)
        self._backends = self._installation.link_backends(self.runtime_dir / "backends")
        self._command()  # raises where an option is wrong
        self._reserved = self._reserve_ports()

    def _reserve_ports(self) -> list[processes.ReservedPorts]:
        """Choose those that were not given. They stay this server's own from start to start."""
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
        """What opens what is restricted, see `api_headers` and `control_name`."""
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
        """The full URL of the metrics page: tritonserver's and the schedulers' in one."""
        return f"http://{self._host}:{self.metrics_port}/metrics"

    def _triton_metrics_url(self) -> str | None:
        """Of tritonserver's own page; None while it does not run."""
        if not self.is_running:
            return None
        return f"http://{DEFAULT_ADDRESS}:{self._triton_metrics_port}/metrics"

    @property
    def _host(self) -> str:
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)
        return f"[{reachable}]" if ":" in reachable else reachable

    @property
    def api_headers(self) -> dict[str, str]:
        """What a client must send to use the restricted endpoints; over gRPC as metadata."""
        return {KEY_HEADER: self.api_key, f"triton-grpc-protocol-{KEY_HEADER}": self.api_key}

    def control_name(self, model: str) -> str:
        """What a client must call a model to load or unload it; it sends `api_headers`, too."""
        return model if self.guard.preload is None else keyed_name(self.api_key, model)

    @property
    def is_running(self) -> bool:
        """Whether the tritonserver process lives."""
        process = self._process  # `kill` takes it away in another thread
        return process is not None and process.poll() is None

    @property
    def pid(self) -> int | None:
        """Of tritonserver, or None before `start` and after `stop`."""
        process = self._process
        return process.pid if process else None

    @property
    def log_tail(self) -> list[str]:
        """The last lines that it logged since it was started."""
        return list(self._tail)

    def pids(self, model: str) -> list[int]:
        """Pids of the model's Python processes, without what they started themselves."""
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
        """The state of each model, as tritonserver's index has it; of none when it says nothing.

        It is asked over gRPC: HTTP's few threads can be kept busy by clients.
        """
        with (
            contextlib.closing(tritonclient.grpc.InferenceServerClient(self.grpc_url)) as client,
            contextlib.suppress(InferenceServerException),
        ):
            index = client.get_model_repository_index(
                headers=self.api_headers, client_timeout=timeout_s
            )
            return {entry.name: str(entry.state) for entry in index.models}
        return {}

    def metrics(self) -> dict[str, float] | None:
        """Charonia's metrics by name; None where the page cannot be read."""
        return read_metrics(self.metrics_url)

    def start(self) -> None:
        """Start tritonserver; returns at once. The kernel kills it when the calling thread ends.

        Raises:
            LaunchError: a port is taken, or the guard cannot be loaded any more.
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
        """Wait until Triton says that it and all models are ready and its metrics can be read, or
        `stop` is set.

        Raises:
            LostError: tritonserver ended, or was stopped, after clients could reach it.
            LaunchError: so it did earlier; with what it logged.
            NotReadyError: it was not ready in time; with what it logged, and as a note with what
                the threads of its models were doing.
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
                if processes.catches(process.pid, STACKS_SIGNAL):  # it would end others
                    process.send_signal(STACKS_SIGNAL)
        stop.wait(STACKS_S)
        error.add_note("\n".join(self._tail))
        return error

    def raise_if_lost(self, stopped_s: float = STOPPED_S) -> None:
        """Raise as `wait_ready` does if tritonserver has ended, or is stopped for so long."""
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
        """Why tritonserver ended, in one line, from what it logged last."""
        code = self._process.returncode if self._process else None
        lines = list(self._tail)
        if code is not None and code < 0:
            said = crash_reason(lines)
            return f"tritonserver was ended by {signal.Signals(-code).name}{said and f': {said}'}"
        reason = None if self._is_open else failure_reason(lines)
        reason = reason or next(filter(is_interesting, lines), "it said nothing")
        return f"tritonserver ended with exit code {code}: {reason}"

    def stop(self) -> None:
        """Stop tritonserver: politely first, by force after some seconds. Returns within 10 s, and
        half a second more for each model that is not one of the project's own six.

        Requests are ended before: from the moment at which tritonserver is told, it carries no
        stream of an ensemble any further, nor its end, and waits for it in vain. Nor does it end
        before a model is loaded; so the load is made to fail. An end that was not in order is
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
            # Before it has a handler of its own, the signal itself ends it.
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
        """Have a load fail: kill the newest process of the model.

        Older ones are of a model that the new one replaces, and end by themselves.
        """
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):  # there may be none yet
            max(self.model_processes(model), key=psutil.Process.create_time).kill()

    def kill(self) -> None:
        """SIGKILL tritonserver and all its processes, and remove their shared memory."""
        if self._process is None:
            return
        processes.kill_session(self._process.pid)
        self._process.wait()
        if self._pump is not None:
            self._pump.join(timeout=2.0)  # somebody outside the session may still hold the pipe
        self._process = None
        processes.remove_shared_memory(self._runtime.shm_prefix)

    def close(self) -> None:
        """`stop`, end the page of metrics, and remove what belongs to this run."""
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
        return [binary, "--disable-auto-complete-config", *flags, *self._further_options]

    def _says_ready(self) -> bool:
        """Whether all models are ready, and the page of metrics can be read.

        tritonserver opens its port for metrics after those for requests.
        """
        pages = (f"http://{self.http_url}/v2/health/ready", self._triton_metrics_url())
        try:
            return all(
                page is not None and httpx.get(page, timeout=5.0).status_code == 200
                for page in pages
            )
        except httpx.HTTPError:
            return False

    def _pump_log(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode("utf-8", errors="replace").rstrip("\n")
            self._tail.append(line)
            self._is_open |= OPEN_LINE in line
            self._on_log(line)
        process.stdout.close()
