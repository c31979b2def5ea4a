"""A journal of all that the scheduler decides from, for `charonia replay`.

Owns the file's format, and the scheduler that writes it. Must not know how it is replayed.

A scheduler has no clock, no thread and no random choice: whatever it knows came with a call. So the
journal has its calls, in order, with what each gave. Behind a header each entry is its length in
four bytes, and MessagePack::

    HEADER  Opened  Added  Planned  Applied  Added  Planned  Finished  Applied  Reset  Planned  ...

Token ids are replaced by numbers in the order in which they first appear, unless they are asked
for: a scheduler only compares them. What the engine needs beside them (temperatures, biases) is
left out.
"""

import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import fields
from datetime import UTC, datetime
from io import FileIO
from math import inf
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
from msgspec.structs import replace

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import Limits, Relief, Request, Scheduler, Tiers, Update
from charonia.errors import ConfigError
from charonia.events import event
from charonia.protocol import CacheRange, KeptBlocks, RowSampling, StepPlan, StepResult

HEADER = b"charonia journal 1\n"
FRAME = struct.Struct(">I")
FLUSH_EVERY_S = 1.0
_FLUSH_BYTES = 2**20
_NO_SAMPLING = RowSampling(seed=0)
_NO_SECRET = b"replay"
_CARRIED = (  # of a request that has lived with another engine
    "is_demoted",
    "num_passed",
    "num_preemptions",
    "num_restarts",
    "num_known_at_death",
    "num_cached",
    "started_at",
    "awaits_until",
    "refused_from",
)
_DEFAULTS = {one.name: one.default for one in fields(Request)}
P = ParamSpec("P")
T = TypeVar("T")


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """One call of the scheduler. `raised`: the name of the exception that it ended with."""

    raised: str = ""


class Opened(Entry, frozen=True, kw_only=True):
    """A scheduler was made. Its arguments are those of `make_scheduler`."""

    engine_args: EngineArgs
    scheduler_args: SchedulerArgs
    limits: Limits
    epoch: int
    kept: KeptBlocks | None


class Added(Entry, frozen=True, kw_only=True):
    """`Scheduler.add`. See `Request`.

    `carried` has the attributes of `_CARRIED` that are not as at first.
    """

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
    carried: dict[str, Any] = {}


class Finished(Entry, frozen=True, kw_only=True):
    """`Scheduler.finish` of a live request."""

    key: str
    is_complete: bool


class Planned(Entry, frozen=True, kw_only=True):
    """`Scheduler.plan`. `plan`: see `decided`. `late`: keys of requests that it gave up."""

    now: float
    relief: Relief
    plan: StepPlan | None
    late: list[str] = []


class Applied(Entry, frozen=True, kw_only=True):
    """`Scheduler.apply`, with the result but for its log-probabilities."""

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


AnyEntry = Opened | Added | Finished | Planned | Applied | Reset | Blamed | Weighed


def decided(plan: StepPlan, names: Callable[[Iterable[int]], list[int]] = list) -> StepPlan:
    """What the scheduler has decided in a plan: without what it only hands on, and without secrets.

    Args:
        names: of token ids, see `Journal.names_of`.
    """
    return replace(
        plan,
        joins=[
            replace(join, token_ids=names(join.token_ids), sampling=_NO_SAMPLING)
            for join in plan.joins
        ],
        saves=[replace(save, key=b"") for save in plan.saves],
        loads=[replace(load, key=b"") for load in plan.loads],
        rows=[
            replace(row, draft_ids=names(row.draft_ids)) if row.draft_ids else row
            for row in plan.rows
        ],
    )


class Journal:
    """Writes a file of its own in a directory, which is made. For one thread.

    Attributes:
        scheduler: the one whose calls are written; the one before it only hands its requests over.

    Args:
        max_bytes: that it writes at most; then it ends.
        has_token_ids: whether token ids are written as they are.
        log: takes one line.

    Raises:
        ConfigError: the directory or the file cannot be written.
    """

    def __init__(
        self, directory: Path, max_bytes: int, *, has_token_ids: bool, log: Callable[[str], None]
    ) -> None:
        self.scheduler: Scheduler | None = None
        self._left = max_bytes
        self._has_token_ids = has_token_ids
        self._log = log
        self._names: dict[int, int] = {}
        self._scopes: dict[bytes, int] = {}
        self._weights: dict[str, float] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._buffer = bytearray(HEADER)
        self._flushed_at = 0.0
        now = datetime.now(UTC)
        name = f"schedule-{now:%Y%m%dT%H%M%S.%f}-{os.getpid()}.journal"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file: FileIO | None = (directory / name).open("xb", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"record_dir: {directory} cannot be written: {error.strerror}"
            ) from None

    def names_of(self, token_ids: Iterable[int]) -> list[int]:
        """What is written in place of token ids."""
        if self._has_token_ids:
            return list(token_ids)
        names = self._names
        return [names.setdefault(token_id, len(names)) for token_id in token_ids]

    def scope_of(self, scope: bytes) -> bytes:
        """What is written in place of a cache's scope, which may be a secret."""
        if self._has_token_ids:
            return scope
        number = self._scopes.setdefault(scope, len(self._scopes)) if scope else ""
        return str(number).encode()

    def kept_of(self, tiers: Tiers | None) -> KeptBlocks | None:
        """What is written of slower tiers.

        The keys of what they hold were made of token ids: without these nobody would find them.
        """
        if tiers is None:
            return None
        kept = tiers.describe()
        if self._has_token_ids:
            return kept
        if any(tier.contents for tier in kept.tiers):
            self.stop("slower tiers hold blocks of before, which needs record_token_ids")
        return replace(kept, hash_secret=_NO_SECRET)

    def weighing(self, weight_of: Callable[[str], float]) -> Callable[[str], float]:
        """The same function; what it returns is written."""

        def weigh(tenant: str) -> float:
            weight = weight_of(tenant)
            if self._weights.get(tenant) != weight:
                self._weights[tenant] = weight
                self.write(Weighed(tenant=tenant, weight=weight))
            return weight

        return weigh

    def write(self, entry: AnyEntry) -> None:
        """Append an entry."""
        if self._file is None:
            return
        data = self._encode(entry)
        self._left -= FRAME.size + len(data)
        if self._left < 0:
            self.stop("record_max_bytes are written")
            return
        self._buffer += FRAME.pack(len(data)) + data
        if len(self._buffer) >= _FLUSH_BYTES:
            self._flush()

    def flush(self, *, now: float) -> None:
        """Write what was noted, unless it is too soon.

        Args:
            now: by the monotonic clock.
        """
        if now - self._flushed_at >= FLUSH_EVERY_S:
            self._flushed_at = now
            self._flush()

    def close(self) -> None:
        """Write what was noted, and no more."""
        self._flush()
        self.scheduler = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def stop(self, reason: str) -> None:
        """Write no more, and say why."""
        self.close()
        self._log(event("journal_stopped", reason=reason))

    def _flush(self) -> None:
        data, self._buffer = memoryview(self._buffer), bytearray()
        try:
            while data and self._file is not None:  # a disk that gets full may take a part
                data = data[self._file.write(data) :]
        except OSError as error:
            self.stop(str(error.strerror))


