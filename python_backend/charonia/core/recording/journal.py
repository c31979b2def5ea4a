"""A journal of the scheduler's calls, for `charonia replay`.

Owns the entries and their file. Must not know the writer of the entries, nor how they are replayed.

A scheduler has no clock, no thread and no random choice: all its input comes with calls. So the
journal has its calls in order, each with its result. A header comes first. Each entry is its length
in four bytes and its MessagePack::

    HEADER  Opened  Added  Planned  Applied  Added  Planned  Finished  Applied  Reset  Planned  ...

Token ids are replaced by numbers in the order in which they first appear, unless the real ones are
asked for. That is enough, since a scheduler only compares and hashes them. Values that only the
engine needs (temperatures, biases) are left out.
"""

import contextlib
import os
import secrets
import struct
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from hashlib import blake2b
from io import FileIO
from math import inf
from pathlib import Path

import msgspec
from msgspec.structs import replace

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import DraftCounts, Limits, LoadShedding, Scheduler, Tiers
from charonia.control.cache import BlockHasher
from charonia.control.policies import Late
from charonia.errors import ConfigError
from charonia.events import warning_event
from charonia.protocol import CacheRange, KeptBlocks, RowSampling, StepPlan, StepResult

HEADER = b"charonia journal 2\n"
FRAME = struct.Struct(">I")
FLUSH_EVERY_S = 1.0
_FLUSH_BYTES = 2**20
_NO_SAMPLING = RowSampling(seed=0)
_END_BYTES = 512  # reserved for the last entry


class Entry(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag=True,
    forbid_unknown_fields=True,
):
    """One call of the scheduler. `raised`: the class of the exception that it raised, if any."""

    raised: str = ""


class Opened(Entry, frozen=True, kw_only=True):
    """A scheduler was made, with these arguments of `make_scheduler`."""

    engine_args: EngineArgs
    scheduler_args: SchedulerArgs
    limits: Limits
    hash_secret: bytes
    epoch: int
    kept: KeptBlocks | None


