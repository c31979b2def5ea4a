"""`charonia health`: asks a running server whether it serves, part by part.

Owns which parts there are, what counts as healthy, and what is printed. Must not know how a server
is started or mended.

Triton's own word is not enough: it calls itself and a model ready when the model's process is dead.
So the scheduler is asked whether steps run, and the other ways in for an answer.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx

from charonia.errors import LaunchError
from charonia.local_calls import http_client
from charonia.metrics.snapshot import read_metrics
from charonia.supervision.server.probes import Health, Probe, Reply, probe_endpoint

DEFAULT_METRICS_PORT = 8002
TIMEOUT_S = 5.0
RETRY_S = 0.5
ENDPOINTS = ("llm", "generate")
"""The ways in beside the scheduler's own; between them they need every other model."""
SHOWN_METRICS = (
    "charonia_engine_up",
    "charonia_requests_running",
    "charonia_requests_waiting",
    "charonia_engine_restarts_total",
)


@dataclass(frozen=True)
class Part:
    """One part of the server. `detail` says what is wrong with it, or what may be of interest."""

    name: str
    is_healthy: bool
    detail: str = ""


def health(
    url: str,
    metrics_url: str | None,
    scheduler: str,
    *,
    wait_s: float,
    as_json: bool,
    say: Callable[[str], None] = print,
) -> None:
    """Say how a server is, one line per part, or with `as_json` one JSON object.

    Args:
        url: `host:port` of its HTTP endpoint. metrics_url: the same of its metrics; None is port
            8002 of the same host. scheduler: name of that model.
        wait_s: ask again for so long, until it is healthy.

    Raises:
        LaunchError: it is not healthy.
    """
    deadline = time.monotonic() + wait_s
    while True:
        parts = list(examine(url, metrics_url or _metrics_url(url), scheduler))
        is_healthy = all(part.is_healthy for part in parts)
        if is_healthy or time.monotonic() + RETRY_S > deadline:
            break
        time.sleep(RETRY_S)
    if as_json:
        found = {"healthy": is_healthy, "parts": [dataclasses.asdict(part) for part in parts]}
        say(json.dumps(found))
    else:
        for part in parts:
            line = f"{part.name:<10} {'ok' if part.is_healthy else 'FAILED':<7} {part.detail}"
            say(line.rstrip())
    if not is_healthy:
        failed = ", ".join(part.name for part in parts if not part.is_healthy)
        raise LaunchError(f"not healthy: {failed}")


def examine(url: str, metrics_url: str, scheduler: str) -> Iterator[Part]:
    """Ask after every part."""
    with http_client(base_url=f"http://{url}/v2/", timeout_s=TIMEOUT_S) as client:
        yield _ask_ready(client, "server", "health/ready")
        names = dict.fromkeys(ENDPOINTS)
        if (behind := _named_by(client, scheduler, "scheduler_model")) is not None:
            names[scheduler] = None  # it only passes on
            scheduler = behind
        engine = _named_by(client, scheduler, "engine_model") or "engine"
        yield _ask_ready(client, "scheduler", f"models/{scheduler}/ready")
        yield _ask_ready(client, "engine", f"models/{engine}/ready")
    with contextlib.closing(Probe(url, scheduler)) as probe:
        yield _infer(probe)
    for name in names:
        yield from _ask_endpoint(url, name)
    yield from _show_metrics(metrics_url)


def _ask_ready(client: httpx.Client, name: str, path: str) -> Part:
    try:
        status = client.get(path).status_code
    except httpx.HTTPError as error:
        return Part(name, False, f"cannot be reached: {error or type(error).__name__}")
    return Part(name, status == 200, "" if status == 200 else f"not ready (HTTP {status})")


def _named_by(client: httpx.Client, model: str, parameter: str) -> str | None:
    """The model that another one names by a parameter of its configuration."""
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
        parameters = client.get(f"models/{model}/config").json()["parameters"]
        return str(parameters[parameter]["string_value"])
    return None


def _infer(probe: Probe) -> Part:
    """Check whether the engine runs steps."""
    started = time.monotonic()
    result = probe.check(TIMEOUT_S)
    if result.health is Health.SERVING:
        return Part("inference", True, f"{(time.monotonic() - started) * 1000:.0f} ms")
    return Part("inference", False, f"{result.health.value}: {result.detail}")


def _ask_endpoint(url: str, model: str) -> Iterator[Part]:
    """Check whether a model answers, with all that it needs; nothing if there is no such model."""
    started = time.monotonic()
    result = probe_endpoint(url, model, TIMEOUT_S)
    if result.reply is Reply.ANSWER:
        yield Part(model, True, f"{(time.monotonic() - started) * 1000:.0f} ms")
    elif result.reply is not Reply.UNKNOWN:
        yield Part(model, False, f"{result.reply.value}: {result.detail}")


def _show_metrics(url: str) -> Iterator[Part]:
    """Show the main figures of the metrics page; nothing if it cannot be reached."""
    found = read_metrics(f"http://{url}/metrics")
    if found is None:
        return
    shown = [
        f"{name.removeprefix('charonia_')}={found[name]:g}"
        for name in SHOWN_METRICS
        if name in found
    ]
    yield Part("metrics", bool(shown), " ".join(shown) or "the page has none of charonia's")


def _metrics_url(url: str) -> str:
    host, colon, _ = url.rpartition(":")
    return f"{host if colon else url}:{DEFAULT_METRICS_PORT}"
