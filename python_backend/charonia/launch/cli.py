"""The `charonia` command.

Owns its arguments, its exit codes and that an expected error is one line. Must not know how
anything is done: every command's work is in a module of its own, imported when it is called.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from charonia import __version__
from charonia.errors import CharoniaError

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


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
    _add_generate(commands)
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
    serve.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint directory (default: the demo pair)"
    )
    serve.add_argument(
        "--draft-model",
        type=Path,
        metavar="DIR",
        help="checkpoint of a small model of the same tokenizer that guesses tokens ahead",
    )
    serve.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    serve.add_argument(
        "--model-repository", type=Path, metavar="DIR", help="model repository to take a copy of"
    )
    serve.add_argument("--address", default="127.0.0.1", metavar="A", help="default: %(default)s")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        serve.add_argument(
            f"--{name}-port", type=_port, default=port, metavar="N", help="default: %(default)s"
        )
    serve.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="override an engine argument or a scheduler parameter; may be repeated",
    )
    serve.add_argument("--verbose", action="store_true", help="show all of tritonserver's log")
    serve.set_defaults(run=_run_serve)


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
    generate.add_argument("--protocol", choices=("grpc", "http"), default="grpc")
    generate.add_argument(
        "--url", metavar="U", help="host:port (default: 127.0.0.1:8001, with http 127.0.0.1:8000)"
    )
    generate.add_argument("--model-name", default="scheduler", metavar="M")
    generate.add_argument("--json", action="store_true", help="one JSON object per chunk")
    generate.set_defaults(run=_run_generate)


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    demo = commands.add_parser(
        "demo",
        help="serve the demo model, stream three completions, stop",
        description="Serve the demo model on free ports, stream three completions with their "
        "speed, and stop.",
    )
    demo.set_defaults(run=_run_demo)


def _run_serve(options: argparse.Namespace) -> None:
    from charonia.launch.repository import RepositoryOptions
    from charonia.launch.serve import ServeOptions, serve

    serve(
        RepositoryOptions(
            source=options.model_repository,
            model=options.model,
            draft_model=options.draft_model,
            dtype=options.dtype,
            settings=options.settings,
        ),
        ServeOptions(
            address=options.address,
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            metrics_port=options.metrics_port,
            is_verbose=options.verbose,
        ),
    )


def _run_generate(options: argparse.Namespace) -> None:
    from charonia.launch.generate import generate

    generate(
        options.prompt,
        {
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "seed": options.seed,
            "stop": options.stop or None,
        },
        protocol=options.protocol,
        url=options.url,
        model_name=options.model_name,
        as_json=options.json,
    )


def _run_demo(options: argparse.Namespace) -> None:
    from charonia.launch.demo import run_demo

    run_demo()


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 65536:
        raise argparse.ArgumentTypeError(f"{port} is not a port; 0 takes a free one")
    return port


if __name__ == "__main__":
    sys.exit(main())
