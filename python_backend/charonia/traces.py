"""Traces: which requests came and how long they were, and what an engine's steps took.

Owns the formats of both files. Must not know who writes or reads them. A trace has no text: prompts
that begin alike are known by ids of their blocks.

Requests are JSON lines, one per request, in the format of Mooncake's traces (Qin et al. 2025,
"Mooncake", FAST '25) with more keys, or a CSV file of Azure's Public Dataset of language models::

    {"timestamp":1250.0,"input_length":700,"output_length":90,"hash_ids":[0,17],"tenant":"search"}

Steps are JSON lines, too: an array each, see `StepRecord`. Either file may be compressed (`.gz`).
"""

import csv
import gzip
import io
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Annotated, NamedTuple, TypeVar

import msgspec

from charonia.errors import ConfigError

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BLOCK_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_MAX_INTEGER = 2**31 - 1
T = TypeVar("T")

_Length = Annotated[int, msgspec.Meta(ge=0, le=_MAX_INTEGER)]
_InputLength = Annotated[int, msgspec.Meta(ge=1, le=_MAX_INTEGER)]


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a trace. Keys that are not named here are ignored.

    Attributes:
        timestamp: when it came, in milliseconds.
        input_length, output_length: tokens of the prompt, and generated ones; no output where the
            request was refused.
        hash_ids: an id for each block of the prompt, the last one perhaps in part: prompts whose
            first ids are equal have equal prefixes.
        hash_block_length: tokens of such a block; 0 where the file does not say it.
        max_tokens: generated tokens that were asked for; 0 is those that there were.
        priority, deadline_ms, tenant: as the request's parameters; a deadline of 0 is none.
        outcome: "stop", "length", or the kind of the error that it ended with.
        intake_ms, queue_ms, ttft_ms, total_ms: until the scheduler had it, until its first step,
            its first token and its end, where that was measured.
    """

    timestamp: float
    input_length: _InputLength
    output_length: _Length
    hash_ids: list[int] = []
    hash_block_length: _Length = 0
    max_tokens: _Length = 0
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""
    priority: Annotated[int, msgspec.Meta(ge=-_MAX_INTEGER, le=_MAX_INTEGER)] = 0
    deadline_ms: Annotated[int, msgspec.Meta(ge=0, le=_MAX_INTEGER + 1)] = 0
    outcome: str = ""
    intake_ms: float | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None


class _AzureRequest(msgspec.Struct, frozen=True):
    """One line of Azure's."""

    came_at: str = msgspec.field(name="TIMESTAMP")
    input_length: _InputLength = msgspec.field(name="ContextTokens")
    output_length: _Length = msgspec.field(name="GeneratedTokens")


class StepWork(NamedTuple):
    """What there is to compute in a step.

    Attributes:
        num_rows: requests. num_tokens: of all rows, drafts included.
        num_context: cached tokens that attention reads, those of this step included: the sum over
            rows of the positions up to their last token.
        num_pairs: of a query and a key.
    """

    num_rows: int
    num_tokens: int
    num_context: int
    num_pairs: int


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One step as the scheduler saw it. Times are in seconds of one monotonic clock.

    Attributes:
        submitted_at: when it was handed to the engine. ended_at: when its result was there.
        seconds: of these, in the engine.
        num_joins: rows that began with it. num_drafts: tokens that were guessed, of all rows.
        num_rows, num_tokens, num_context, num_pairs: see `StepWork`.
    """

    submitted_at: float
    ended_at: float
    seconds: float
    num_joins: int
    num_drafts: int
    num_rows: int
    num_tokens: int
    num_context: int
    num_pairs: int

    @property
    def work(self) -> StepWork:
        """What it computed."""
        return StepWork(self.num_rows, self.num_tokens, self.num_context, self.num_pairs)


def read_requests(path: Path) -> list[TraceRequest]:
    """Read a trace of requests, in the order of their times.

    Raises:
        ConfigError: the file cannot be read, has no requests or is no trace; the line is named. A
            last line that is unfinished is left out: whoever wrote it was killed.
    """
    name = path.name.removesuffix(".gz")
    requests = list(_azure(path) if name.endswith(".csv") else _lines(path, TraceRequest))
    if not requests:
        raise ConfigError(f"{path.name} has no requests")
    return sorted(requests, key=lambda request: request.timestamp)


def read_steps(path: Path) -> list[StepRecord]:
    """Read a record of steps.

    Raises:
        ConfigError: as `read_requests`, but it may be empty.
    """
    return list(_lines(path, StepRecord))


def write_requests(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a trace of requests, compressed where the name ends with .gz."""
    encoder = msgspec.json.Encoder()
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        for request in requests:
            file.write(encoder.encode(request) + b"\n")


def block_length(requests: Iterable[TraceRequest]) -> int:
    """Tokens of the blocks that have ids; 0 where no request has any.

    Raises:
        ConfigError: the file does not say it, and no usual length fits all requests.
    """
    with_ids = [request for request in requests if request.hash_ids]
    if not with_ids:
        return 0
    if with_ids[0].hash_block_length:
        return with_ids[0].hash_block_length
    for length in _BLOCK_LENGTHS:
        if all(abs(one.input_length / length - len(one.hash_ids)) < 1 for one in with_ids):
            return length
    raise ConfigError(
        "hash_ids fit no block length of "
        f"{', '.join(map(str, _BLOCK_LENGTHS))} tokens; give hash_block_length in the trace"
    )


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _lines(path: Path, kind: type[T]) -> Iterator[T]:
    decoder = msgspec.json.Decoder(kind)
    for number, line in _numbered(path):
        if line.strip():
            try:
                yield decoder.decode(line)
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError, too
                if _is_cut(line, error):
                    return
                raise ConfigError(f"{path.name}, line {number}: {error}") from None


def _is_cut(line: bytes, error: Exception) -> bool:
    """Whether it is the end of a file whose writer did not come to the end of a line."""
    is_json = isinstance(error, msgspec.ValidationError)
    return not line.endswith(b"\n") and isinstance(error, msgspec.DecodeError) and not is_json


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with _open(path) as file:
            yield from enumerate(file, start=1)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path.name} cannot be read: {reason}") from None


def _azure(path: Path) -> Iterator[TraceRequest]:
    text = "".join(line.decode(errors="replace") for _, line in _numbered(path))
    rows = csv.DictReader(io.StringIO(text))
    if missing := [name for name in _AZURE_COLUMNS if name not in (rows.fieldnames or ())]:
        raise ConfigError(f"{path.name} has no column {missing[0]!r}")
    first: datetime | None = None
    for row in rows:
        try:
            values = {name: row[name] for name in _AZURE_COLUMNS}
            request = msgspec.convert(values, _AzureRequest, strict=False)
            # Seven digits of a second, where Python takes six.
            came_at = datetime.fromisoformat(request.came_at[:26])
            first = first or came_at
            yield TraceRequest(
                timestamp=(came_at - first).total_seconds() * 1000,
                input_length=request.input_length,
                output_length=request.output_length,
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path.name}, line {rows.line_num}: {error}") from None
