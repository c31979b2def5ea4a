"""`charonia serve`: a supervised server in the foreground of a terminal or a container.

Owns signals, what is printed, and the order of things. Must not know how any of them is done.
"""

import contextlib
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from charonia.config import SchedulerArgs
from charonia.launch.drain import finish_requests, show_left
from charonia.launch.logs import is_interesting
from charonia.launch.patience import SupervisionLimits
from charonia.launch.repository import RepositoryOptions
from charonia.launch.run import prepared_server
from charonia.launch.runtime_dir import KEY_FILE, sweep_stale_runs
from charonia.launch.server import DEFAULT_ADDRESS, TritonServer
from charonia.launch.supervisor import Supervisor
from charonia.serving.reload import RELOAD_SOCKET

ENDED_BY_SIGNAL = (signal.SIGINT, signal.SIGTERM)
HANG_MARGIN_S = 15.0
DRAIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where to listen, and whether to show all of Triton's log.

    Attributes:
        tritonserver: options that are handed to it, `--name=value` each.
        drain_s: how long requests may take to finish after SIGTERM.
    """

    address: str = DEFAULT_ADDRESS
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    is_verbose: bool = False
    tritonserver: Sequence[str] = ()
    drain_s: float = DRAIN_S


def serve(what: RepositoryOptions, options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM; everything is stopped and removed then.

    After SIGTERM no more requests are taken, and those that are there are finished, within a limit;
    another signal ends that.

    Raises:
        LaunchError, ConfigError, CheckpointError: it cannot be started, or does not stay up.
    """
    begin_drain = threading.Event()
    with stop_on_signals(begin_drain if options.drain_s else None) as stop:

        def on_log(line: str) -> None:
            if options.is_verbose or is_interesting(line):
                print(line, file=sys.stderr, flush=True)

        with prepared_server(
            what,
            address=options.address,
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            metrics_port=options.metrics_port,
            further_options=options.tritonserver,
            on_log=on_log,
        ) as (server, prepared):
            for path in sweep_stale_runs():
                say(f"removed what a killed run left in {path}")
            say(server.stack_limit.describe())
            say(server.guard.describe())
            say(f"starting tritonserver with {prepared.engine_args.model}")
            supervisor = Supervisor(
                server,
                stop=stop,
                log=say,
                on_serving=lambda: _announce(server, prepared.scheduler, supervisor.num_restarts),
                scheduler=prepared.scheduler,
                engine=prepared.scheduler_args.engine_model,
                limits=supervision_limits(prepared.scheduler_args),
            )
            socket = prepared.path / prepared.scheduler / "1" / RELOAD_SOCKET
            with _draining(socket, options.drain_s, begin_drain, stop):
                supervisor.run()
            say("stopped")


@contextlib.contextmanager
def _draining(
    socket: Path, limit_s: float, begin: threading.Event, stop: threading.Event
) -> Iterator[None]:
    """Once `begin` is set, have the scheduler finish its requests, and set `stop` then."""

    def wait_and_drain() -> None:
        begin.wait()
        if not stop.is_set():
            num_left = finish_requests(socket, limit_s, stop, show_left)
            if num_left:
                say(f"{num_left} are not finished, and end now")
        stop.set()

    thread = threading.Thread(target=wait_and_drain, name="charonia-drain", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        begin.set()
        thread.join()


def supervision_limits(args: SchedulerArgs) -> SupervisionLimits:
    """Patience that outlasts the scheduler's with its engine, or both would act at once."""
    return SupervisionLimits(
        start_s=max(SupervisionLimits.start_s, args.load_timeout_s + HANG_MARGIN_S),
        hang_s=args.min_step_deadline_s + HANG_MARGIN_S,
        reload_s=args.load_timeout_s + HANG_MARGIN_S,
    )


@contextlib.contextmanager
def stop_on_signals(begin_drain: threading.Event | None = None) -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, instead of what they did before.

    Args:
        begin_drain: is set instead by the first signal, if that is SIGTERM.
    """
    stop = threading.Event()

    def request_stop(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGTERM and begin_drain is not None and not begin_drain.is_set():
            begin_drain.set()
        else:
            stop.set()

    before = {signum: signal.signal(signum, request_stop) for signum in ENDED_BY_SIGNAL}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def say(text: str) -> None:
    """Print one line of the launcher's own."""
    print(f"charonia: {text}", file=sys.stderr, flush=True)


def _announce(server: TritonServer, scheduler: str, num_restarts: int) -> None:
    if num_restarts:
        say(f"serving again, after {num_restarts} restart{'s' if num_restarts > 1 else ''}")
        return
    body = '{"text_input": "def add(a, b):", "max_tokens": 32, "temperature": 0, "stream": true}'
    url = f"http://{server.http_url}/v2/models/{scheduler}/generate_stream"
    say("serving")
    print(
        f"  gRPC     {server.grpc_url}\n"
        f"  HTTP     http://{server.http_url}\n"
        f"  metrics  {server.metrics_url}\n"
        f"  key      {server.runtime_dir / KEY_FILE}\n\n"
        f"  curl -N {url} -d {shlex.quote(body)}\n",
        flush=True,
    )
