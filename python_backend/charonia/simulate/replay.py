"""Replays a recorded run of the scheduler: makes the same calls and compares the plans.

Owns reading a journal (`core/recording/journal.py`), and the comparison. Must not know when
the run was, nor wait for anything.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import SEEK_END
from pathlib import Path
from typing import Any

import msgspec

from charonia.control import Group, Request, Scheduler, SchedulerStats, Tiers
from charonia.control.policies import Late
from charonia.core.recording.journal import (
    FRAME,
    HEADER,
    Added,
    AnyEntry,
    Applied,
    Blamed,
    Carried,
    Ended,
    Finished,
    Opened,
    Planned,
    Reset,
    Weighed,
    planned,
)
from charonia.core.scheduler_factory import make_scheduler
from charonia.errors import ConfigError
from charonia.protocol import KeptBlocks, RowSampling

MAX_DIFFERENCES = 10
"""Differences of one plan that are shown."""
_MAX_SHOWN = 300  # characters of a value
_MAX_GROUPS = 4096  # that are remembered, with or without requests


def read_journal(
    path: Path, on_read: Callable[[int], object] = lambda _: None
) -> Iterator[AnyEntry]:
    """Yield the entries of a journal, without an incomplete last one.

    Args:
        on_read: called with the number of bytes of each entry.

    Raises:
        ConfigError: the file cannot be read, is not a journal, is damaged, or has an entry of
            another version.
    """
    decode = msgspec.msgpack.Decoder(AnyEntry).decode
    try:
        with path.open("rb") as file:
            header = file.readline(len(HEADER))
            if header != HEADER:
                wanted = f"its first line must be {HEADER.decode().strip()!r}"
                raise ConfigError(f"{path} is no journal that this version replays: {wanted}")
            on_read(len(header))
            size = file.seek(0, SEEK_END)
            file.seek(len(header))
            while len(head := file.read(FRAME.size)) == FRAME.size:
                (length,) = FRAME.unpack(head)
                if length > size - file.tell():
                    return
                data = file.read(length)
                try:
                    entry: AnyEntry = decode(data)
                except (msgspec.ValidationError, ConfigError) as error:
                    place = file.tell() - length
                    raise ConfigError(
                        f"{path} is no journal that this version replays: the entry at byte {place}"
                        f" is of another version, or damaged: {error}"
                    ) from None
                except (ValueError, RecursionError) as error:
                    place = file.tell() - length
                    raise ConfigError(f"{path} is damaged at byte {place}: {error}") from None
                yield entry
                on_read(FRAME.size + length)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


@dataclass
class Replayed:
    """The result of a replay.

    Attributes:
        num_schedulers: one for each start, and for each engine that was loaded with other
            arguments. num_requests, num_plans: of all of them; only plans that say something.
        seconds: from the first plan to the last one, when the run was recorded.
        end: why the journal ends before the scheduler did; empty if it does not, and None if
            its end is missing.
        differences: of the first plan that differs; empty if all are equal.
    """

    num_schedulers: int = 0
    num_requests: int = 0
    num_plans: int = 0
    seconds: float = 0.0
    end: str | None = None
    differences: tuple[str, ...] = ()


class Replay:
    """Runs schedulers as a journal says, up to the first difference.

    Args:
        on_plan: called with each plan's number, its time and the plan, after the comparison.
    """

    def __init__(
        self, on_plan: Callable[[int, Planned], object] = lambda number, entry: None
    ) -> None:
        self._on_plan = on_plan
        self._outcome = Replayed()
        self._began_at: float | None = None
        self._scheduler: Scheduler | None = None
        self._groups: dict[str, Group] = {}
        self._weights: dict[str, float] = {}
        self._stats = SchedulerStats()

    def run(self, entries: Iterator[AnyEntry]) -> Replayed:
        """Run the replay.

        Raises:
            ConfigError: the entries are in an impossible order.
        """
        for entry in entries:
            if isinstance(entry, Weighed):
                self._weights[entry.tenant] = entry.weight
            elif isinstance(entry, Ended):
                self._outcome.end = entry.reason
            elif isinstance(entry, Opened):
                self._open(entry)
            elif self._scheduler is None:
                raise ConfigError("the journal does not begin with a scheduler's start")
            else:
                found = self._differences(self._scheduler, entry)
                if found:
                    self._outcome.differences = tuple(found)
                    break
        return self._outcome

    def _open(self, entry: Opened) -> None:
        self._outcome.num_schedulers += 1
        self._groups.clear()  # requests that continue are added again
        try:
            self._scheduler = make_scheduler(
                entry.engine_args,
                entry.scheduler_args,
                entry.limits,
                hash_secret=entry.hash_secret,
                epoch=entry.epoch,
                stats=self._stats,
                weight_of=lambda tenant: self._weights.get(tenant, 1.0),
                cache_events=None,
                tiers=self._tiers(entry.kept),
            )
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"the journal's scheduler cannot be made: {reason}") from error

    def _tiers(self, kept: KeptBlocks | None) -> Tiers | None:
        return None if kept is None else Tiers(kept, self._stats)

    def _differences(self, scheduler: Scheduler, entry: AnyEntry) -> list[str]:
        """Make a call and return what differs from the record."""
        raised, gave = "", ""
        plan, late = None, list[Late]()
        try:
            if isinstance(entry, Planned):
                scheduler.shedding = entry.shedding
                plan = scheduler.plan(entry.now)
                late = scheduler.take_late()
            else:
                gave = self._call(scheduler, entry)
        except Exception as error:
            raised, gave = type(error).__name__, f"{type(error).__name__}: {error}"
        if raised != entry.raised:
            before = entry.raised or "nothing"
            return [
                f"{type(entry).__name__}: raised {before} when recorded, {gave or 'nothing'} now"
            ]
        if not isinstance(entry, Planned):
            return [gave] if gave and not raised else []
        now = planned(plan, late, now=entry.now, shedding=entry.shedding)
        now = msgspec.structs.replace(now, raised=raised)
        if msgspec.msgpack.encode(now) == msgspec.msgpack.encode(entry):
            self._note_plan(entry)
            return []
        keys = {one.row: one.key for one in scheduler.requests if one.row is not None}
        return self._told(entry, now, keys)

    def _call(self, scheduler: Scheduler, entry: AnyEntry) -> str:
        """Make any call except for a plan, and return what differs."""
        match entry:
            case Added():
                self._outcome.num_requests += 1
                scheduler.add(self._request(entry))
            case Finished():
                if scheduler.finish(entry.key, is_complete=entry.is_complete) is None:
                    return f"finish: {entry.key!r} was live when recorded, and is not now"
            case Applied():
                scheduler.apply(entry.result, entry.now)
            case Reset():
                scheduler.reset(entry.limits, epoch=entry.epoch, tiers=self._tiers(entry.kept))
            case Blamed():
                guilty = scheduler.blame()
                key = None if guilty is None else guilty.key
                if key != entry.guilty:
                    return f"blame: {entry.guilty!r} when recorded, {key!r} now"
        return ""

    def _request(self, entry: Added) -> Request:
        if len(self._groups) > _MAX_GROUPS:
            self._groups = {key: one for key, one in self._groups.items() if one.members}
        group = self._groups.get(entry.group)
        if group is None or not group.members:
            group = self._groups[entry.group] = Group(entry.group)
        request = Request(
            key=entry.key,
            group=group,
            index=entry.index,
            token_ids=list(entry.token_ids),
            num_prompt=entry.num_prompt,
            sampling=RowSampling(seed=0, min_tokens=entry.min_tokens),
            max_tokens=entry.max_tokens,
            stop_ids=frozenset(entry.stop_ids),
            arrived_at=entry.arrived_at,
            tenant=entry.tenant,
            priority=entry.priority,
            expires_at=entry.expires_at,
            cache_scope=entry.cache_scope,
            takes_hits=entry.takes_hits,
            retention=tuple(entry.retention),
            speculates=entry.speculates,
            expected_ids=deque(entry.expected_ids),
            is_probe=entry.is_probe,
        )
        for name in Carried.__struct_fields__:
            setattr(request, name, getattr(entry.carried, name))
        return request

    def _note_plan(self, entry: Planned) -> None:
        if self._began_at is None:
            self._began_at = entry.now
        self._outcome.seconds = entry.now - self._began_at
        if entry.plan is not None:
            self._outcome.num_plans += 1
            self._on_plan(self._outcome.num_plans, entry)

    def _told(self, recorded: Planned, now: Planned, keys: dict[int, str]) -> list[str]:
        """Describe the first differences of two plans."""
        found = list(_compared("", msgspec.to_builtins(recorded), msgspec.to_builtins(now)))
        seconds = 0.0 if self._began_at is None else recorded.now - self._began_at
        step = recorded.plan or now.plan
        head = f"plan {self._outcome.num_plans + 1}, {seconds:.3f} s after the first one"
        lines = [head if step is None else f"{head} (epoch {step.epoch}, step {step.step_id})"]
        lines += [f"  {line}" for line in found[:MAX_DIFFERENCES]]
        if len(found) > MAX_DIFFERENCES:
            lines.append(f"  and {len(found) - MAX_DIFFERENCES} more")
        rows = sorted(keys.items())
        lines.append("  rows now: " + (", ".join(f"{row} {key!r}" for row, key in rows) or "none"))
        return lines


def _compared(path: str, recorded: Any, now: Any) -> Iterator[str]:
    """Yield what differs between two values of builtin types, with its place."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        for name in {**recorded, **now}:
            place = f"{path}.{name}" if path else name
            yield from _compared(place, recorded.get(name), now.get(name))
    elif isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        for index, pair in enumerate(zip(recorded, now, strict=True)):
            yield from _compared(f"{path}[{index}]", *pair)
    elif recorded != now:
        yield f"{path}: {_short(recorded)} when recorded, {_short(now)} now"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
