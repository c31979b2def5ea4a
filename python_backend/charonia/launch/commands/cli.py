"""The `charonia` command.

Owns its arguments, its exit codes and that an expected error is one line. Must not know how
anything is done: every command's work is in a module of its own, imported when it is called.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from charonia import __version__
from charonia.errors import CharoniaError, ConfigError, shown
from charonia.gateway.settings import DEFAULT_HOST, DEFAULT_PORT, GatewaySettings

if TYPE_CHECKING:
    from charonia.launch.server import repository

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_MAX_INTEGER = 2**31 - 1
N = TypeVar("N", int, float)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        options.run(options)
    except CharoniaError as error:
        print(f"charonia: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read stdout has seen enough, for example `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk, a file that may not be read
        print(f"charonia: {error}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(
        prog="charonia", description="Serve large language models with NVIDIA Triton."
    )
    parser.add_argument("--version", action="version", version=f"charonia {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_gateway(commands)
    _add_generate(commands)
    _add_health(commands)
    _add_metrics(commands)
    _add_reload(commands)
    _add_drain(commands)
    _add_simulate(commands)
    _add_replay(commands)
    _add_demo(commands)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model until interrupted",
        description="Serve a model with tritonserver, and restart it when it breaks, until SIGINT "
        "or SIGTERM.",
        epilog="Engine arguments are those of engine/1/model.json, for example --set "
        "max_model_len=2048; the scheduler's parameters begin with scheduler., for example --set "
        "scheduler.max_queue_size=64.",
    )
    _add_what(serve)
    serve.add_argument(
        "--model-repository", type=Path, metavar="DIR", help="model repository to take a copy of"
    )
    serve.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        dest="served_model_names",
        help="a further name under which clients find the scheduler; may be repeated",
    )
    serve.add_argument(
        "--facade",
        action="append",
        default=[],
        metavar="NAME",
        dest="facades",
        help="also serve the models that another server's clients know, over the same scheduler; "
        "tensorrt-llm: ensemble, tensorrt_llm_bls, tensorrt_llm, preprocessing, postprocessing",
    )
    serve.add_argument(
        "--decoupled-mode",
        choices=("true", "false"),
        help="whether the models of a --facade can stream (default: true); false for clients that "
        "know no streams",
    )
    serve.add_argument("--address", default="127.0.0.1", metavar="A", help="default: %(default)s")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        serve.add_argument(
            f"--{name}-port", type=_port, default=port, metavar="N", help="default: %(default)s"
        )
    serve.add_argument(
        "--gateway",
        action="store_true",
        help="also serve OpenAI's API, see `charonia gateway`",
    )
    serve.add_argument(
        "--gateway-port",
        type=_port,
        metavar="N",
        help=f"of the --gateway (default: {DEFAULT_PORT})",
    )
    serve.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="of the --gateway: a template of conversations, instead of the checkpoint's own",
    )
    serve.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long requests may take to finish after SIGTERM (default: %(default)g); 0 ends "
        "them at once, as SIGINT does",
    )
    serve.add_argument("--verbose", action="store_true", help="show all of tritonserver's log")
    serve.add_argument(
        "tritonserver",
        nargs="*",
        metavar="-- --NAME=VALUE",
        help="options that are handed to tritonserver, for example --log-verbose=1",
    )
    serve.set_defaults(run=_run_serve)


def _add_gateway(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    gateway = commands.add_parser(
        "gateway",
        help="serve OpenAI's API in front of running servers",
        description="Serve OpenAI's API (/v1/completions, /v1/chat/completions, /v1/models, "
        "/tokenize, /detokenize) in front of one or more running charonia servers of one model, "
        "until SIGINT or SIGTERM.",
    )
    gateway.add_argument(
        "--server",
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
        help="checkpoint directory that the servers serve, or that of its tokenizer",
    )
    gateway.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a template of conversations, instead of the checkpoint's own",
    )
    gateway.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        dest="model_names",
        help="what requests call the model: the first name is listed, the others are served as "
        "well (default: the name of the --tokenizer directory)",
    )
    gateway.add_argument(
        "--scheduler-model",
        default="scheduler",
        metavar="M",
        help="what the scheduler is called on the servers (default: %(default)s)",
    )
    gateway.add_argument("--host", default=DEFAULT_HOST, metavar="A", help="default: %(default)s")
    gateway.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, metavar="N", help="default: %(default)s"
    )
    limits = gateway.add_argument_group("limits")
    for name, field, kind, what in (
        ("max-body-bytes", "max_body_bytes", _positive, "bytes of a request's body"),
        ("max-held-bytes", "max_held_bytes", _positive, "bytes of the bodies of all requests"),
        ("max-prompts", "max_prompts", _positive, "prompts of one request"),
        ("max-requests", "max_requests", _positive, "requests at a time"),
        (
            "read-timeout",
            "read_timeout_s",
            _positive_float,
            "seconds in which a request's body must come",
        ),
        (
            "stall-timeout",
            "stall_timeout_s",
            _positive_float,
            "seconds for which a client may take nothing of its answer",
        ),
        (
            "request-timeout",
            "request_timeout_s",
            _positive_float,
            "seconds that a request may take in all",
        ),
        (
            "drain-timeout",
            "drain_timeout_s",
            _seconds,
            "seconds in which requests may finish after SIGTERM; SIGINT ends them at once",
        ),
        ("threads", "num_threads", _positive, "threads that tokenize long texts"),
    ):
        default = getattr(GatewaySettings, field)
        shown = "without end" if default is None else "%(default)s"
        limits.add_argument(
            f"--{name}",
            dest=field,
            type=kind,
            default=default,
            metavar="N",
            help=f"{what} (default: {shown})",
        )
    gateway.set_defaults(run=_run_gateway)


def _add_what(parser: argparse.ArgumentParser) -> None:
    """What to serve, for the first time or from now on."""
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint directory (default: the demo pair)"
    )
    parser.add_argument(
        "--draft-model",
        type=Path,
        metavar="DIR",
        help="checkpoint of a small model of the same tokenizer that guesses tokens ahead",
    )
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument(
        "--tensor-parallel-size", type=int, metavar="N", help="ranks to split each layer among"
    )
    parser.add_argument(
        "--pipeline-parallel-size", type=int, metavar="N", help="ranks to split the layers among"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="override an engine argument or a scheduler parameter; may be repeated",
    )


def _add_reload(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    reload = commands.add_parser(
        "reload",
        help="give a running server another model or configuration",
        description="Have a running `charonia serve` go on with another checkpoint of the same "
        "tokenizer, or with other engine arguments. What is not named stays. Live requests are "
        "not lost: they are computed anew on the new engine and go on there, or with --drain "
        "finish on the old one. If the new engine cannot be loaded, the old one is.",
    )
    _add_what(reload)
    reload.add_argument(
        "--drain", action="store_true", help="let running requests finish first; new ones wait"
    )
    _add_where(reload)
    reload.set_defaults(run=_run_reload)


def _add_drain(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    drain = commands.add_parser(
        "drain",
        help="have a running server finish its requests and end",
        description="Have a running `charonia serve` take no more requests, finish those that it "
        "has, within its --drain-timeout, and end. SIGTERM does the same. A server that drains "
        "already goes on with that. The exit code is 1 where requests were not finished.",
    )
    _add_where(drain)
    drain.set_defaults(run=_run_drain)


def _add_where(parser: argparse.ArgumentParser) -> None:
    """Which of several servers is meant."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url", metavar="U", help="host:port of HTTP or gRPC, where several servers run"
    )
    where.add_argument(
        "--runtime-dir", type=Path, metavar="DIR", help="the server's directory in /tmp"
    )


