"""The server that is broken: under a supervisor as `charonia serve` runs one, its counters, reload.

Owns the thread that supervises it. Must not know faults or streams.
"""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from charonia.errors import LaunchError
from charonia.launch.commands.serve import HANG_MARGIN_S
from charonia.launch.server.repository import RepositoryOptions
from charonia.launch.server.run import prepared_server
from charonia.launch.server.tritonserver import TritonServer
from charonia.supervision.server.judge import SupervisionLimits
from charonia.supervision.server.supervisor import Supervisor
from support.e2e import read_page, samples_of

RESTARTS = "charonia_engine_restarts_total"
START_TIMEOUT_S = 120.0
RELOAD_TIMEOUT_S = 60.0


class TargetError(Exception):
    """The server does not serve, or not as it was asked to; the text says why."""


@dataclass(frozen=True)
class Counts:
    """Losses so far.

    Attributes:
        servers: restarts of the whole server. engines: restarts of the engine, in the server that
            runs now.
    """

    servers: int
    engines: int

    def engines_since(self, before: "Counts") -> int:
        """Engines lost since then, as far as the server that runs now remembers."""
        return self.engines - before.engines * (self.servers == before.servers)


class Target:
    """A server that is brought back when it is lost.

    Attributes:
        server: whatever becomes of its processes. urls: by protocol.
    """

    def __init__(self, server: TritonServer, supervisor: Callable[..., Supervisor]) -> None:
        self.server = server
        self.urls = {"grpc": server.grpc_url, "http": server.http_url, "unary": server.grpc_url}
        self._stop = threading.Event()
        self._is_serving = threading.Event()
        self._num_served = 0
        self._given_up: LaunchError | None = None
        self._supervisor = supervisor(stop=self._stop, on_serving=self._note_serving)
        # It lives as long as the server, which the kernel ends with it.
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the whole server."""
        return max(self._num_served - 1, 0)

    def check(self) -> None:
        """Make sure that somebody looks after the server.

        Raises:
            TargetError: the supervisor has given up.
        """
        if self._given_up is not None:
            raise TargetError(f"the server is not brought back: {self._given_up}")

    def counts(self) -> Counts | None:
        """Return the losses so far; None while the server cannot be asked."""
        num_servers = self.num_restarts
        samples = self.samples()
        return Counts(num_servers, int(samples[RESTARTS])) if RESTARTS in samples else None

    def samples(self) -> dict[str, float]:
        """Read the metrics page, see `samples_of`; empty while there is none."""
        try:
            return samples_of(read_page(self.server.metrics_url))
        except httpx.HTTPError:
            return {}

    def is_loaded(self, model: str) -> bool:
        """Return whether Triton reports a model as ready."""
        url = f"http://{self.server.http_url}/v2/models/{model}/ready"
        try:
            return httpx.get(url, timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def engine_arguments(self) -> dict[str, Any]:
        """Read the arguments of the engine from model.json."""
        text = (self.server.repository / "engine" / "1" / "model.json").read_text(encoding="utf-8")
        arguments: dict[str, Any] = json.loads(text)
        return arguments

    def start_reload(self, arguments: Mapping[str, Any]) -> subprocess.Popen[str]:
        """Run `charonia reload` with other arguments of the engine."""
        sets = [f"--set={name}={json.dumps(value)}" for name, value in arguments.items()]
        place = f"--runtime-dir={self.server.runtime_dir}"
        return subprocess.Popen(
            [sys.executable, "-m", "charonia.launch.commands.cli", "reload", place, *sets],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ensure(self, arguments: Mapping[str, Any]) -> None:
        """Reload the engine unless it has these arguments.

        Raises:
            TargetError: it did not come to that.
        """
        current = self.engine_arguments()
        if all(current.get(name) == value for name, value in arguments.items()):
            return
        with self.start_reload(arguments) as reload:
            try:
                said, _ = reload.communicate(timeout=RELOAD_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                reload.kill()
                raise TargetError("`charonia reload` does not end") from None
        if reload.returncode:
            raise TargetError(f"`charonia reload` failed: {said.strip()}")

    @contextlib.contextmanager
    def supervised(self) -> Iterator[None]:
        """Have it serve meanwhile.

        Raises:
            TargetError: it does not.
        """
        self._thread.start()
        try:
            if not self._is_serving.wait(START_TIMEOUT_S):
                self.check()
                raise TargetError(f"the server does not serve within {START_TIMEOUT_S:g} s")
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def _supervise(self) -> None:
        try:
            self._supervisor.run()
        except LaunchError as error:
            self._given_up = error

    def _note_serving(self) -> None:
        self._num_served += 1
        self._is_serving.set()


@contextlib.contextmanager
def serving_target(
    options: RepositoryOptions, log: Callable[[str], None], step_deadline_s: float
) -> Iterator[Target]:
    """A server that serves, looked after as by `charonia serve`.

    Args:
        log: gets the lines of the server and of the launcher.
        step_deadline_s: the scheduler's `min_step_deadline_s`.

    Raises:
        TargetError, LaunchError, ConfigError, CheckpointError: it cannot be started.
    """
    limits = SupervisionLimits(
        hang_s=step_deadline_s + HANG_MARGIN_S,
        stable_s=0.0,  # it is broken on purpose, however often
        drain_s=1.0,  # a fault is mended once no process from before it is left
    )
    with prepared_server(options, on_log=log) as (server, prepared):
        make_supervisor = partial(
            Supervisor,
            server,
            log=log,
            scheduler=prepared.scheduler,
            engine=prepared.scheduler_args.engine_model,
            limits=limits,
        )
        target = Target(server, make_supervisor)
        with target.supervised():
            yield target
