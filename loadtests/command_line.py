"""Common parts of the benchmarks' command lines.

Must not know what is measured.
"""

import argparse
import signal
import sys
from pathlib import Path


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows a script's docstring as it stands."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_output(parser: argparse.ArgumentParser, name: str, *endings: str) -> None:
    """Add the option that says where the run's files go, to be handed to `record.output_stem`.

    Args:
        name: of the run, by which its files are called otherwise.
        endings: of its files beside "json".
    """
    files = [f"STEM.{ending}" for ending in ("json", *endings)]
    parser.add_argument(
        "--output",
        type=Path,
        metavar="STEM",
        help=f"where {', '.join(files)} {'go' if endings else 'goes'} (default: "
        f"loadtests/results/DATE-{name}, numbered where that exists)",
    )


def positive(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def exit_on_sigterm(name: str) -> None:
    """Let SIGTERM end a script as an error does: what it has started is closed.

    Args:
        name: of the script, for the message.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"{name}: ended by SIGTERM"))
