"""Arguments of the commands that start or change a server: serve, gateway, reload, drain, ….

Owns the grammar and the translation of options into the arguments of each command's own module.
That module is imported when the command is called.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from charonia.errors import ConfigError
from charonia.events import LEVELS, Level, Log
from charonia.gateway.settings import DEFAULT_HOST, DEFAULT_PORT, Fallback, GatewaySettings
from charonia.launch.commands.arguments.values import (
    address,
    count,
    port,
    positive,
    positive_float,
    seconds,
)
from charonia.launch.commands.log_printer import FORMATS, LogPrinter
from charonia.log_level import DEFAULT, LevelFile

if TYPE_CHECKING:
    from charonia.launch.server import repository


def add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `charonia serve`."""
    serve = commands.add_parser(
        "serve",
        help="serve a model until interrupted",
        description="Serve a model with tritonserver until SIGINT or SIGTERM, and restart what "
        "fails.",
        epilog="Engine arguments are the keys of engine/1/model.json, for example --set "
        "max_model_len=2048. Parameters of the scheduler begin with scheduler., for example --set "
        "scheduler.max_queue_size=64.",
    )
    _add_what(serve)
    serve.add_argument(
        "--model-repository", type=Path, metavar="DIR", help="model repository to copy"
    )
    serve.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        dest="served_model_names",
        help="a further model name of the scheduler; may be repeated",
    )
    serve.add_argument(
        "--facade",
        action="append",
        default=[],
        metavar="NAME",
        dest="facades",
        help="also serve the models that another server's clients expect, on the same scheduler. "
        "tensorrt-llm: ensemble, tensorrt_llm_bls, tensorrt_llm, preprocessing, postprocessing",
    )
    serve.add_argument(
        "--decoupled-mode",
        choices=("true", "false"),
        help="whether the models of a --facade can stream (default: true); false is for clients "
        "that cannot stream",
    )
    serve.add_argument("--address", default="127.0.0.1", metavar="A", help="default: %(default)s")
    for name, default in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        serve.add_argument(
            f"--{name}-port", type=port, default=default, metavar="N", help="default: %(default)s"
        )
    serve.add_argument(
        "--gateway",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="also serve OpenAI's API and a page, as `charonia gateway` does (default: no)",
    )
    serve.add_argument(
        "--gateway-port",
        type=port,
        metavar="N",
        help=f"port of the --gateway (default: {DEFAULT_PORT})",
    )
    serve.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="chat template of the --gateway (default: the checkpoint's own)",
    )
    _add_api_keys(serve, "who may call the --gateway")
    serve.add_argument(
        "--drain-timeout",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="time for requests to finish after SIGTERM (default: %(default)g); 0 ends them at "
        "once, as SIGINT does",
    )
    _add_traces(serve)
    serve.add_argument("--verbose", action="store_true", help="show all of tritonserver's log")
    _add_log(
        serve,
        "`charonia log-level` changes it while the server runs; debug also shows "
        "tritonserver's own progress",
    )
    serve.add_argument(
        "--log-prompts",
        action="store_true",
        help="show the beginning of each request's prompt in its line of level debug (default: no "
        "line has text of a client's prompt)",
    )
    serve.add_argument(
        "--max-log-len",
        type=positive,
        metavar="N",
        help="characters of a prompt that --log-prompts shows (default: 256)",
    )
    serve.add_argument(
        "tritonserver",
        nargs="*",
        metavar="-- --NAME=VALUE",
        help="options for tritonserver, for example --log-verbose=1",
    )
    serve.set_defaults(run=_run_serve)