def _add_generate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    generate = commands.add_parser(
        "generate",
        help="stream one completion to the terminal",
        description="Stream one completion from a running server to the terminal.",
    )
    generate.add_argument("prompt", metavar="PROMPT")
    generate.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default: 128")
    generate.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    generate.add_argument("--seed", type=int, metavar="S")
    generate.add_argument(
        "--stop", action="append", default=[], metavar="S", help="may be repeated"
    )
    generate.add_argument("--priority", type=int, metavar="N", help="smaller is sooner")
    generate.add_argument(
        "--deadline-ms", type=int, metavar="N", help="milliseconds that all of it may take"
    )
    generate.add_argument("--tenant", metavar="NAME", help="whose request it is")
    generate.add_argument("--protocol", choices=("grpc", "http"), default="grpc")
    generate.add_argument(
        "--url", metavar="U", help="host:port (default: 127.0.0.1:8001, with http 127.0.0.1:8000)"
    )
    generate.add_argument("--model-name", default="scheduler", metavar="M")
    generate.add_argument("--json", action="store_true", help="one JSON object per chunk")
    generate.set_defaults(run=_run_generate)


def _add_health(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    health = commands.add_parser(
        "health",
        help="ask a running server whether it serves",
        description="Ask a running server whether it, its scheduler and its engine are ready, and "
        "for one token. Exits with 0 when all is well, else with 1.",
    )
    health.add_argument(
        "--url",
        default="127.0.0.1:8000",
        metavar="U",
        help="host:port of HTTP (default: %(default)s)",
    )
    health.add_argument(
        "--metrics-url", metavar="U", help="host:port of the metrics (default: port 8002 of --url)"
    )
    health.add_argument("--model-name", default="scheduler", metavar="M")
    health.add_argument("--json", action="store_true", help="one JSON object")
    health.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="ask again for so long"
    )
    health.set_defaults(run=_run_health)


