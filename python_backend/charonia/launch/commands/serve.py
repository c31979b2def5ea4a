"""`charonia serve`: a supervised server in the foreground of a terminal or a container.

Owns signals, what is printed, and the order of things. Must not know how any of them is done.
"""

import contextlib
import re
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from charonia.config import SchedulerArgs
from charonia.events import Level
from charonia.launch.commands.drain import LEFT_FILE, finish_requests, note_left
from charonia.launch.commands.log_printer import Format, LogPrinter
from charonia.launch.server import processes
from charonia.launch.server.gateway_process import GatewayProcess
from charonia.launch.server.logs import is_interesting
from charonia.launch.server.repository import PreparedRepository, RepositoryOptions
from charonia.launch.server.run import prepared_server
from charonia.launch.server.runtime_dir import KEY_FILE, LOG_LEVEL_FILE, sweep_stale_runs
from charonia.launch.server.trace_options import trace_options
from charonia.launch.server.tritonserver import DEFAULT_ADDRESS, TritonServer
from charonia.log_level import DEFAULT, LevelFile, write_level
from charonia.serving.messages.reload import RELOAD_SOCKET
from charonia.supervision.server.judge import SupervisionLimits
from charonia.supervision.server.supervisor import Supervisor

ENDED_BY_SIGNAL = (signal.SIGINT, signal.SIGTERM)
HANG_MARGIN_S = 15.0
_REQUEST_LINE = re.compile("charonia: request (?!level=)")
"""Lines of a gateway's requests at level info: too many for a terminal."""
DRAIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `charonia serve`: addresses, and whether to show all of Triton's log.

    Attributes:
        tritonserver: options that are handed to it, `--name=value` each.
        drain_s: seconds in which requests may finish after SIGTERM; 0 ends them at once.
        gateway_port: port of a gateway beside the server; None is without one, 0 takes a free port.
        chat_template: for that, a file that counts instead of the checkpoint's own template.
        api_key_file: for that, the API keys of those who may call; None lets everybody call.
        log_format: format of the lines on stderr. log_level: their level, until an operator changes
            it.
        otlp_traces_endpoint: OTLP/HTTP collector of the traces of requests; None sends none.
        trace_rate: one in so many requests is traced, beside those whose client traces them; 0 is
            none.
    """

    address: str = DEFAULT_ADDRESS
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    is_verbose: bool = False
    tritonserver: Sequence[str] = ()
    drain_s: float = DRAIN_S
    gateway_port: int | None = None
    chat_template: Path | None = None
    api_key_file: Path | None = None
    log_format: Format = "text"
    log_level: Level = DEFAULT
    otlp_traces_endpoint: str | None = None
    trace_rate: int = 1

    @property
    def ports(self) -> dict[str, int]:
        """The ports by what they are for; 0 is a free one."""
        return {
            "HTTP": self.http_port,
            "gRPC": self.grpc_port,
            "metrics": self.metrics_port,
            "the gateway": self.gateway_port or 0,
        }


def serve(what: RepositoryOptions, options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM; everything is stopped and removed then.

    After SIGTERM no more requests are taken, and those that are there are finished, within a limit;
    SIGINT ends that, and another SIGTERM does not.

    Raises:
        LaunchError, ConfigError, CheckpointError: it cannot be started, or does not stay up.
    """
    processes.check_distinct(options.ports)
    begin_drain = threading.Event()
    printer = LogPrinter(options.log_format, level=lambda: options.log_level)
    say = printer.say
    further_options = options.tritonserver
    if (endpoint := options.otlp_traces_endpoint) is not None:
        further_options = trace_options(endpoint, options.trace_rate, further_options)
        own = f"scheduler.otlp_traces_endpoint={endpoint}"
        what = replace(what, settings=[own, *what.settings])  # --set counts
    with stop_on_signals(begin_drain if options.drain_s else None) as stop:

        def on_log(line: str) -> None:
            if options.is_verbose or printer.shows("debug") or is_interesting(line):
                printer.line(line)

        with prepared_server(
            what,
            address=options.address,
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            metrics_port=options.metrics_port,
            further_options=further_options,
            on_log=on_log,
        ) as (server, prepared):
            (server.runtime_dir / LEFT_FILE).touch()
            write_level(server.runtime_dir / LOG_LEVEL_FILE, options.log_level)
            printer.level = LevelFile(server.runtime_dir / LOG_LEVEL_FILE).read
            for path in sweep_stale_runs():
                say(f"removed what a killed run left in {path}")
            say(server.stack_limit.describe())
            say(server.guard.describe())
            say(f"starting tritonserver with {prepared.engine_args.model}")
            gateway = _gateway(what, options, server, prepared, printer)
            supervisor = Supervisor(
                server,
                stop=stop,
                log=say,
                on_serving=lambda: _announce(
                    server, prepared.scheduler, supervisor.num_restarts, gateway, say
                ),
                scheduler=prepared.scheduler,
                engine=prepared.scheduler_args.engine_model,
                limits=supervision_limits(prepared.scheduler_args),
            )
            socket = prepared.path / prepared.scheduler / "1" / RELOAD_SOCKET
            note = partial(note_left, server.runtime_dir, say)
            on_drain = (lambda: None) if gateway is None else gateway.drain
            with (
                gateway or contextlib.nullcontext(),
                _draining(socket, options.drain_s, begin_drain, stop, note, on_drain, say),
            ):
                supervisor.run()
            say("stopped")