def add_gateway(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `charonia gateway`."""
    gateway = commands.add_parser(
        "gateway",
        help="serve OpenAI's API in front of running servers",
        description="Serve OpenAI's API (/v1/completions, /v1/chat/completions, /v1/models, "
        "/tokenize, /detokenize) and a page to chat (/) in front of one or more running charonia "
        "servers of one model, until SIGINT or SIGTERM.",
    )
    gateway.add_argument(
        "--server",
        type=address,
        action="append",
        required=True,
        metavar="HOST:PORT",
        dest="servers",
        help="gRPC endpoint of a server; may be repeated",
    )
    gateway.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory of the checkpoint that the servers serve, or of its tokenizer",
    )
    gateway.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="chat template (default: the checkpoint's own)",
    )
    gateway.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        dest="model_names",
        help="name of the model in requests; the first is listed, further ones are accepted "
        "(default: the name of the --tokenizer directory)",
    )
    gateway.add_argument(
        "--scheduler-model",
        default="scheduler",
        metavar="M",
        help="name of the scheduler's model on the servers (default: %(default)s)",
    )
    _add_api_keys(gateway, "who may call")
    fallback = gateway.add_argument_group(
        "fallback",
        "a model that answers, under its own name, while no --server answers or takes requests; "
        "requests wait while an engine restarts or is reloaded",
    )
    fallback.add_argument(
        "--fallback-server",
        type=address,
        action="append",
        default=[],
        metavar="HOST:PORT",
        dest="fallback_servers",
        help="gRPC endpoint of a server of the fallback model; may be repeated",
    )
    fallback.add_argument(
        "--fallback-tokenizer",
        type=Path,
        metavar="DIR",
        help="directory of its checkpoint, or of its tokenizer and chat template",
    )
    fallback.add_argument(
        "--fallback-model-name",
        metavar="NAME",
        help="its name in answers (default: the name of the --fallback-tokenizer directory)",
    )
    gateway.add_argument("--host", default=DEFAULT_HOST, metavar="A", help="default: %(default)s")
    gateway.add_argument(
        "--port", type=port, default=DEFAULT_PORT, metavar="N", help="default: %(default)s"
    )
    limits = gateway.add_argument_group("limits")
    for name, field, kind, what in (
        ("max-body-bytes", "max_body_bytes", positive, "maximum bytes of a request's body"),
        (
            "max-held-bytes",
            "max_held_bytes",
            positive,
            "maximum bytes of the bodies of all requests together",
        ),
        ("max-prompts", "max_prompts", positive, "maximum prompts of one request"),
        ("max-requests", "max_requests", positive, "maximum concurrent requests"),
        (
            "read-timeout",
            "read_timeout_s",
            positive_float,
            "timeout for reading a request's body, in seconds",
        ),
        (
            "stall-timeout",
            "stall_timeout_s",
            positive_float,
            "timeout for a client that stops reading its answer, in seconds",
        ),
        (
            "request-timeout",
            "request_timeout_s",
            positive_float,
            "timeout of a whole request, in seconds; the fallback model gets as much again",
        ),
        (
            "drain-timeout",
            "drain_timeout_s",
            seconds,
            "seconds for requests to finish after SIGTERM; SIGINT ends them at once",
        ),
        ("threads", "num_threads", positive, "threads that tokenize long texts"),
    ):
        default = getattr(GatewaySettings, field)
        shown = "none" if default is None else "%(default)s"
        limits.add_argument(
            f"--{name}",
            dest=field,
            type=kind,
            default=default,
            metavar="N",
            help=f"{what} (default: {shown})",
        )
    _add_traces(gateway)
    _add_log(gateway, "it is fixed; of a `charonia serve --gateway` it is the server's")
    gateway.set_defaults(run=_run_gateway)


def _add_log(parser: argparse.ArgumentParser, note: str) -> None:
    """Add the options of the log.

    Args:
        note: what is to say of its level.
    """
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        default="text",
        help="lines for people, or one JSON object each (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        choices=LEVELS,
        help="the most detailed lines that are shown; debug has the life of each request (default: "
        f"{DEFAULT}); {note}",
    )


def _add_traces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="OTLP collector that gets a trace of each request, http://HOST:PORT (default: none)",
    )
    parser.add_argument(
        "--trace-rate",
        type=count,
        metavar="N",
        help="trace one in N requests, beside those whose client traces them; 0 traces only those "
        "(default: 1)",
    )


def _add_api_keys(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"{what}: one API key per line, and the tenant of its requests behind it if they are "
        "always of one (default: everybody)",
    )


def _add_what(parser: argparse.ArgumentParser) -> None:
    """Add the options of what to serve, for `serve` and `reload`."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="checkpoint directory; serve takes the demo pair without it",
    )
    parser.add_argument(
        "--draft-model",
        type=Path,
        metavar="DIR",
        help="checkpoint of a small model with the same tokenizer, which drafts tokens",
    )
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument(
        "--tensor-parallel-size", type=int, metavar="N", help="ranks that split each layer"
    )
    parser.add_argument(
        "--pipeline-parallel-size",
        type=int,
        metavar="N",
        help="groups of ranks that split the layers",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="override an engine argument or a scheduler parameter; may be repeated",
    )