def _add_metrics(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    metrics = commands.add_parser(
        "metrics",
        help="serve the metrics of a tritonserver that was started by hand",
        description="Serve the page of metrics that `charonia serve` has, tritonserver's own and "
        "what only the scheduler knows, beside a tritonserver that was started by hand.",
    )
    metrics.add_argument(
        "--model-repository",
        type=Path,
        required=True,
        metavar="DIR",
        help="the model repository that tritonserver has loaded",
    )
    metrics.add_argument(
        "--triton",
        default="http://127.0.0.1:8002/metrics",
        metavar="URL",
        help="tritonserver's own page (default: %(default)s)",
    )
    metrics.add_argument("--address", default="127.0.0.1", metavar="A", help="default: %(default)s")
    metrics.add_argument(
        "--port", type=_port, default=9400, metavar="N", help="default: %(default)s"
    )
    metrics.set_defaults(run=_run_metrics)


def _add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    simulate = commands.add_parser(
        "simulate",
        help="run a trace of requests through the scheduler, without an engine",
        description="Run a trace of requests through the real scheduler on a virtual clock, with "
        "steps that take as long as an engine's would, and print what requests would get.",
    )
    simulate.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="JSON lines with timestamp, input_length and output_length, or a CSV file of Azure's",
    )
    simulate.add_argument(
        "--step-times",
        required=True,
        metavar="WHAT",
        help="a steps.jsonl that a server recorded, a JSON file of a fit, or constants: step, and "
        "more for each token, row, context (cached token read) and pair (query and key); around it "
        "gap, transit, host and host_row; for example step=8ms,token=25us,context=20ns",
    )
    simulate.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="P",
        dest="policies",
        help="fcfs, priority, deadline, fair, fair+priority or fair+deadline; several are compared",
    )
    simulate.add_argument(
        "--kv-tokens", type=_positive, metavar="N", help="tokens that the KV cache holds"
    )
    simulate.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="an engine argument or scheduler parameter, as of serve; may be repeated",
    )
    shape = simulate.add_argument_group("traffic, where it is not to be the trace's")
    shape.add_argument("--requests", type=_positive, metavar="N", help="so many of the trace")
    shape.add_argument("--rate", type=_positive_float, metavar="R", help="requests per second")
    shape.add_argument("--arrivals", choices=("trace", "poisson", "bursty"), default="trace")
    shape.add_argument(
        "--burstiness",
        type=_positive_float,
        default=4.0,
        metavar="V",
        help="of bursty: the coefficient of variation of the times between arrivals",
    )
    shape.add_argument("--tenants", type=_positive, metavar="N", help="of unlike size")
    shape.add_argument("--priorities", type=_positive, metavar="N")
    shape.add_argument(
        "--deadline-ms", type=_range, metavar="A:B", help="a deadline from A to B for each"
    )
    shape.add_argument(
        "--max-tokens", type=_positive, metavar="N", help="that are asked for; else those that came"
    )
    shape.add_argument(
        "--adversary",
        type=_share,
        default=0.0,
        metavar="S",
        help="share of the requests that one tenant sends at once, as the longest",
    )
    simulate.add_argument(
        "--by", choices=("tenant", "priority", "none"), help="classes of requests"
    )
    simulate.add_argument("--seed", type=int, default=0, metavar="N")
    simulate.add_argument(
        "--output", type=Path, metavar="DIR", help="write tables, a plot, and each run's trace"
    )
    simulate.set_defaults(run=_run_simulate)


def _add_replay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    replay = commands.add_parser(
        "replay",
        help="repeat a recorded run of the scheduler, and compare its plans",
        description="Call the scheduler as it was called when a server recorded it (--set "
        "scheduler.record_dir=DIR --set scheduler.record_schedule=true), without an engine, and "
        "compare each plan with the recorded one, byte for byte. The exit code is 1 at the first "
        "difference, which is printed.",
    )
    replay.add_argument("journal", type=Path, metavar="FILE", help="schedule-….journal")
    replay.add_argument(
        "--show",
        type=_range,
        metavar="A:B",
        help="print the plans from number A to B, as lines of JSON",
    )
    replay.set_defaults(run=_run_replay)


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    demo = commands.add_parser(
        "demo",
        help="serve the demo model, stream three completions, stop",
        description="Serve the demo model on free ports, stream three completions with their "
        "speed, and stop.",
    )
    demo.set_defaults(run=_run_demo)


