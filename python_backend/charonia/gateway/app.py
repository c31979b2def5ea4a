"""The routes of the gateway.

Owns the routes and the answers to unknown ones. Must not know how text is generated, nor the
process around it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from charonia.events import Log
from charonia.gateway import openapi
from charonia.gateway.errors import INVALID, NOT_FOUND, ApiError, internal, no_such_model
from charonia.gateway.keys import Keyed, Keys
from charonia.gateway.observing import BeginSpan, Metrics, Observed, Record, record_of
from charonia.gateway.openai import chat, completions, tokens
from charonia.gateway.openai.answers import Model, Models
from charonia.gateway.page.routes import FILES, PAGE, add_page
from charonia.gateway.rest import batch, generate, status
from charonia.gateway.rest.answers import Health
from charonia.gateway.serving import Serving
from charonia.gateway.watching import Reply, Watch, Work
from charonia.version import VERSION

LIVE = "/health/live"
READY = "/health/ready"
METRICS = "/metrics"
HEALTH = "/v1/health"
FIGURES = "/v1/metrics"
DESCRIPTION = "/openapi.json"
QUIET = frozenset((LIVE, READY, METRICS, HEALTH, FIGURES))
FREE = (LIVE, READY, METRICS, HEALTH, DESCRIPTION, PAGE, FILES.replace("{name}", "*"))
"""Paths that need no API key."""


def make_app(
    serving: Serving,
    watch: Watch,
    metrics: Metrics,
    log: Log,
    keys: Keys | None = None,
    begin_span: BeginSpan | None = None,
) -> FastAPI:
    """Make the gateway's application.

    Args:
        log: takes the lines. keys: that requests need; None lets everybody call.
        begin_span: see `Observed`.
    """
    # FastAPI cannot describe routes that read their body themselves, so `openapi` does.
    app = FastAPI(title="charonia", version=VERSION, openapi_url=None)
    send_s = watch.stall_timeout_s + 1.0  # `Work` notices first, and says why
    if keys is not None:
        app.add_middleware(Keyed, keys=keys, free=FREE, refuse=_refusal)
    app.add_middleware(
        Observed, metrics=metrics, log=log, quiet=QUIET, send_s=send_s, begin_span=begin_span
    )
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(ApiError, _refuse)
    app.add_exception_handler(Exception, _fail)
    _add_generation(app, serving, watch)
    _add_models(app, serving)
    _add_health(app, serving, watch, metrics)
    add_page(app, chats=serving.prompts.has_template)
    return app


Run = Callable[[Serving, Record, bytes, Reply], Coroutine[Any, Any, None]]
"""Answers a request, given its body."""


def _add_generation(app: FastAPI, serving: Serving, watch: Watch) -> None:
    def work(request: Request, run: Run) -> Response:
        record = record_of(request.scope)

        async def answered(body: bytes, reply: Reply) -> None:
            await serving.answered(
                record, lambda one: run(one, record, body, reply), lambda: reply.has_begun
            )

        return Work(watch, answered)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        """Complete a text."""
        return work(request, completions.complete)

    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> Response:
        """Generate the next message of a conversation."""
        return work(request, chat.chat)

    @app.post("/v1/generate")
    async def generate_one(request: Request) -> Response:
        """Complete one prompt."""
        return work(request, generate.generate)

    @app.post("/v1/batch")
    async def generate_several(request: Request) -> Response:
        """Complete several prompts at once."""
        record = record_of(request.scope)
        return Work(watch, lambda body, reply: batch.batch(serving, record, body, reply))

    @app.post("/tokenize")
    async def tokenize() -> Response:
        """Return the token ids of a text or a conversation."""
        return Work(watch, lambda body, reply: tokens.tokenize(serving, body, reply))

    @app.post("/detokenize")
    async def detokenize() -> Response:
        """Return the text of token ids."""
        return Work(watch, lambda body, reply: tokens.detokenize(serving, body, reply))

    @app.post("/v1/embeddings")
    async def embed() -> Response:
        """Refuse: no embedding model is served."""
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            "no model of embeddings is served here",
            kind=NOT_FOUND,
            code="no_embedding_model",
        )


def _add_models(app: FastAPI, serving: Serving) -> None:
    async def model(name: str) -> Model:
        root = serving.settings.model_names[0]
        return Model(name, serving.created, await serving.upstream.max_model_len(), root)

    @app.get("/v1/models")
    async def models() -> Response:
        """List the model under its first name."""
        return _json(Models([await model(serving.settings.model_names[0])]))

    @app.get("/v1/models/{name:path}")
    async def model_of(name: str) -> Response:
        """Return the model under any of its names."""
        if name not in serving.settings.model_names:
            raise no_such_model(name)
        return _json(await model(name))


def _add_health(app: FastAPI, serving: Serving, watch: Watch, metrics: Metrics) -> None:
    description = openapi.encoded()
    fallback = None if serving.fallback is None else serving.fallback.upstream
    upstreams = (serving.upstream, fallback)
    servers = [server for one in upstreams if one is not None for server in one.servers]

    @app.get(DESCRIPTION)
    async def describe() -> Response:
        """Return the OpenAPI document."""
        return Response(description, media_type="application/json")

    # Some load balancers ask with HEAD, and so does aiperf for the metrics. The server drops the
    # body then.
    @app.head(LIVE, include_in_schema=False)
    @app.get(LIVE)
    async def live() -> Response:
        """Say that this process works."""
        return _json({"status": "live"})

    @app.head(READY, include_in_schema=False)
    @app.get(READY)
    async def ready() -> Response:
        """Say whether the gateway and one of its servers would accept a request now."""
        draining = watch.is_draining
        found = await status.health(*upstreams, is_draining=draining, says_live=False)
        return _health(found)

    @app.head(HEALTH, include_in_schema=False)
    @app.get(HEALTH)
    async def health() -> Response:
        """Say the same, and that this process works."""
        draining = watch.is_draining
        found = await status.health(*upstreams, is_draining=draining, says_live=True)
        return _health(found)

    @app.get(FIGURES)
    async def figures() -> Response:
        """Return what clients got, and what the servers have to do."""
        upstream = serving.upstream
        return _json(await status.metrics(upstream, metrics.figures, watch.num_requests))

    @app.head(METRICS, include_in_schema=False)
    @app.get(METRICS)
    async def page() -> Response:
        """Return the gateway's own metrics."""
        metrics.tasks.set(len(asyncio.all_tasks()))
        for server in servers:
            metrics.outstanding.labels(server.url).set(server.num_requests)
            metrics.breaker_open.labels(server.url).set(server.breaker.is_open)
        content = await asyncio.to_thread(generate_latest, metrics.registry)
        return Response(content, media_type=CONTENT_TYPE_LATEST)


