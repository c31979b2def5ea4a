"""A scheduler that writes its calls to a journal.

Owns the entry of each call. Must not know files: see `core/recording/journal.py`.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from msgspec.structs import replace

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import KVPool, Limits, Request, Scheduler, Tiers, Update
from charonia.core.recording.journal import (
    Added,
    AnyEntry,
    Applied,
    Blamed,
    Carried,
    Finished,
    Journal,
    Opened,
    Planned,
    Reset,
    planned,
)
from charonia.errors import ConfigError, shown
from charonia.protocol import StepPlan, StepResult

P = ParamSpec("P")
T = TypeVar("T")


class JournaledScheduler(Scheduler):
    """A scheduler whose calls are written to a journal.

    Args:
        journal: takes the entries. engine_args, scheduler_args: its configuration, for the journal.
        pool: must hash blocks with the journal's `new_hasher`. values: see `Scheduler`.

    Raises:
        ConfigError: the pool hashes blocks in another way, so a replay would evict other blocks.
    """

    def __init__(
        self,
        journal: Journal,
        engine_args: EngineArgs,
        scheduler_args: SchedulerArgs,
        limits: Limits,
        pool: KVPool,
        **values: Any,
    ) -> None:
        if pool.new_hasher != journal.new_hasher:
            raise ConfigError(
                f"pool: new_hasher must be the journal's, Journal.new_hasher, but is "
                f"{shown(pool.new_hasher)}"
            )
        self._journal = journal
        kept = journal.kept_of(values["tiers"])
        super().__init__(limits, pool, **values)
        journal.begin(
            self,
            Opened(
                engine_args=engine_args,
                scheduler_args=scheduler_args,
                limits=limits,
                hash_secret=pool.hash_secret,
                epoch=values["epoch"],
                kept=kept,
            ),
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
            late = self._late[num_late:]
            names = self._journal.names_of
            return planned(plan, late, now=now, shedding=self.shedding, names=names)

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
        """Make a call and write it with its result.

        Args:
            entry: makes the entry from the call's result; from None if it raised.
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
                self._write(entry, gave, raised)

    def _write(self, entry: Callable[[T | None], AnyEntry], gave: T | None, raised: str) -> None:
        """Write an ended call. A failure in here is no failure of the call."""
        try:
            written = entry(gave)
            self._journal.write(replace(written, raised=raised) if raised else written)
        except Exception as error:
            self._journal.fail(error)

    def _added(self, request: Request) -> Added:
        names = self._journal.names_of
        carried = {name: getattr(request, name) for name in Carried.__struct_fields__}
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
            carried=Carried(**carried),
        )