def add_reload(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `charonia reload`."""
    reload = commands.add_parser(
        "reload",
        help="give a running server another model or configuration",
        description="Give a running `charonia serve` another checkpoint with the same tokenizer, "
        "or other engine arguments. Settings that you don't name are kept. Live requests continue "
        "on the new engine, which recomputes them; with --drain they finish on the old one. If the "
        "new engine cannot be loaded, the old one is loaded again.",
    )
    _add_what(reload)
    reload.add_argument(
        "--drain", action="store_true", help="let running requests finish first; new ones wait"
    )
    _add_where(reload)
    reload.set_defaults(run=_run_reload)


def add_drain(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `charonia drain`."""
    drain = commands.add_parser(
        "drain",
        help="let a running server finish its requests and end",
        description="Let a running `charonia serve` refuse new requests, finish those that it has "
        "within its --drain-timeout, and end. SIGTERM does the same. A server that is already "
        "draining continues. The exit code is 1 if requests were not finished.",
    )
    _add_where(drain)
    drain.set_defaults(run=_run_drain)


def add_log_level(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `charonia log-level`."""
    log_level = commands.add_parser(
        "log-level",
        help="show or change how much a running server logs",
        description="Print the level of the log of a running `charonia serve`, or change it at "
        "once, for all of its processes and its --gateway. error and warning are for what went "
        "wrong; info is the default; debug adds the life of each request: when it was taken in, "
        "started, had its first token and ended, with figures. The level lasts until the next "
        "change, also when processes are restarted.",
    )
    log_level.add_argument(
        "level", nargs="?", choices=LEVELS, metavar="LEVEL", help=", ".join(LEVELS)
    )
    _add_where(log_level)
    log_level.set_defaults(run=_run_log_level)


def _add_where(parser: argparse.ArgumentParser) -> None:
    """Add the options that select one of several servers."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url",
        type=address,
        metavar="U",
        help="host:port of HTTP or gRPC, if several servers run",
    )
    where.add_argument(
        "--runtime-dir", type=Path, metavar="DIR", help="the server's directory in /tmp"
    )


def _run_serve(options: argparse.Namespace) -> None:
    from charonia.launch.commands.serve import ServeOptions, serve

    if options.decoupled_mode is not None and not options.facades:
        raise ConfigError("--decoupled-mode is about the models of a --facade, but none is named")
    for name in ("gateway_port", "chat_template", "api_key_file"):
        if getattr(options, name) is not None and not options.gateway:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is about the --gateway, which is not asked for")
    _check_traces(options)
    gateway_port = DEFAULT_PORT if options.gateway_port is None else options.gateway_port
    settings = [*options.settings]
    if options.log_prompts:
        settings.append("scheduler.log_prompts=true")
    if options.max_log_len is not None:
        settings.append(f"scheduler.max_log_len={options.max_log_len}")
    serve(
        replace(
            _what(options),
            settings=settings,
            source=options.model_repository,
            served_model_names=options.served_model_names,
            facades=options.facades,
            is_facade_decoupled=options.decoupled_mode != "false",
        ),
        ServeOptions(
            address=options.address,
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            metrics_port=options.metrics_port,
            is_verbose=options.verbose,
            tritonserver=options.tritonserver,
            drain_s=options.drain_timeout,
            gateway_port=gateway_port if options.gateway else None,
            chat_template=options.chat_template,
            api_key_file=options.api_key_file,
            log_format=options.log_format,
            log_level=options.log_level or DEFAULT,
            otlp_traces_endpoint=options.otlp_traces_endpoint,
            trace_rate=1 if options.trace_rate is None else options.trace_rate,
        ),
    )


def _check_traces(options: argparse.Namespace) -> None:
    """Raises ConfigError: the endpoint is wrong, or there is a rate without one."""
    from charonia.tracing.endpoint import check_endpoint

    if options.otlp_traces_endpoint is not None:
        check_endpoint(options.otlp_traces_endpoint)
    elif options.trace_rate is not None:
        raise ConfigError("--trace-rate is about --otlp-traces-endpoint, which is not given")


def _run_gateway(options: argparse.Namespace) -> None:
    _check_traces(options)
    try:
        from charonia.gateway.server import run_gateway
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the gateway needs {error.name}: pip install 'charonia[gateway]'"
        ) from None

    fixed, file = options.log_level, LevelFile.of_environment()  # the file of a server beside it

    def level() -> Level:
        return file.read() if fixed is None else fixed

    printer = LogPrinter(options.log_format, level=level)
    run_gateway(
        GatewaySettings(
            servers=tuple(dict.fromkeys(options.servers)),
            tokenizer=options.tokenizer,
            model_names=tuple(options.model_names or [options.tokenizer.resolve().name]),
            fallback=_fallback(options),
            api_key_file=options.api_key_file,
            chat_template=options.chat_template,
            scheduler_model=options.scheduler_model,
            host=options.host,
            port=options.port,
            max_body_bytes=options.max_body_bytes,
            max_held_bytes=options.max_held_bytes,
            max_prompts=options.max_prompts,
            max_requests=options.max_requests,
            read_timeout_s=options.read_timeout_s,
            stall_timeout_s=options.stall_timeout_s,
            request_timeout_s=options.request_timeout_s,
            drain_timeout_s=options.drain_timeout_s,
            num_threads=options.num_threads,
            otlp_traces_endpoint=options.otlp_traces_endpoint,
            trace_rate=1 if options.trace_rate is None else options.trace_rate,
        ),
        Log(printer.say, level),
    )


