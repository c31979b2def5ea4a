"""The scheduler model: takes requests, runs the engine service, and sends responses.

Owns the wiring of the scheduler's process. Must not know torch, nor scheduling.
"""

import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from charonia.config import PATH_PARAMETERS, EngineArgs, SchedulerArgs
from charonia.core.recording.kv_events import KVEventPublisher, KVEvents
from charonia.core.replica.reload import Reload
from charonia.core.request_log import RequestLog
from charonia.core.service import EngineService
from charonia.embedding import PromptIndex, load_encoder
from charonia.errors import ConfigError
from charonia.events import Log
from charonia.metrics.page_socket import METRICS_SOCKET, serve_metrics
from charonia.metrics.triton_page import MetricsExporter
from charonia.server_options import ServerOptions
from charonia.serving.hosts.engine import MODEL_FILE
from charonia.serving.messages.executor import SocketExecutor
from charonia.serving.messages.handover import HANDOVER_SOCKET, Handover
from charonia.serving.messages.relay import REQUESTS_SOCKET
from charonia.serving.messages.relay_server import RelayServer
from charonia.serving.messages.reload import (
    RELOAD_SOCKET,
    ReloadServer,
    check_same_kv_events,
    check_same_tokenizer,
    fingerprint_tokenizer,
)
from charonia.serving.requests.intake import Intake
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.serving.requests.raw_request import RawRequest
from charonia.serving.requests.request_key import Sealer
from charonia.serving.requests.responders import Responder, TritonResponder
from charonia.serving.requests.sessions import Sessions
from charonia.serving.requests.tensors import read_request
from charonia.serving.requests.tokenizing import Tokenizing
from charonia.supervision.models.model_control import GrpcControl
from charonia.supervision.models.probes import Readiness
from charonia.text.draft import check_draft_tokenizer
from charonia.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from charonia.tracing import exporter

START_DELAY_S = 3.0
FIRST_CONNECT_S = 2.0
TAKE_OVER_S = 5.0


def own_parameters(model_config: str) -> dict[str, str]:
    """The `parameters` of a model's config.pbtxt."""
    parameters: Mapping[str, Any] = json.loads(model_config).get("parameters", {})
    return {name: value["string_value"] for name, value in parameters.items()}


@dataclass(frozen=True)
class _Relayed:
    """Handles the messages of proxies, as `RelayEvents`."""

    intake: Intake
    sessions: Sessions
    executor: SocketExecutor

    def on_request(self, key: str, raw: RawRequest, responder: Responder) -> None:
        self.intake.take(lambda: raw, responder, key)

    def on_cancelled(self, key: str) -> None:
        self.sessions.client_left(key)

    def on_acknowledged(self, key: str, number: int) -> None:
        self.sessions.acknowledge(key, number)

    def on_server_stopping(self) -> None:
        self.executor.note_server_stopping()


@dataclass(frozen=True)
class _Reloadable:
    """Carries out the operator's orders, as `Reloadable`."""

    service: EngineService
    sessions: Sessions

    def reload(self, reload: Reload) -> None:
        self.service.reload(reload)

    def drain(self) -> int:
        """Stop taking requests; return how many have not got their last response."""
        return max(self.service.drain(), self.sessions.num_live)