@contextlib.contextmanager
def _draining(
    socket: Path,
    limit_s: float,
    begin: threading.Event,
    stop: threading.Event,
    note: Callable[[int], None],
    on_drain: Callable[[], None],
    say: Callable[[str], None],
) -> Iterator[None]:
    """Have the scheduler finish its requests once `begin` is set, and then set `stop`.

    Args:
        socket, limit_s, note: as for `finish_requests`. on_drain: called before. say: takes what to
            tell the user.
    """

    def wait_and_drain() -> None:
        begin.wait()
        if not stop.is_set():
            on_drain()
            num_left = finish_requests(socket, limit_s, stop, note)
            if num_left is None:
                say("the scheduler does not say what is left, which ends now")
            elif num_left:
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


def _gateway(
    what: RepositoryOptions,
    options: ServeOptions,
    server: TritonServer,
    prepared: PreparedRepository,
    printer: LogPrinter,
) -> GatewayProcess | None:
    """The gateway that was asked for, which is not started yet. Raises as that."""
    if options.gateway_port is None:
        return None

    is_wanted = options.is_verbose or options.log_format == "json"

    def on_log(line: str) -> None:
        if is_wanted or printer.shows("debug") or not _REQUEST_LINE.match(line):
            printer.line(line if line.startswith("charonia: ") else f"charonia: {line}")

    return GatewayProcess(
        server.grpc_url,
        prepared.engine_args.tokenizer_dir,
        what.served_model_names or [Path(prepared.engine_args.model).name],
        address=options.address,
        port=options.gateway_port,
        drain_s=options.drain_s,
        chat_template=options.chat_template,
        api_key_file=options.api_key_file,
        log_level_file=server.runtime_dir / LOG_LEVEL_FILE,
        otlp_traces_endpoint=options.otlp_traces_endpoint,
        trace_rate=options.trace_rate,
        log=on_log,
    )


def supervision_limits(args: SchedulerArgs) -> SupervisionLimits:
    """Timeouts that outlast the scheduler's with its engine, or both would act at once."""
    return SupervisionLimits(
        start_s=max(SupervisionLimits.start_s, args.load_timeout_s + HANG_MARGIN_S),
        hang_s=args.min_step_deadline_s + HANG_MARGIN_S,
        reload_s=args.load_timeout_s + HANG_MARGIN_S,
    )


@contextlib.contextmanager
def stop_on_signals(begin_drain: threading.Event | None = None) -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, instead of what they did before.

    Args:
        begin_drain: is set by SIGTERM instead, however often that comes: two who ask for a drain,
            or one who tries again, are in no hurry.
    """
    stop = threading.Event()
    # The thread that a handler interrupts may hold an event's lock: it must not set one itself.
    came: SimpleQueue[int | None] = SimpleQueue()  # whose put() may interrupt itself

    def follow() -> None:
        while (signum := came.get()) is not None:
            if signum == signal.SIGTERM and begin_drain is not None:
                begin_drain.set()
            else:
                stop.set()

    thread = threading.Thread(target=follow, name="charonia-signals", daemon=True)
    thread.start()
    before = {
        signum: signal.signal(signum, lambda signum, _: came.put(signum))
        for signum in ENDED_BY_SIGNAL
    }
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        came.put(None)
        thread.join()


def say(text: str) -> None:
    """Print one line of the launcher's own, as text."""
    LogPrinter("text").say(text)


def _announce(
    server: TritonServer,
    scheduler: str,
    num_restarts: int,
    gateway: GatewayProcess | None,
    say: Callable[[str], None],
) -> None:
    if num_restarts:
        say(f"serving again, after {num_restarts} restart{'s' if num_restarts > 1 else ''}")
        return
    say("serving")
    rows = [
        ("gRPC", server.grpc_url),
        ("HTTP", f"http://{server.http_url}"),
        ("metrics", server.metrics_url),
        ("key", str(server.runtime_dir / KEY_FILE)),
    ]
    if gateway is None:
        body = (
            '{"text_input": "def add(a, b):", "max_tokens": 32, "temperature": 0, "stream": true}'
        )
        url = f"http://{server.http_url}/v2/models/{scheduler}/generate_stream"
        curl = f"curl -N {url} -d {shlex.quote(body)}"
    else:
        rows = [("page", f"{gateway.url}/"), ("OpenAI", f"{gateway.url}/v1"), *rows]
        body = '{"prompt": "def add(a, b):", "max_tokens": 32, "temperature": 0, "stream": true}'
        url, kind = f"{gateway.url}/v1/completions", "content-type: application/json"
        key = '-H "authorization: Bearer $API_KEY" ' if gateway.needs_key else ""
        curl = f"curl -N {url} {key}-H {shlex.quote(kind)} -d {shlex.quote(body)}"
    shown = "\n".join(f"  {name:<7}  {value}" for name, value in rows)
    print(f"{shown}\n\n  {curl}\n", flush=True)
