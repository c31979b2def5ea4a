"""The socket through which the metrics page asks the scheduler for metrics.

Owns the messages, and both ends. Must not know what the numbers mean.

The scheduler updates Triton's page, and answers with the metrics that are not on it. Triton's page
is read after the answer, so it has everything counted before the question.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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


class HistogramState(msgspec.Struct, frozen=True):
    """A histogram at one moment.

    Attributes:
        bounds: upper bounds of the buckets, ascending, without +Inf.
        counts: for each bound, and +Inf: the number of observations up to it.
        sum: of all observations.

    Raises:
        ValueError: the counts do not match the bounds.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds) + 1:
            raise ValueError(f"{len(self.counts)} counts for {len(self.bounds)} bounds")


class SchedulerMetrics(msgspec.Struct, frozen=True):
    """A scheduler's answer: what is not on Triton's page, by the family's name.

    Attributes:
        histograms: that the scheduler keeps. infos: the labels of `Metric.info`, with their values.
    """

    histograms: dict[str, HistogramState]
    infos: dict[str, dict[str, str]] = {}


decode_metrics = msgspec.msgpack.Decoder(SchedulerMetrics).decode
"""Decodes an answer. Raises ValueError, RecursionError: it is not one of a scheduler."""


def serve_metrics(
    path: Path, read: Callable[[], SchedulerMetrics], *, log: Callable[[str], None]
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


def ask_schedulers(paths: Sequence[Path], timeout: float) -> list[SchedulerMetrics | None]:
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


def _answer_of(channel: Channel, deadline: float) -> SchedulerMetrics | None:
    try:
        answer = channel.receive(max(deadline - time.monotonic(), 0.0))
        return None if answer is None else decode_metrics(answer)
    except (OSError, ValueError, RecursionError):
        return None