class Carried(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """State that a request brings along from an earlier engine. See `Request`."""

    is_demoted: bool = False
    num_passed: int = 0
    num_preemptions: int = 0
    num_restarts: int = 0
    num_known_at_death: int | None = None
    num_cached: int = 0
    started_at: float | None = None
    awaits_until: float = inf
    end_awaited: int = 0
    refused_from: float = inf
    drafts: DraftCounts = msgspec.field(default_factory=DraftCounts)


class Added(Entry, frozen=True, kw_only=True):
    """`Scheduler.add`. See `Request`."""

    key: str
    group: str
    index: int = 0
    token_ids: list[int]
    num_prompt: int
    max_tokens: int
    min_tokens: int = 0
    stop_ids: list[int] = []
    arrived_at: float
    tenant: str = ""
    priority: int = 0
    expires_at: float = inf
    cache_scope: bytes = b""
    takes_hits: bool = True
    retention: list[CacheRange] = []
    speculates: bool = True
    expected_ids: list[int] = []
    is_probe: bool = False
    carried: Carried = Carried()


class Finished(Entry, frozen=True, kw_only=True):
    """`Scheduler.finish` of a live request."""

    key: str
    is_complete: bool


class Planned(Entry, frozen=True, kw_only=True):
    """`Scheduler.plan`.

    Attributes:
        plan: the scheduler's decisions, without data that it only passes on, and without secrets.
        num_known: number of tokens of each request that joins a row; earlier entries have the
            tokens.
        late: keys of requests that it dropped as late.
    """

    now: float
    shedding: LoadShedding
    plan: StepPlan | None
    num_known: list[int] = []
    late: list[str] = []


class Applied(Entry, frozen=True, kw_only=True):
    """`Scheduler.apply`, with the result except its log-probabilities."""

    now: float
    result: StepResult


class Reset(Entry, frozen=True, kw_only=True):
    """`Scheduler.reset`."""

    limits: Limits | None
    epoch: int
    kept: KeptBlocks | None


class Blamed(Entry, frozen=True, kw_only=True):
    """`Scheduler.blame`. `guilty`: the key of a request."""

    guilty: str | None


class Weighed(Entry, frozen=True, kw_only=True):
    """The weight of a tenant, from the next entry on."""

    tenant: str
    weight: float


class Ended(Entry, frozen=True, kw_only=True):
    """The end of the journal. `reason`: why it ends before the scheduler does, or empty."""

    reason: str


AnyEntry = Opened | Added | Finished | Planned | Applied | Reset | Blamed | Weighed | Ended


def planned(
    plan: StepPlan | None,
    late: Iterable[Late],
    *,
    now: float,
    shedding: LoadShedding,
    names: Callable[[Iterable[int]], list[int]] = list,
) -> Planned:
    """The entry of a plan.

    Args:
        late: requests that it dropped as late. now, shedding: its inputs.
        names: replaces token ids, see `Journal.names_of`.
    """
    return Planned(
        now=now,
        shedding=shedding,
        plan=None if plan is None else _decided(plan, names),
        num_known=[] if plan is None else [len(join.token_ids) for join in plan.joins],
        late=[one.request.key for one in late],
    )


def _decided(plan: StepPlan, names: Callable[[Iterable[int]], list[int]]) -> StepPlan:
    return replace(
        plan,
        joins=[replace(join, token_ids=[], sampling=_NO_SAMPLING) for join in plan.joins],
        saves=[replace(save, key=b"") for save in plan.saves],
        loads=[replace(load, key=b"") for load in plan.loads],
        rows=[
            replace(row, draft_ids=names(row.draft_ids)) if row.draft_ids else row
            for row in plan.rows
        ],
    )


class Journal:
    """Writes a new file in a directory, which it makes if necessary. For one thread.

    Attributes:
        scheduler: its calls are written; the calls of the one before it are not.
        has_token_ids: whether real token ids are written.

    Args:
        max_bytes: most bytes that it writes; then it ends.
        log: takes one line.

    Raises:
        ConfigError: the directory or the file cannot be written.
    """

    def __init__(
        self, directory: Path, max_bytes: int, *, has_token_ids: bool, log: Callable[[str], None]
    ) -> None:
        self.scheduler: Scheduler | None = None
        self._left = max_bytes - len(HEADER) - _END_BYTES
        self.has_token_ids = has_token_ids
        self._log = log
        self._names: dict[int, int] = {}
        self._scope_key = secrets.token_bytes(16)
        self._weights: dict[str, float] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._buffer = bytearray(HEADER)
        self._flushed_at = 0.0
        now = datetime.now(UTC)
        name = f"schedule-{now:%Y%m%dT%H%M%S.%f}-{os.getpid()}.journal"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file: FileIO | None = FileIO(directory / name, "xb", opener=_for_its_owner)
        except OSError as error:
            raise ConfigError(
                f"record_dir: {directory} cannot be written: {error.strerror}"
            ) from None

    def names_of(self, token_ids: Iterable[int]) -> list[int]:
        """The numbers that are written in place of token ids."""
        if self.has_token_ids:
            return list(token_ids)
        names = self._names
        return [names.setdefault(token_id, len(names)) for token_id in token_ids]

    def scope_of(self, scope: bytes) -> bytes:
        """The bytes that are written in place of a cache scope, which may be a secret."""
        if self.has_token_ids or not scope:
            return scope
        return blake2b(scope, digest_size=8, key=self._scope_key).digest()

    def new_hasher(self, secret: bytes, block_size: int) -> BlockHasher:
        """A hasher of the written numbers: eviction policies use bits of the hash."""
        if self.has_token_ids or self._file is None:
            return BlockHasher(secret, block_size)
        return BlockHasher(secret, block_size, self.names_of, self.scope_of)

    def kept_of(self, tiers: Tiers | None) -> KeptBlocks | None:
        """The contents of slower tiers, as they are written.

        Their keys are hashes of real token ids, since other processes use them, too. Without real
        token ids the journal stops.
        """
        if tiers is None:
            return None
        if not self.has_token_ids:
            self.stop("slower tiers need record_token_ids")
        return tiers.describe()

    def begin(self, scheduler: Scheduler, opened: Opened) -> None:
        """Write the calls of this scheduler from now on, unless the journal has ended."""
        if self._file is not None:
            self.scheduler = scheduler
            self.write(opened)

    def weighing(self, weight_of: Callable[[str], float]) -> Callable[[str], float]:
        """Wrap a function of tenants' weights, so that changes of its results are written."""

        def weigh(tenant: str) -> float:
            weight = weight_of(tenant)
            if self._file is not None and self._weights.get(tenant) != weight:
                self._weights[tenant] = weight
                self.write(Weighed(tenant=tenant, weight=weight))
            return weight

        return weigh

    def write(self, entry: AnyEntry) -> None:
        """Append an entry."""
        if self._file is None:
            return
        before = len(self._buffer)
        try:
            self._append(entry)
        except Exception as error:
            self.fail(error)
            return
        self._left -= len(self._buffer) - before
        if self._left < 0:
            del self._buffer[before:]
            self.stop("record_max_bytes are written")
        elif len(self._buffer) >= _FLUSH_BYTES:
            self._flush()

    def flush(self, *, now: float) -> None:
        """Write the buffer, at most once in `FLUSH_EVERY_S`.

        Args:
            now: by the monotonic clock.
        """
        if now - self._flushed_at >= FLUSH_EVERY_S:
            self._flushed_at = now
            self._flush()

    def close(self) -> None:
        """Write the buffer and end the journal."""
        self._end("")

    def stop(self, reason: str) -> None:
        """End the journal and log the reason."""
        if self._file is not None:
            self._end(reason)
            self._log(warning_event("journal_stopped", reason=reason))

    def fail(self, error: Exception) -> None:
        """End the journal because of a bug in it, which must not harm requests."""
        self.stop(f"internal error: {type(error).__name__}: {error}")

    def _end(self, reason: str) -> None:
        if self._file is None:
            return
        with contextlib.suppress(Exception):  # this may be what failed
            self._append(Ended(reason=reason))
        self._flush()
        self._let_go()

    def _append(self, entry: AnyEntry) -> None:
        data = self._encode(entry)
        self._buffer += FRAME.pack(len(data)) + data

    def _flush(self) -> None:
        data, self._buffer = memoryview(self._buffer), bytearray()
        try:
            while data and self._file is not None:  # a full disk may take only a part
                data = data[self._file.write(data) :]
        except OSError as error:
            self._let_go()
            self._log(warning_event("journal_stopped", reason=error.strerror))

    def _let_go(self) -> None:
        """Close the file, and ignore its errors."""
        file, self._file, self.scheduler = self._file, None, None
        self._weights.clear()
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