def _health(found: Health) -> Response:
    is_ready = found.status == "ready"
    return _json(found, HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE)


def _json(value: Any, status: int = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _fail(request: Request, error: Exception) -> Response:
    """Answer with an internal error; uvicorn logs it."""
    return _json(internal().body, HTTPStatus.INTERNAL_SERVER_ERROR)


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer an error that was raised outside of a request's work."""
    if isinstance(error, HTTPException):
        where = f"{request.method} {request.url.path}"
        words = {
            HTTPStatus.NOT_FOUND: f"there is no {request.url.path}",
            HTTPStatus.METHOD_NOT_ALLOWED: f"{where} is not served",
        }
        error = ApiError(
            error.status_code,
            words.get(HTTPStatus(error.status_code), error.detail),
            kind=NOT_FOUND if error.status_code == HTTPStatus.NOT_FOUND else INVALID,
            code="not_found" if error.status_code == HTTPStatus.NOT_FOUND else "not_allowed",
            allow=(error.headers or {}).get("Allow"),
        )
    assert isinstance(error, ApiError)
    return _refusal(request.scope, error)


def _refusal(scope: Scope, error: ApiError) -> Response:
    record_of(scope).reason = error.message
    response = _json(error.body, error.status)
    response.headers.update(error.headers)
    return response
