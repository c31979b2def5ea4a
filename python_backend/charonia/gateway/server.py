"""The gateway's process: listens, serves, drains and ends.

Owns signals and draining. Must not know routes.

::

    SIGTERM ─► not ready, new requests get 503 ─► nothing runs, or drain_timeout_s is over
               ─► what still runs ends with an error ─► the port is closed
    SIGINT ──► the same, without waiting
"""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from charonia.errors import CheckpointError, ConfigError
from charonia.events import Log, error_event, event, warning_event
from charonia.gateway.app import make_app
from charonia.gateway.connections import IDLE_S, bounded
from charonia.gateway.keys import Keys
from charonia.gateway.observing import Metrics
from charonia.gateway.prompts import Prompts, Template
from charonia.gateway.serving import Serving
from charonia.gateway.settings import GatewaySettings
from charonia.gateway.upstream import Upstream
from charonia.gateway.watching import Watch
from charonia.text.chat_template import ChatTemplate
from charonia.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from charonia.gateway.spans import Spans

_POLL_S = 0.05
_CLOSE_S = 5
_BACKLOG = 2048


def run_gateway(settings: GatewaySettings, log: Log) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        log: takes the lines.

    Raises:
        CheckpointError: a tokenizer cannot be read. ConfigError: the API keys cannot be read, the
            port is taken, the address does not belong to this machine, or traces cannot be sent.
    """
    logging.basicConfig(handlers=[_Complaints(log)], force=True)
    keys = None if settings.api_key_file is None else Keys.from_file(settings.api_key_file)
    prompts = _prompts(settings.tokenizer, settings.chat_template, settings.num_threads, log)
    of_fallback = None
    if settings.fallback is not None:
        of_fallback = _prompts(settings.fallback.tokenizer, None, settings.num_threads, log)
    listener = _listen(settings.host, settings.port)
    try:
        asyncio.run(_serve(settings, keys, prompts, of_fallback, listener, log))
    finally:
        listener.close()


async def _serve(
    settings: GatewaySettings,
    keys: Keys | None,
    prompts: Prompts,
    of_fallback: Prompts | None,
    listener: socket.socket,
    log: Log,
) -> None:
    metrics = Metrics()
    spans = _spans(settings, log)
    serving = _serving(settings, prompts, of_fallback, metrics)
    watch = Watch(
        max_body_bytes=settings.max_body_bytes,
        max_held_bytes=settings.max_held_bytes,
        read_timeout_s=settings.read_timeout_s,
        stall_timeout_s=settings.stall_timeout_s,
        max_requests=settings.max_requests,
        log=log,
    )
    config = uvicorn.Config(
        make_app(serving, watch, metrics, log, keys, None if spans is None else spans.begin),
        http=bounded(settings.stall_timeout_s),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=_CLOSE_S,
    )
    server = _Server(config, watch, settings.drain_timeout_s, log)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log(event("gateway_serving", url=f"http://{shown}:{port}", servers=" ".join(settings.servers)))
    try:
        await server.serve([listener])
    finally:
        await serving.close()
        if spans is not None:
            await asyncio.to_thread(spans.close)
    log(event("gateway_stopped"))


class _Complaints(logging.Handler):
    """Puts what libraries complain of into the log, in its form."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        make = error_event if record.levelno >= logging.ERROR else warning_event
        lines = (
            None if not record.exc_info else logging.Formatter().formatException(record.exc_info)
        )
        said = record.getMessage()
        self._log(make("library_complains", library=record.name, reason=said, traceback=lines))


class _Server(uvicorn.Server):
    """Uvicorn's server, which keeps listening while it drains."""

    def __init__(
        self, config: uvicorn.Config, watch: Watch, drain_s: float, log: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._watch = watch
        self._drain_s = drain_s
        self._log = log
        self._drain_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. A second one does not wait."""
        is_hasty = sig == signal.SIGINT or self._drain_until is not None
        self._drain_until = time.monotonic() + (0.0 if is_hasty else self._drain_s)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second. Returns whether to stop."""
        if self._drain_until is None:
            return await super().on_tick(counter)
        if not self._watch.is_draining:
            self._watch.is_draining = True
            self._log(event("gateway_draining", requests=self._watch.num_requests))
        if self._watch.num_requests and time.monotonic() < self._drain_until:
            return False
        if num_left := self._watch.num_requests:
            self._log(warning_event("gateway_ends_requests", requests=num_left))
        self._watch.closing.set()
        close_until = time.monotonic() + _CLOSE_S
        while self._watch.num_requests and time.monotonic() < close_until:
            await asyncio.sleep(_POLL_S)
        return True


def _serving(
    settings: GatewaySettings, prompts: Prompts, of_fallback: Prompts | None, metrics: Metrics
) -> Serving:
    def upstream_of(urls: Sequence[str], *, has_fallback: bool = False) -> Upstream:
        for url in urls:
            metrics.retries.labels(url)  # shown from the start
        return Upstream(
            urls,
            settings.scheduler_model,
            has_fallback=has_fallback,
            on_retry=lambda url: metrics.retries.labels(url).inc(),
        )

    fallback = None
    if settings.fallback is not None:
        assert of_fallback is not None
        fallback = Serving(
            settings,
            of_fallback,
            upstream_of(settings.fallback.servers),
            answers_as=settings.fallback.model_name,
        )
    own = upstream_of(settings.servers, has_fallback=fallback is not None)
    return Serving(settings, prompts, own, fallback=fallback)


def _spans(settings: GatewaySettings, log: Callable[[str], None]) -> "Spans | None":
    """Make the tracer of requests; None if nobody wants traces.

    Raises:
        ConfigError: the collector's endpoint is wrong, or a package is missing.
    """
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        from charonia.gateway.spans import Spans
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs {error.name}: pip install 'charonia[tracing]'"
        ) from None
    return Spans(settings.otlp_traces_endpoint, settings.trace_rate, log=log)


def _prompts(
    checkpoint: Path, template: Path | None, num_threads: int, log: Callable[[str], None]
) -> Prompts:
    try:
        tokenizer = Tokenizer.from_dir(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint}: {error}") from None
    return Prompts(tokenizer, _template(checkpoint, template, log), num_threads)


def _template(checkpoint: Path, path: Path | None, log: Callable[[str], None]) -> Template | str:
    """Return the chat template, or the reason why there is none: completions work without one."""
    try:
        return ChatTemplate.from_checkpoint(checkpoint, path)
    except CheckpointError as error:
        log(warning_event("gateway_without_chats", reason=str(error)))
        return str(error)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"{host}:{port} is no address: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{host}:{port} cannot be listened on: {error.strerror}") from None
    return listener
