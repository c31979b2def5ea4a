"""A rank other than the engine's own process: `python -m charonia.parallel.worker`.

Owns the process of such a rank, which joins, loads its part of the models, and follows. Must not
know plans, rows or sampling.

On its own machine the engine starts this process. On another machine you start it, or torchrun
does. There it runs until it is stopped: when an engine ends, it waits for the next one::

    CHARONIA_RANK_SECRET=... torchrun --nproc-per-node 2 -m charonia.parallel.worker \\
        --join 10.0.0.1:29400
"""

import argparse
import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from charonia.errors import CharoniaError
from charonia.parallel.handshake import SECRET_VARIABLE
from charonia.sockets.channel import Channel

_PR_SET_PDEATHSIG = 1
_TRY_AGAIN_S = 0.5
_SAY_AGAIN_S = 30.0
_CONNECT_TIMEOUT_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a rank of one engine, or of one engine after another; returns the exit code."""
    options = _parser().parse_args(arguments)
    if not os.environ.get(SECRET_VARIABLE):
        print(
            f"charonia: set {SECRET_VARIABLE} to the same text as for the engine", file=sys.stderr
        )
        return 2
    if options.parent is None:
        return _stay(sys.argv[1:] if arguments is None else list(arguments))
    _die_with(options.parent)
    try:
        _be_rank(options)
    except CharoniaError as error:
        _say(f"error: a rank ends: {error}")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m charonia.parallel.worker",
        description="Run a rank of an engine on another machine.",
        epilog=f"The environment variable {SECRET_VARIABLE} must hold the same text as the"
        " engine's. Under torchrun the ranks of one machine share its GPUs or cores.",
    )
    parser.add_argument(
        "--join", required=True, type=_address, metavar="HOST:PORT", help="the engine's rendezvous"
    )
    parser.add_argument("--model", metavar="DIR", help="the checkpoint's path on this machine")
    parser.add_argument(
        "--draft-model", metavar="DIR", help="the draft model's path on this machine"
    )
    # Internal: for processes that charonia starts.
    parser.add_argument("--local-index", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    return parser


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _stay(arguments: list[str]) -> int:
    """Run a rank of one engine after another, each time in a fresh process."""
    process: subprocess.Popen[bytes] | None = None

    def end(signum: int, frame: object) -> NoReturn:
        if process is not None:
            process.kill()
        sys.exit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, end)
    command = [sys.executable, "-m", "charonia.parallel.worker", *arguments]
    while True:
        process = subprocess.Popen([*command, "--parent", str(os.getpid())])
        process.wait()
        time.sleep(_TRY_AGAIN_S)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _be_rank(options: argparse.Namespace) -> None:
    """Raise RankLostError when the engine or another rank is lost."""
    from charonia.parallel.rank import be_rank  # imported here because it imports torch

    paths = {"model": options.model, "draft_model": options.draft_model}
    be_rank(
        lambda: _connect(*options.join),
        secret=os.environ[SECRET_VARIABLE],
        local_index=options.local_index,
        paths={name: path for name, path in paths.items() if path is not None},
        log=_say,
    )


def _connect(host: str, port: int) -> Channel:
    """Connect to the engine; wait until it listens."""
    said_at = -math.inf
    while True:
        try:
            return Channel(socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S))
        except OSError as error:
            if time.monotonic() - said_at > _SAY_AGAIN_S:
                said_at = time.monotonic()
                _say(f"no engine at {host}:{port} yet: {error.strerror or error}")
        time.sleep(_TRY_AGAIN_S)


def _say(line: str) -> None:
    """Print a line to stderr. If it cannot be printed, because of a full disk say, it is lost."""
    with contextlib.suppress(OSError):
        print(f"charonia: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