class JournaledScheduler(Scheduler):
    """A scheduler whose calls are written down.

    Args:
        journal: where. engine_args, scheduler_args: that it was made by. values: see `Scheduler`.
    """

    def __init__(
        self,
        journal: Journal,
        engine_args: EngineArgs,
        scheduler_args: SchedulerArgs,
        limits: Limits,
        **values: Any,
    ) -> None:
        self._journal = journal
        kept = journal.kept_of(values["tiers"])
        super().__init__(limits, **values)
        journal.scheduler = self
        journal.write(
            Opened(
                engine_args=engine_args,
                scheduler_args=scheduler_args,
                limits=limits,
                epoch=values["epoch"],
                kept=kept,
            )
        )

    def add(self, request: Request) -> None:
        """See `Scheduler`."""
        self._call(lambda _: self._added(request), super().add, request)

    def finish(self, key: str, *, is_complete: bool = False) -> Request | None:
        """See `Scheduler`."""
        if key not in self._live.by_key:
            return None
        entry = Finished(key=key, is_complete=is_complete)
        return self._call(lambda _: entry, super().finish, key, is_complete=is_complete)

    def plan(self, now: float) -> StepPlan | None:
        """See `Scheduler`."""
        num_late = len(self._late)

        def entry(plan: StepPlan | None) -> Planned:
            return Planned(
                now=now,
                relief=self.relief,
                plan=None if plan is None else decided(plan, self._journal.names_of),
                late=[one.request.key for one in self._late[num_late:]],
            )

        return self._call(entry, super().plan, now)

    def apply(self, result: StepResult, now: float) -> list[Update]:
        """See `Scheduler`."""

        def entry(_: list[Update] | None) -> Applied:
            names = self._journal.names_of
            rows = [
                replace(row, token_ids=names(row.token_ids), logprobs=None, prompt_logprobs=None)
                for row in result.rows
            ]
            return Applied(now=now, result=replace(result, rows=rows, collectives=None))

        return self._call(entry, super().apply, result, now)

    def reset(
        self, limits: Limits | None = None, *, epoch: int = 0, tiers: Tiers | None = None
    ) -> None:
        """See `Scheduler`."""
        entry = Reset(limits=limits, epoch=epoch, kept=self._journal.kept_of(tiers))
        self._call(lambda _: entry, super().reset, limits, epoch=epoch, tiers=tiers)

    def blame(self) -> Request | None:
        """See `Scheduler`."""
        return self._call(
            lambda guilty: Blamed(guilty=None if guilty is None else guilty.key), super().blame
        )

    @property
    def _is_written(self) -> bool:
        return self._journal.scheduler is self

    def _call(
        self,
        entry: Callable[[T | None], AnyEntry],
        call: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Make a call, and write what it was and how it ended.

        Args:
            entry: makes the entry of what the call gave; of None where it failed.
        """
        gave, raised = None, ""
        try:
            gave = call(*args, **kwargs)
            return gave
        except Exception as error:
            raised = type(error).__name__
            raise
        finally:
            if self._is_written:
                written = entry(gave)
                self._journal.write(replace(written, raised=raised) if raised else written)

    def _added(self, request: Request) -> Added:
        names = self._journal.names_of
        carried = {name: getattr(request, name) for name in _CARRIED}
        return Added(
            key=request.key,
            group=request.group.key,
            index=request.index,
            token_ids=names(request.token_ids),
            num_prompt=request.num_prompt,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_ids=names(sorted(request.stop_ids)),
            arrived_at=request.arrived_at,
            tenant=request.tenant,
            priority=request.priority,
            expires_at=request.expires_at,
            cache_scope=self._journal.scope_of(request.cache_scope),
            takes_hits=request.takes_hits,
            retention=list(request.retention),
            speculates=request.speculates,
            expected_ids=names(request.expected_ids),
            is_probe=request.is_probe,
            carried={n: value for n, value in carried.items() if value != _DEFAULTS[n]},
        )