class SchedulerHost:
    """The scheduler behind Triton.

    A BLS call from a thread while `initialize` returns can crash the whole server, and the
    service's thread makes such calls. So the service starts with the first request, which shows
    that the model is loaded, or after `START_DELAY_S`. An older scheduler, which this one replaces,
    ends its work then, see `handover`.

    Args:
        args: the argument of Triton's `initialize`. log: takes one line, from any thread.

    Raises:
        ConfigError, CheckpointError: a parameter, model.json, the tokenizer or the tenants' file is
            wrong, a socket cannot be made in the model's directory, or the KV events' endpoint
            cannot be bound.
    """

    def __init__(self, pb_utils: Any, args: Mapping[str, str], *, log: Log) -> None:
        self._pb_utils = pb_utils
        self._log = log
        scheduler_args = SchedulerArgs.from_parameters(own_parameters(args["model_config"]))
        for name in PATH_PARAMETERS:
            if (path := getattr(scheduler_args, name)) is not None:
                path = str(Path(args["model_repository"]) / path)
                scheduler_args = msgspec.structs.replace(scheduler_args, **{name: path})
        repository = Path(args["model_repository"]).parent
        engine_dir = repository / scheduler_args.engine_model / "1"
        model_file = engine_dir / MODEL_FILE
        engine_args = EngineArgs.from_file(model_file)
        scheduler_args.check_engine(engine_args)
        self._tokenizer = Tokenizer.from_dir(engine_args.tokenizer_dir)
        server_options = ServerOptions.of_process(os.getppid())
        if scheduler_args.tenant_header is not None:
            server_options.check_forwarded(scheduler_args.tenant_header)
        if engine_args.speculative_config and engine_args.speculative_config.model:
            check_draft_tokenizer(self._tokenizer, Path(engine_args.speculative_config.model))
        self._executor = SocketExecutor(
            Readiness(pb_utils, scheduler_args.engine_model),
            engine_dir,
            GrpcControl(server_options),
            has_requests=lambda: self._sessions.has_polled,
            log=log,
        )
        request_log = RequestLog(
            log,
            max_prompt=scheduler_args.max_log_len if scheduler_args.log_prompts else 0,
            decode=partial(self._tokenizer.decode, skip_special_tokens=False),
        )
        self._publisher: KVEventPublisher | None = None
        if (config := engine_args.kv_events) is not None:
            self._publisher = KVEventPublisher(config, args["model_name"], log=log)
        self._service = EngineService(
            self._executor,
            engine_args,
            scheduler_args,
            self._tokenizer,
            log=log,
            read_args=partial(
                _read_args,
                model_file,
                scheduler_args,
                engine_args,
                fingerprint_tokenizer(engine_args),
            ),
            kv_events=None if self._publisher is None else KVEvents(self._publisher.publish),
            prompt_index=_prompt_index(scheduler_args),
            request_log=request_log,
        )
        self._tokenizing = Tokenizing(
            scheduler_args.num_tokenizer_threads,
            QueueLimit(scheduler_args.max_queue_size, scheduler_args.max_queue_bytes),
            log=log,
        )
        most_requests = scheduler_args.max_queue_size + engine_args.most_rows
        self._sessions = Sessions(
            self._tokenizer,
            scheduler_args.num_sender_threads,
            QueueLimit(2 * most_requests, scheduler_args.max_queue_bytes),
            log=log,
            stream_interval=scheduler_args.stream_interval,
        )
        self._tracer = _request_tracer(scheduler_args, log)
        self._intake = Intake(
            self._service,
            self._sessions,
            self._tokenizer,
            self._tokenizing,
            Sealer.from_dir(engine_dir),
            is_forwarded=server_options.forwards,
            tenant_header=scheduler_args.tenant_header,
            request_log=request_log,
            begin_trace=_no_trace if self._tracer is None else self._tracer.begin,
            log=log,
        )
        own_dir = Path(args["model_repository"]) / "1"
        with _needing_a_socket(REQUESTS_SOCKET):
            self._relay = RelayServer(
                own_dir / REQUESTS_SOCKET,
                _Relayed(self._intake, self._sessions, self._executor),
                self._sessions,
                log=log,
            )
        with _needing_a_socket(RELOAD_SOCKET):
            self._reload_server = ReloadServer(
                own_dir / RELOAD_SOCKET,
                model_file,
                _Reloadable(self._service, self._sessions),
                refusal=self._executor.refusal,
                log=log,
            )
        self._exporter = MetricsExporter(
            pb_utils,
            self._service.metrics,
            labels={"model": args["model_name"], "version": args["model_version"]},
            block_size=lambda: self._service.engine_args.block_size,
            oldest_s=self._service.oldest_s,
            with_vllm_names=scheduler_args.report_custom_metrics,
            log=log,
        )
        with _needing_a_socket(METRICS_SOCKET):
            self._metrics_server = serve_metrics(
                own_dir / METRICS_SOCKET, self._exporter.read, log=log
            )
        self._start_lock = threading.Lock()
        self._is_stopped = False
        # The engine is loaded by then; waiting for it avoids refusing the first request.
        start_service = partial(self._service.start, wait_s=FIRST_CONNECT_S)
        self._starts: deque[Callable[[], None]] = deque(
            (
                self._take_over,
                self._start_publisher,
                start_service,
                self._relay.start,
                self._exporter.start,
            )
        )
        self._timer = threading.Timer(START_DELAY_S, self._start)
        self._timer.daemon = True
        with _needing_a_socket(HANDOVER_SOCKET):
            self._handover = Handover(own_dir / HANDOVER_SOCKET, self._stop, log=log)
        if self._publisher is not None and not self._handover.has_older:
            self._publisher.bind()  # an older scheduler holds the endpoint until it ends
        self._timer.start()

    def execute(self, requests: list[Any]) -> None:
        """Take requests; everything else happens in other threads."""
        self._start()
        for request in requests:
            responder = TritonResponder(self._pb_utils, request.get_response_sender())
            self._intake.take(partial(read_request, request), responder)

    def finalize(self) -> None:
        """End the live requests with an error, and stop."""
        self._stop()
        self._handover.close()

    def _stop(self) -> None:
        """End the live requests and stop serving. A second call waits for the first."""
        self._timer.cancel()
        with self._start_lock:
            if self._is_stopped:
                return
            self._take_over()  # a newer scheduler does not know older ones than this
            self._starts.clear()
            self._is_stopped = True
            self._reload_server.close()
            self._tokenizing.close()
            self._service.close()
            if self._publisher is not None:
                self._publisher.close()
            self._sessions.close()
            self._relay.close()
            self._metrics_server.close()
            self._exporter.close()
            if self._tracer is not None:
                self._tracer.close()

    def _take_over(self) -> None:
        if not self._handover.take_over(TAKE_OVER_S):
            self._log(f"warning: an older scheduler does not end within {TAKE_OVER_S:g} s")

    def _start(self) -> None:
        """Start what is not started yet. After an error the next call goes on from there."""
        with self._start_lock:
            while self._starts:
                self._starts[0]()
                self._starts.popleft()

    def _start_publisher(self) -> None:
        if self._publisher is not None:
            try:
                self._publisher.start()
            except ConfigError as error:  # an older scheduler still holds the endpoint
                self._log(f"warning: {error}; nobody is told what the prefix cache holds")


