"""The `charonia` command.

Owns its exit codes and that an expected error is one line. Must not know what a command's arguments
are (`arguments/`), nor how anything is done: every command's work is in a module of its own,
imported when it is called.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from charonia import __version__
from charonia.errors import CharoniaError
from charonia.launch.commands.arguments.client import (
    add_demo,
    add_generate,
    add_health,
    add_metrics,
    add_top,
)
from charonia.launch.commands.arguments.server import (
    add_drain,
    add_gateway,
    add_log_level,
    add_reload,
    add_serve,
)
from charonia.launch.commands.arguments.simulation import add_replay, add_simulate
from charonia.launch.commands.log_printer import LogPrinter

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_FAILING = ("strict", "surrogateescape")
"""Error handlers of a stream that fail with what its encoding lacks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in _FAILING:
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does
    options = build_parser().parse_args(arguments)
    try:
        options.run(options)
    except CharoniaError as error:
        _complain(error, options)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read stdout has seen enough, for example `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk, a file that may not be read
        _complain(error, options)
        return EXIT_FAILURE
    return 0


def _complain(error: Exception, options: argparse.Namespace) -> None:
    """Print an error as the command's log is printed."""
    if getattr(options, "log_format", "text") == "json":
        LogPrinter("json").say(f"error: {error}")
    else:
        print(f"charonia: {error}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(
        prog="charonia", description="Serve large language models with NVIDIA Triton."
    )
    parser.add_argument("--version", action="version", version=f"charonia {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_serve(commands)
    add_gateway(commands)
    add_generate(commands)
    add_health(commands)
    add_top(commands)
    add_metrics(commands)
    add_reload(commands)
    add_drain(commands)
    add_log_level(commands)
    add_simulate(commands)
    add_replay(commands)
    add_demo(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
