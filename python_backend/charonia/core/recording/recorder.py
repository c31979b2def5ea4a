"""A record of the traffic and of the engine's steps, for `charonia simulate`.

Owns the two files and their contents. Must not know text: of a prompt it writes keyed hashes of its
blocks, and the key is lost with the process. Errors of the files never stop requests.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from io import SEEK_END, FileIO
from pathlib import Path

import msgspec

from charonia.control.cache import BlockHasher
from charonia.core.generation_request import GenerationRequest, cache_scope
from charonia.core.output.outputs import Chunk
from charonia.core.replica.step_work import WorkMeter
from charonia.errors import CharoniaError, ConfigError
from charonia.events import warning_event
from charonia.protocol import Executor, FinishReason, Opening, Pending, StepPlan, StepResult
from charonia.traces import StepRecord, TraceRequest

REQUESTS, STEPS = "requests.jsonl", "steps.jsonl"
BLOCK_LENGTH = 64
"""Tokens of a prompt that one hash id stands for."""
FLUSH_EVERY_S = 1.0
_ID_BITS = 52  # so that every JSON reader keeps them exact
_PIECE = 2**16
_MAX_LINES = 4096  # in the buffer


class Recorder:
    """Appends to the files of a directory, which it makes if necessary. For all threads.

    Args:
        max_bytes: most bytes that this recorder writes; then it ends.
        log: takes one line.

    Raises:
        ConfigError: the directory or a file cannot be written.
    """

    def __init__(self, directory: Path, max_bytes: int, *, log: Callable[[str], None]) -> None:
        self._log = log
        self._left = max_bytes
        self._hasher = BlockHasher(secrets.token_bytes(16), BLOCK_LENGTH)
        self._encode = msgspec.json.Encoder().encode
        self._lock = threading.Lock()
        self._lines: dict[str, list[bytes]] = {REQUESTS: [], STEPS: []}
        self._flushed_at = time.monotonic()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._files = {name: _open(directory / name) for name in self._lines}
        except OSError as error:
            raise ConfigError(
                f"record_dir: {directory} cannot be written: {error.strerror}"
            ) from None

    def follow(self, request: GenerationRequest, arrived_at: float) -> "RecordedRequest":
        """Begin the record of a request that is about to be admitted and is no probe.

        Args:
            arrived_at: its arrival, by the monotonic clock.
        """
        line = self._line_of(request, time.monotonic() - arrived_at)
        return RecordedRequest(line, arrived_at, self)

    def note_end(self, line: TraceRequest, last: Chunk) -> None:
        """Record a request at its end.

        Args:
            line: its record so far. last: its last chunk.
        """
        outcome = last.finish_reason or (last.error.kind if last.error else "")
        line = msgspec.structs.replace(line, outcome=outcome)
        if last.timing is not None:
            line = msgspec.structs.replace(
                line,
                queue_ms=_milliseconds(last.timing.get("queue_seconds")),
                ttft_ms=_milliseconds(last.timing.get("first_token_seconds")),
                total_ms=_milliseconds(last.timing.get("total_seconds")),
            )
        self._write(REQUESTS, line)

    def note_step(self, record: StepRecord) -> None:
        """Record a step."""
        self._write(STEPS, record)

    def flush(self, *, now: float | None = None) -> None:
        """Write the buffer.

        Args:
            now: by the monotonic clock; does nothing within `FLUSH_EVERY_S` of the last flush. None
                always writes.
        """
        with self._lock:
            if now is None or now - self._flushed_at >= FLUSH_EVERY_S:
                self._flush()

    def close(self) -> None:
        """Write the buffer and stop."""
        with self._lock:
            self._flush()
            self._stop()

    def _line_of(self, request: GenerationRequest, age_s: float) -> TraceRequest:
        params, keys = request.params, list[bytes]()
        self._hasher.extend(keys, request.prompt_ids, cache_scope(params))
        return TraceRequest(
            timestamp=round((time.time() - age_s) * 1000, 3),
            input_length=len(request.prompt_ids),
            output_length=0,
            hash_ids=[int.from_bytes(key, "little") & ((1 << _ID_BITS) - 1) for key in keys],
            hash_block_length=BLOCK_LENGTH,
            max_tokens=params.max_tokens,
            tenant=params.tenant,
            priority=params.priority,
            deadline_ms=params.deadline_ms or 0,
        )

    def _write(self, name: str, record: TraceRequest | StepRecord) -> None:
        line = self._encode(record) + b"\n"
        with self._lock:
            if not self._files:
                return
            self._left -= len(line)
            if self._left < 0:
                self._flush()
                self._stop("record_max_bytes are written")
                return
            self._lines[name].append(line)
            if len(self._lines[name]) >= _MAX_LINES:
                self._flush()

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        try:
            for name, file in self._files.items():
                lines, self._lines[name] = self._lines[name], []
                data = b"".join(lines)
                while data:  # a full disk may take only a part
                    data = data[file.write(data) :]
        except OSError as error:
            self._stop(error.strerror)

    def _stop(self, reason: str | None = None) -> None:
        if not self._files:
            return
        files, self._files = self._files, {}
        for file in files.values():
            with contextlib.suppress(OSError):
                file.close()
        if reason is not None:
            self._log(warning_event("recording_stopped", reason=reason))


class RecordedRequest:
    """A request whose line is written at its end.

    Args:
        line: its record so far. arrived_at: by the monotonic clock.
    """

    def __init__(self, line: TraceRequest, arrived_at: float, recorder: Recorder) -> None:
        self._line = line
        self._arrived_at = arrived_at
        self._recorder = recorder
        self._intake_s = 0.0
        self._num_tokens = 0
        self._reason: FinishReason = "cancelled"  # of the last sample that was not cancelled

    def note_taken_in(self) -> None:
        """Note that the core has the request: it can be in the next plan."""
        self._intake_s = time.monotonic() - self._arrived_at

    def note_refused(self, error: CharoniaError) -> None:
        """Note that the request was refused."""
        self._recorder.note_end(self._line, Chunk("", error=error))

    def note(self, chunk: Chunk) -> None:
        """Note a chunk of it."""
        self._num_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None and chunk.finish_reason != "cancelled":
            self._reason = chunk.finish_reason
        if chunk.is_final:
            line = msgspec.structs.replace(
                self._line,
                output_length=self._num_tokens,
                intake_ms=_milliseconds(self._intake_s),
            )
            last = chunk
            if chunk.finish_reason == "cancelled":
                last = msgspec.structs.replace(chunk, finish_reason=self._reason)
            self._recorder.note_end(line, last)


class RecordingExecutor:
    """Wraps an executor and records its steps.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(self, executor: Executor, recorder: Recorder, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._recorder = recorder
        self._clock = clock
        self._meter = WorkMeter()

    def open(self, *, replace: bool, on_done: Callable[[], None]) -> Opening:
        """See `Executor`."""
        return self._executor.open(replace=replace, on_done=on_done)

    def submit(self, plan: StepPlan) -> Pending:
        """See `Executor`."""
        submitted_at = self._clock()
        pending = self._executor.submit(plan)
        work = self._meter.measure(plan)

        def note(result: StepResult) -> None:
            self._meter.note_result(plan, result)
            self._recorder.note_step(
                StepRecord(
                    submitted_at,
                    self._clock(),
                    result.seconds,
                    len(plan.joins),
                    sum(row.num_drafts for row in plan.rows),
                    *work,
                )
            )

        return _Recorded(pending, note)

    def check(self) -> None:
        """See `Executor`."""
        self._executor.check()

    def close(self) -> None:
        """See `Executor`."""
        self._executor.close()


class _Recorded:
    def __init__(self, pending: Pending, note: Callable[[StepResult], None]) -> None:
        self._pending = pending
        self._note = note

    def result(self, timeout: float | None) -> StepResult:
        """See `Pending`."""
        result = self._pending.result(timeout)
        self._note(result)
        return result


def _open(path: Path) -> FileIO:
    """Open a file to append to. An unfinished last line, of a killed process, is cut off.

    Without one nothing is cut: an older scheduler may append to the file meanwhile.
    """
    file = path.open("a+b", buffering=0)
    end = size = file.seek(0, SEEK_END)
    while end:
        begin = max(0, end - _PIECE)
        file.seek(begin)
        newline = (file.read(end - begin) or b"").rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        file.truncate(end)
    return file


def _milliseconds(seconds: object) -> float | None:
    return round(seconds * 1000, 3) if isinstance(seconds, float) else None