def _prompt_index(args: SchedulerArgs) -> PromptIndex | None:
    """The index of similar prompts; None if the semantic cache is off.

    Raises:
        ConfigError, CheckpointError: the embedding model, or a package, is missing or wrong.
    """
    if args.semantic_cache_threshold is None:
        return None
    return PromptIndex(load_encoder(args.semantic_cache_model))


def _request_tracer(
    args: SchedulerArgs, log: Callable[[str], None]
) -> "exporter.RequestTracer | None":
    """Make the exporter of traces; None if they are not wanted.

    Raises:
        ConfigError: the endpoint is wrong, or a package is missing.
    """
    if args.otlp_traces_endpoint is None:
        return None
    try:
        from charonia.tracing.exporter import RequestTracer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs {error.name}: pip install 'charonia[tracing]'"
        ) from None
    return RequestTracer(args.otlp_traces_endpoint, log=log)


def _no_trace(traceparent: str | None, arrived_at: float) -> None:
    return None


@contextlib.contextmanager
def _needing_a_socket(name: str) -> Iterator[None]:
    """Raises ConfigError if the socket of this name cannot be made."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the scheduler's directory must take a socket, {name}: {error.strerror}"
        ) from None


def _read_args(
    model_file: Path, scheduler_args: SchedulerArgs, before: EngineArgs, tokenizer: str
) -> EngineArgs:
    """The present arguments in model.json, which a load of the engine may have changed.

    Raises:
        ConfigError: it is wrong, does not fit the scheduler's parameters, or has another tokenizer
            or `kv_events_config` than at the server's start.
    """
    args = EngineArgs.from_file(model_file)
    scheduler_args.check_engine(args)
    check_same_tokenizer(tokenizer, args)
    check_same_kv_events(before, args)
    return args
