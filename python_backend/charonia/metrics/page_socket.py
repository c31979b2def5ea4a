"""The socket through which the metrics page asks the scheduler for metrics.

Owns the messages, and both ends. Must not know what the numbers mean.

The scheduler updates Triton's page, and answers with the metrics that are not on it. Triton's page
is read after the answer, so it has everything counted before the question.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from charonia.sockets.answering import answer_each
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from charonia.sockets.local import SOCKET_SUFFIX, connect, is_same_user, listen
from charonia.sockets.server import Server

METRICS_SOCKET = f"metrics{SOCKET_SUFFIX}"
"""Name of the socket, beside the scheduler's model.py."""
MAX_ANSWER_BYTES = 2**20
_QUESTION = b"charonia: metrics"


class Sample(NamedTuple):
    """A value that is not on Triton's page.

    Attributes:
        metric: the metric's name.
        suffix: what follows it in the sample's name, such as `_bucket`.
        labels: those beside the ones that all series have.
        value: at this moment.
    """

    metric: str
    suffix: str
    labels: dict[str, str]
    value: float


decode_samples = msgspec.msgpack.Decoder(list[Sample]).decode
"""Decodes an answer. Raises ValueError, RecursionError: it is not one of a scheduler."""


def serve_metrics(
    path: Path, read: Callable[[], Sequence[Sample]], *, log: Callable[[str], None]
) -> Server:
    """Answer questions at a socket, until the server that this returns is closed.

    Args:
        path: where the socket is made; an old one is replaced.
        read: updates Triton's page and returns the answer. Called in several threads.
        log: takes one line, from any thread.

    Raises:
        OSError: the socket cannot be made.
    """

    def answer() -> bytes:
        return msgspec.msgpack.encode(read())

    def serve(connection: Connection) -> None:
        answer_each(connection, lambda message: answer if message == _QUESTION else None)

    server = Server(listen(path), is_same_user, serve, log=log, max_bytes=MAX_ANSWER_BYTES)
    server.start()
    return server


def ask_schedulers(paths: Sequence[Path], timeout: float) -> list[list[Sample] | None]:
    """Ask the schedulers at these sockets; None for one that does not answer.

    Args:
        timeout: seconds for all of them together.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        channels = [_ask(path, stack) for path in paths]
        return [_answer_of(channel, deadline) if channel else None for channel in channels]


def _ask(path: Path, stack: contextlib.ExitStack) -> Channel | None:
    """Send the question without waiting; None if nobody takes it."""
    try:
        channel = stack.enter_context(
            contextlib.closing(connect(path, max_bytes=MAX_ANSWER_BYTES, waits=False))
        )
        channel.send(_QUESTION, timeout=0.0)
    except OSError:
        return None
    return channel


def _answer_of(channel: Channel, deadline: float) -> list[Sample] | None:
    try:
        answer = channel.receive(max(deadline - time.monotonic(), 0.0))
        return None if answer is None else decode_samples(answer)
    except (OSError, ValueError, RecursionError):
        return None