def _run_serve(options: argparse.Namespace) -> None:
    from charonia.launch.commands.serve import ServeOptions, serve

    if options.decoupled_mode is not None and not options.facades:
        raise ConfigError("--decoupled-mode is about the models of a --facade, but none is named")
    for name in ("gateway_port", "chat_template"):
        if getattr(options, name) is not None and not options.gateway:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is about the --gateway, which is not asked for")
    gateway_port = DEFAULT_PORT if options.gateway_port is None else options.gateway_port
    serve(
        replace(
            _what(options),
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
        ),
    )


def _run_gateway(options: argparse.Namespace) -> None:
    try:
        from charonia.gateway.server import run_gateway
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the gateway needs {error.name}: pip install 'charonia[gateway]'"
        ) from None

    run_gateway(
        GatewaySettings(
            servers=tuple(dict.fromkeys(options.servers)),
            tokenizer=options.tokenizer,
            model_names=tuple(options.model_names or [options.tokenizer.resolve().name]),
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
        )
    )


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


def _run_generate(options: argparse.Namespace) -> None:
    from charonia.launch.commands.generate import generate

    generate(
        options.prompt,
        {
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "seed": options.seed,
            "stop": options.stop or None,
            "priority": options.priority,
            "deadline_ms": options.deadline_ms,
            "tenant": options.tenant,
        },
        protocol=options.protocol,
        url=options.url,
        model_name=options.model_name,
        as_json=options.json,
    )


def _run_health(options: argparse.Namespace) -> None:
    from charonia.launch.commands.health import health

    health(
        options.url,
        options.metrics_url,
        options.model_name,
        wait_s=options.wait,
        as_json=options.json,
    )


def _run_metrics(options: argparse.Namespace) -> None:
    from charonia.launch.commands.metrics import serve_metrics

    serve_metrics(options.model_repository, options.triton, options.address, options.port)


def _run_simulate(options: argparse.Namespace) -> None:
    from charonia.launch.commands.simulate import SimulateOptions, simulate
    from charonia.simulate.workload import Shape

    simulate(
        SimulateOptions(
            trace=options.trace,
            step_times=options.step_times,
            policies=options.policies,
            settings=options.settings,
            kv_tokens=options.kv_tokens,
            shape=Shape(
                num_requests=options.requests,
                rate=options.rate,
                arrivals=options.arrivals,
                burstiness=options.burstiness,
                num_tenants=options.tenants,
                num_priorities=options.priorities,
                deadline_ms=options.deadline_ms,
                max_tokens=options.max_tokens,
                adversary=options.adversary,
            ),
            by=options.by,
            seed=options.seed,
            output=options.output,
        )
    )


def _run_replay(options: argparse.Namespace) -> None:
    from charonia.launch.commands.replay import replay

    replay(options.journal, options.show)


def _run_demo(options: argparse.Namespace) -> None:
    from charonia.launch.commands.demo import run_demo

    run_demo()


def _number(kind: type[N], text: str, accepted: str, is_accepted: Callable[[N], bool]) -> N:
    """Read a number; of a ValueError argparse would tell by the name of a function of ours."""
    with contextlib.suppress(ValueError):
        value = kind(text)
        if is_accepted(value):
            return value
    raise argparse.ArgumentTypeError(f"{shown(text)} is not {accepted}")


def _seconds(text: str) -> float:
    return _number(float, text, "a number of seconds from 0 on", lambda value: 0 <= value < inf)


def _positive(text: str) -> int:
    accepted = f"a number from 1 to {_MAX_INTEGER}"
    return _number(int, text, accepted, lambda value: 1 <= value <= _MAX_INTEGER)


def _positive_float(text: str) -> float:
    return _number(float, text, "a number above 0", lambda value: 0 < value < inf)


def _share(text: str) -> float:
    return _number(float, text, "a share from 0 to below 1", lambda value: 0 <= value < 1)


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    low, high = _positive(first), _positive(last or first)
    if low > high:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a range A:B with A up to B")
    return low, high


def _port(text: str) -> int:
    accepted = "a port from 0 to 65535; 0 takes a free one"
    return _number(int, text, accepted, lambda value: 0 <= value < 65536)


if __name__ == "__main__":
    sys.exit(main())