def _fallback(options: argparse.Namespace) -> Fallback | None:
    servers, tokenizer = options.fallback_servers, options.fallback_tokenizer
    name = options.fallback_model_name
    if not servers and tokenizer is None and name is None:
        return None
    if not servers or tokenizer is None:
        missing = "--fallback-tokenizer" if servers else "--fallback-server"
        raise ConfigError(f"a fallback model needs {missing}, which is not given")
    return Fallback(
        servers=tuple(dict.fromkeys(servers)),
        tokenizer=tokenizer,
        model_name=name or tokenizer.resolve().name,
    )


def _run_log_level(options: argparse.Namespace) -> None:
    from charonia.launch.commands.log_level import log_level

    log_level(options.level, runtime_dir=options.runtime_dir, url=options.url)


def _run_drain(options: argparse.Namespace) -> None:
    from charonia.launch.commands.drain import drain

    drain(options.runtime_dir, options.url)


def _what(options: argparse.Namespace) -> "repository.RepositoryOptions":
    from charonia.launch.server.repository import RepositoryOptions

    return RepositoryOptions(
        model=options.model,
        draft_model=options.draft_model,
        dtype=options.dtype,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        settings=options.settings,
    )


def _run_reload(options: argparse.Namespace) -> None:
    from charonia.launch.commands.reload import reload

    reload(
        _what(options),
        drain=options.drain,
        runtime_dir=options.runtime_dir,
        url=options.url,
    )
