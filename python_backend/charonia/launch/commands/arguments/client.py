"""Arguments of the commands that use a running server (generate, health, top, …), and of demo.

Owns the grammar and the translation of options into the arguments of each command's own module.
That module is imported when the command is called.
"""

import argparse
from pathlib import Path

from charonia.launch.commands.arguments.values import address, port, positive_float, seconds


def add_generate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `charonia generate`."""
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
        "--deadline-ms", type=int, metavar="N", help="time limit of the request, in milliseconds"
    )
    generate.add_argument("--tenant", metavar="NAME", help="tenant of the request")
    generate.add_argument("--protocol", choices=("grpc", "http"), default="grpc")
    generate.add_argument(
        "--url", metavar="U", help="host:port (default: 127.0.0.1:8001, with http 127.0.0.1:8000)"
    )
    generate.add_argument(
        "--model-name",
        default="scheduler",
        metavar="M",
        help="a model that streams: scheduler (default), llm, or a --served-model-name of serve",
    )
    generate.add_argument("--json", action="store_true", help="print one JSON object per chunk")
    generate.set_defaults(run=_run_generate)


def add_health(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `charonia health`."""
    health = commands.add_parser(
        "health",
        help="check whether a running server serves",
        description="Check whether a running server, its scheduler and its engine are ready, and "
        "generate one token. Exit with 0 if all of it works, else with 1.",
    )
    health.add_argument(
        "--url",
        type=address,
        default="127.0.0.1:8000",
        metavar="U",
        help="host:port of HTTP (default: %(default)s)",
    )
    health.add_argument(
        "--metrics-url",
        type=address,
        metavar="U",
        help="host:port of the metrics (default: port 8002 of --url)",
    )
    health.add_argument("--model-name", default="scheduler", metavar="M")
    health.add_argument("--json", action="store_true", help="print one JSON object")
    health.add_argument(
        "--wait", type=seconds, default=0.0, metavar="SECONDS", help="keep retrying for this long"
    )
    health.set_defaults(run=_run_health)


def add_top(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `charonia top`."""
    top = commands.add_parser(
        "top",
        help="watch what a running server does",
        description="Watch what a running server does: requests, tokens per second, latencies, KV "
        "cache, speculation, engine, tenants. It reads the metrics page only. Ctrl-C ends it.",
    )
    top.add_argument(
        "--url",
        type=address,
        default="127.0.0.1:8002",
        metavar="U",
        help="host:port of the metrics (default: %(default)s)",
    )
    top.add_argument(
        "--interval",
        type=positive_float,
        default=1.0,
        metavar="SECONDS",
        help="time between two looks (default: %(default)g)",
    )
    top.add_argument("--once", action="store_true", help="print one screen, and end")
    top.set_defaults(run=_run_top)


def add_metrics(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `charonia metrics`."""
    metrics = commands.add_parser(
        "metrics",
        help="serve the metrics of a tritonserver that was started by hand",
        description="Serve the metrics page of `charonia serve` for a tritonserver that was "
        "started by hand: tritonserver's own metrics, and those that only the scheduler knows.",
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
        "--port", type=port, default=9400, metavar="N", help="default: %(default)s"
    )
    metrics.set_defaults(run=_run_metrics)


def add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `charonia demo`."""
    demo = commands.add_parser(
        "demo",
        help="serve the demo model, stream three completions, stop",
        description="Serve the demo model on free ports, stream three completions, print their "
        "speed, and stop.",
    )
    demo.set_defaults(run=_run_demo)


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


def _run_top(options: argparse.Namespace) -> None:
    from charonia.launch.commands.top import top

    top(options.url, interval_s=options.interval, once=options.once)


def _run_metrics(options: argparse.Namespace) -> None:
    from charonia.launch.commands.metrics import serve_metrics

    serve_metrics(options.model_repository, options.triton, options.address, options.port)


def _run_demo(options: argparse.Namespace) -> None:
    from charonia.launch.commands.demo import run_demo

    run_demo()
