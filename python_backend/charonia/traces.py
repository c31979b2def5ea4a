"""Traces: the arrivals and lengths of requests, and the times of an engine's steps.

Owns the formats of both files. Knows nothing about who writes or reads them. A trace has no text:
common prefixes are recognized by the ids of their blocks.

Requests are JSON lines, one per request, in the format of Mooncake's traces (Qin et al. 2025,
"Mooncake", FAST '25) with more keys, or a CSV file of Azure's Public Dataset of language models::

    {"timestamp":1250.0,"input_length":700,"output_length":90,"hash_ids":[0,17],"tenant":"search"}

Steps are JSON lines, too, with an array each, see `StepRecord`. Both files may be compressed
(`.gz`).
"""

import csv
import gzip
import io
import zlib
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
    """One request of a trace. Unknown keys are ignored.

    Attributes:
        timestamp: its arrival, in milliseconds.
        input_length, output_length: prompt tokens and generated tokens; 0 generated tokens if the
            request was refused.
        hash_ids: one id per block of the prompt; the last block may be partial. Prompts with equal
            first ids have equal prefixes.
        hash_block_length: tokens of such a block; 0 if the file does not give it.
        max_tokens: requested limit of generated tokens; 0 is `output_length`.
        priority, deadline_ms, tenant: as the request's parameters; a deadline of 0 is none.
        outcome: "stop", "length", or the kind of the error that it ended with.
        intake_ms, queue_ms, ttft_ms, total_ms: time until the scheduler had it, until its first
            step, its first token and its end; None if not measured.
    """

    timestamp: float
    input_length: _InputLength
    output_length: _Length
    hash_ids: list[int] = []
    hash_block_length: _Length = 0
    max_tokens: _Length = 0
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""
    priority: Annotated[int, msgspec.Meta(ge=-_MAX_INTEGER, le=_MAX_INTEGER)] = 0
    deadline_ms: Annotated[int, msgspec.Meta(ge=0, le=_MAX_INTEGER)] = 0
    outcome: str = ""
    intake_ms: float | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None


class _AzureRequest(msgspec.Struct, frozen=True):
    """One line of an Azure trace."""

    came_at: str = msgspec.field(name="TIMESTAMP")
    input_length: _InputLength = msgspec.field(name="ContextTokens")
    output_length: _Length = msgspec.field(name="GeneratedTokens")


class StepWork(NamedTuple):
    """The size of a step.

    Attributes:
        num_rows: requests. num_tokens: tokens of all rows, drafts included.
        num_context: cached tokens that attention reads, including those of this step: the sum over
            rows of the positions up to their last token.
        num_pairs: pairs of a query and a key.
    """

    num_rows: int
    num_tokens: int
    num_context: int
    num_pairs: int


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One step as the scheduler saw it. Times are in seconds of one monotonic clock.

    Attributes:
        submitted_at: when it was sent to the engine. ended_at: when its result arrived.
        seconds: time in the engine.
        num_joins: rows that began with it. num_drafts: drafts of all rows.
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
        """Work of the step."""
        return StepWork(self.num_rows, self.num_tokens, self.num_context, self.num_pairs)


def read_requests(path: Path) -> list[TraceRequest]:
    """Read a trace of requests, in the order of their times.

    Raises:
        ConfigError: the file cannot be read, has no requests or is not a trace; the text names the
            line. An incomplete last line is left out, because its writer may have been killed.
    """
    name = path.name.removesuffix(".gz")
    requests = list(_azure(path) if name.endswith(".csv") else _lines(path, TraceRequest))
    if not requests:
        raise ConfigError(f"{path.name} has no requests")
    return sorted(requests, key=lambda request: request.timestamp)


def read_steps(path: Path) -> list[StepRecord]:
    """Read a record of steps.

    Raises:
        ConfigError: as `read_requests`, but the file may be empty.
    """
    return list(_lines(path, StepRecord))


def write_requests(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a trace of requests, compressed if the name ends with .gz."""
    encoder = msgspec.json.Encoder()
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        for request in requests:
            file.write(encoder.encode(request) + b"\n")


def block_length(requests: Iterable[TraceRequest]) -> int:
    """Tokens of the blocks that have ids; 0 if no request has ids.

    Raises:
        ConfigError: the file does not give it, and no usual length fits all requests.
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
    """Return whether a line is the incomplete last line of a file."""
    is_json = isinstance(error, msgspec.ValidationError)
    return not line.endswith(b"\n") and isinstance(error, msgspec.DecodeError) and not is_json


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with _open(path) as file:
            yield from enumerate(file, start=1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path.name} cannot be read: {reason}") from None


def _azure(path: Path) -> Iterator[TraceRequest]:
    try:
        yield from _azure_requests(path)
    except csv.Error as error:
        raise ConfigError(f"{path.name} cannot be read: {error}") from None


def _azure_requests(path: Path) -> Iterator[TraceRequest]:
    text = "".join(line.decode(errors="replace") for _, line in _numbered(path))
    rows = csv.DictReader(io.StringIO(text))
    if missing := [name for name in _AZURE_COLUMNS if name not in (rows.fieldnames or ())]:
        raise ConfigError(f"{path.name} has no column {missing[0]!r}")
    first: datetime | None = None
    for row in rows:
        try:
            values = {name: row[name] for name in _AZURE_COLUMNS}
            request = msgspec.convert(values, _AzureRequest, strict=False)
            # The file has seven digits of a second; Python takes six.
            came_at = datetime.fromisoformat(request.came_at[:26])
            first = first or came_at
            yield TraceRequest(
                timestamp=(came_at - first).total_seconds() * 1000,
                input_length=request.input_length,
                output_length=request.output_length,
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path.name}, line {rows.line_num}: {error}") from None
