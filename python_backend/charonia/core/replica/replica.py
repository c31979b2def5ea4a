"""What the scheduler's side keeps of one engine: its requests' steps, and its life.

Owns the scheduler, the steps in flight, the search for an engine, the state of recovery and a
reload that is carried out. Must not know text, clients, or requests that wait elsewhere: several
replicas may stand under one `engine_core`.

    add() ─► Scheduler ─ fill() ─► StepsInFlight ─ collect() ─► updates
                 ▲                    │ a step fails, the engine dies, hangs, is unloaded
                 │                    ▼
                 └─── follow() ◄── Recovery: one table of states    another engine, or none

Nothing here waits for an engine: it is looked for and loaded elsewhere (`Executor.open`), and
`follow` sees what came of it. A step's result is waited for as long as the caller says.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import (
    Late,
    Limits,
    LoadShedding,
    Request,
    Scheduler,
    Update,
)
from charonia.core.recording.kv_events import KVEvents
from charonia.core.replica.engine_search import EngineSearch
from charonia.core.replica.recovery import SHUTTING_DOWN, Recovery
from charonia.core.replica.reload import Reload, misfit
from charonia.core.replica.schedulers import Schedulers
from charonia.core.replica.steps_in_flight import EndedStep, StepsInFlight
from charonia.core.replica.transitions import Event, State
from charonia.core.scheduler_factory import limits_of
from charonia.errors import (
    CharoniaError,
    EngineDiedError,
    EngineUnloadedError,
    LateRequestError,
    RequestQuarantinedError,
    ServerStoppingError,
    StepFailedError,
    UnavailableError,
)
from charonia.events import event
from charonia.metrics.metrics import Metrics
from charonia.protocol import EngineInfo, Executor, Opening


class ReplicaEvents(Protocol):
    """What a replica tells of the requests that it has, by the keys of their groups."""

    def on_started(self, key: str) -> None:
        """The first step of a request begins."""
        ...

    def on_failed(self, key: str, error: CharoniaError) -> None:
        """A request cannot go on here: to be ended now, with `finish` of all its samples."""
        ...


class Replica:
    """Runs requests on one engine, and on the next one when that is lost or replaced.

    Args:
        events: told within calls, in their thread.
        schedulers: that of each engine.
        clock: seconds, monotonic. log: takes one line.
        read_args: what the engine of this moment was loaded with; None is always `engine_args`.
        wake: called from any thread when `follow` has something to see.
        kv_events: told what the prefix cache holds; None where nobody listens.

    Attributes:
        engine_args: of the engine as last seen. recovery: what there is of it.
    """

    def __init__(
        self,
        executor: Executor,
        engine_args: EngineArgs,
        scheduler_args: SchedulerArgs,
        schedulers: Schedulers,
        events: ReplicaEvents,
        *,
        metrics: Metrics,
        clock: Callable[[], float],
        log: Callable[[str], None],
        read_args: Callable[[], EngineArgs] | None,
        wake: Callable[[], None],
        kv_events: KVEvents | None = None,
    ) -> None:
        self.engine_args = engine_args
        self._executor = executor
        self._scheduler_args = scheduler_args
        self._metrics = metrics
        self._events = events
        self._schedulers = schedulers
        self._clock = clock
        self._log = log
        self._read_args = read_args or (lambda: engine_args)
        self._kv_events = kv_events
        self._steps = StepsInFlight(
            executor, metrics, clock=clock, min_deadline_s=scheduler_args.min_step_deadline_s
        )
        self._search = EngineSearch(
            executor, clock=clock, timeout_s=scheduler_args.load_timeout_s, wake=wake
        )
        self.recovery = Recovery(metrics=metrics, clock=clock, log=log)
        self._reload: Reload | None = None  # that is carried out
        self._limits: Limits | None = None

    # ------------------------------------------------------------------ questions

    @property
    def is_busy(self) -> bool:
        """Whether steps are in flight."""
        return len(self._steps) > 0

    @property
    def is_fed(self) -> bool:
        """Whether each stage of the engine has a step to compute."""
        limits = self._limits
        return limits is not None and len(self._steps) >= limits.num_stages

    @property
    def last_step_at(self) -> float | None:
        """When a step with tokens was last known to have ended, None before the first."""
        return self._steps.last_step_at

    @property
    def limits(self) -> Limits:
        """Of the engine as last seen.

        Raises:
            UnavailableError: there is none that requests could wait for.
        """
        if self.recovery.down_reason is not None or self._limits is None:
            raise self.recovery.unavailable
        return self._limits

    @property
    def num_running(self) -> int:
        """Requests that have a row of the engine."""
        return self._schedulers.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return self._schedulers.num_waiting

    def show_metrics(self) -> None:
        """Bring up to date what the metrics say of this replica."""
        self._metrics.gauges["charonia_engine_up", ""] = float(self.recovery.is_serving)
        if (scheduler := self._scheduler) is not None:
            self._metrics.show_scheduler(scheduler)
        if self._kv_events is not None:
            dropped = "charonia_kv_event_batches_dropped_total", ""
            self._metrics.counters[dropped] = self._kv_events.num_dropped

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Take one sample of a request in, of an engine that serves.

        Raises:
            UnavailableError: it does not fit this engine.
        """
        assert self._scheduler is not None, "add() before there was an engine"
        if reason := misfit(request, self.recovery.known_info, self._scheduler.limits):
            raise UnavailableError(reason)
        self._scheduler.add(request)

    def shed(self, shedding: LoadShedding) -> None:
        """Have steps do without something from now on, on any engine."""
        self._schedulers.shed(shedding)

    def finish(self, key: str, *, is_complete: bool = False) -> None:
        """End one sample of a request; nothing happens when it is not here.

        Args:
            is_complete: whether its answer is: its text met a stop string.
        """
        if self._scheduler is not None:
            self._scheduler.finish(key, is_complete=is_complete)

    # ------------------------------------------------------------------ steps

    def fill(self) -> None:
        """Have as many steps in flight as the engine takes, there is work for, and it is time for.

        A step that overlaps is planned shortly before it is needed, so that it has who comes until
        then: see `plan_time`.
        """
        scheduler, steps = self._scheduler, self._steps
        assert scheduler is not None, "fill() before there was an engine"
        while len(steps) < scheduler.limits.max_steps_in_flight:
            now = self._clock()
            if not steps.is_plan_due(now):
                return
            steps.begin_plan(now)
            plan = scheduler.plan(now)
            for late in scheduler.take_late():
                self._events.on_failed(late.request.group.key, _late_error(late))
            if plan is None:
                return
            for request in scheduler.take_started():
                self._events.on_started(request.group.key)
            if (began_at := steps.submit(plan)) is not None:
                steps.set_plan_time(began_at, may_plan_ahead=scheduler.may_plan_ahead)

    def collect(self, wait_s: float) -> list[Update]:
        """What the oldest step in flight did; nothing when it takes longer than `wait_s`.

        It returns as well when it is time to plan the step behind it. A failure of the step or of
        the engine is dealt with here.
        """
        try:
            step = self._steps.wait(wait_s)
        except StepFailedError as error:
            self._steps.give_up()
            if self.recovery.note_failed_step(error, self._num_live):
                self._lose(StepFailedError("two steps failed in a row"))
            else:
                self.recovery.doubt()  # it may be another engine by now
        except EngineDiedError as error:
            self._lose(error)
        else:
            return [] if step is None else self._commit(step)
        return []

    def watch(self) -> None:
        """Look after an engine that has nothing to do."""
        try:
            self._executor.check()
        except EngineDiedError as error:
            self._lose(error)

    def _commit(self, step: EndedStep) -> list[Update]:
        """Take over what a step did."""
        scheduler = self._scheduler
        assert scheduler is not None, "a step without a scheduler"
        if step.num_tokens:
            self.recovery.note_step()
        self._metrics.count_collectives(step.result.collectives or {})
        updates = scheduler.apply(step.result, self._clock())
        if self._kv_events is not None:
            self._kv_events.flush()
        self._steps.set_plan_time(step.ended_at, may_plan_ahead=scheduler.may_plan_ahead)
        self._metrics.count_phase("apply", self._clock() - step.ended_at)
        return updates

    # ------------------------------------------------------------------ the engine's life

    def follow(self) -> None:
        """Look for an engine or load one, if that is due, and see what has come of it."""
        recovery, search = self.recovery, self._search
        if not search.is_under_way and recovery.is_due:
            search.begin(replace=recovery.is_to_be_loaded)
        if (opening := search.take_ended()) is not None:
            self._go_on_with(opening)
        if search.is_stuck and recovery.may(Event.STUCK):
            self._give_up_search()
        if recovery.is_overdue:
            recovery.wait_no_longer(self._num_live)
            self._fail_all_if_down()

    def reload(self, reload: Reload) -> bool:
        """Replace the engine by the one that `reload` configures; see there what comes of it.

        Returns:
            Whether the order was taken, or has failed; False where it is too early for it.
        """
        if self.recovery.state is State.STOPPED:
            reload.fail(SHUTTING_DOWN)
            return True
        if self._search.is_stuck and self.recovery.down_reason is not None:
            reload.fail(self.recovery.down_reason)
            return True
        if self._search.is_under_way or not self.recovery.may(Event.ORDERED):
            return False
        try:
            reload.install()
        except OSError as error:
            reload.fail(f"the new configuration cannot be written: {error.strerror}")
            return True
        reload.begin(self._clock())
        self._reload = reload
        self.recovery.order(self._num_live)
        self._start_over()
        return True

    def abandon(self, error: CharoniaError) -> None:
        """Forget a state that has become useless; the engine is asked anew what it is.

        The state is not touched: whatever made it useless must not keep anybody waiting.
        """
        self._schedulers.drop()
        self._steps.give_up()
        if self.recovery.state is State.RELOADING:
            self._search.discard()
            self._miss(error)
        else:
            self.recovery.doubt()
        if self._reload is not None:
            self._end_reload(str(error))

    def close(self) -> None:
        """Let go of the engine."""
        if self._reload is not None:
            self._end_reload(self._reload.undo(SHUTTING_DOWN))
        self._steps.give_up()
        self.recovery.stop()
        self._executor.close()

    def _go_on_with(self, opening: Opening) -> None:
        """Serve with the engine that was opened, or take note that there is none."""
        if self.recovery.state is State.STOPPED:
            return
        try:
            info = opening.result()
            self._take_engine(info)
        except CharoniaError as error:
            self._miss(error)
        except Exception:
            self.recovery.back_off()  # whoever catches it will call again
            raise
        else:
            # What is kept is the tiers' from here on, who follow each change.
            self.recovery.note_found(msgspec.structs.replace(info, kept=None), self._num_live)
            if self._reload is not None:
                self._settle_reload(self._reload)

    def _miss(self, error: CharoniaError) -> None:
        if self.recovery.state is State.CHECKING and isinstance(error, EngineDiedError):
            self._lose(error)
            return
        reload = self._reload
        if reload is not None and not reload.reason:
            # The configuration before it is to be there when an engine is loaded next.
            reload.reason = reload.undo(str(error))
            if not isinstance(error, ServerStoppingError):
                error = EngineDiedError(reload.reason)
        self.recovery.note_missing(error, self._num_live)
        if reload is not None and self.recovery.down_reason is not None:
            self._end_reload(f"{reload.reason}; {self.recovery.down_reason}")
        self._fail_all_if_down()

    def _give_up_search(self) -> None:
        """Nobody waits any longer for what is being opened; it is welcome all the same, later.

        Unless a reload ordered it: that fails, and the configuration is the old one again.
        """
        timeout_s = self._scheduler_args.load_timeout_s
        error = EngineDiedError(f"it was not loaded within {timeout_s:g} s")
        if self.recovery.state is State.RELOADING:
            self._search.discard()
        self.recovery.give_up(error, self._num_live)
        if self._reload is not None:
            reason = self._reload.reason or self._reload.undo(str(error))
            self._end_reload(f"{reason}; {self.recovery.down_reason}")
        self._fail_all_if_down()

    def _lose(self, error: Exception) -> None:
        """The engine has gone: blame, and have a fresh one recompute every live request."""
        num_live = self._num_live
        guilty = None
        if isinstance(error, ServerStoppingError):
            self.recovery.stop(num_live)
        elif isinstance(error, EngineUnloadedError):
            self.recovery.unload(num_live)
        else:
            self.recovery.lose(error, num_live)
            guilty = self._scheduler.blame() if self._scheduler is not None else None
        self._start_over()
        if guilty is not None:
            quarantine = "the request stops the engine each time it runs"
            self._events.on_failed(guilty.group.key, RequestQuarantinedError(quarantine))
        self._fail_all_if_down()

    def _start_over(self) -> None:
        """Give up the steps in flight: the next engine computes everything anew."""
        self._steps.give_up()
        self._schedulers.reset()

    def _take_engine(self, info: EngineInfo) -> None:
        """Go on with this engine: its limits and arguments, and the requests that fit it."""
        # What is written down now may be meant for a later engine than one that is known.
        args = self.engine_args if self.recovery.knows(info) else self._read_args()
        limits = limits_of(info, args, self._log)
        for request in self._schedulers.requests:
            if reason := misfit(request, info, limits):
                self._events.on_failed(request.group.key, UnavailableError(reason))
        is_like_before = self._scheduler is not None and args == self.engine_args
        if not is_like_before:
            self._steps.forget_times()
        self._schedulers.go_on_with(info, args, limits, is_like_before=is_like_before)
        self._limits = limits
        self.engine_args = args
        self._metrics.show_memory(info.memory)

    # ------------------------------------------------------------------ parts of a reload

    def _settle_reload(self, reload: Reload) -> None:
        """An engine serves: the one that was ordered, or the one that was there before."""
        if reload.reason:
            self._end_reload(reload.reason)
            return
        try:
            reload.settle()
        except OSError as error:
            self._log(event("engine_reload_unsettled", reason=error.strerror))
        reload.num_live = self._num_live
        reload.finish(self._clock())
        self._reload = None

    def _end_reload(self, reason: str) -> None:
        assert self._reload is not None
        self._reload.fail(reason, self._clock())
        self._reload = None

    # ------------------------------------------------------------------ shared

    @property
    def _scheduler(self) -> Scheduler | None:
        return self._schedulers.present

    @property
    def _num_live(self) -> int:
        return self._schedulers.num_live

    def _fail_all_if_down(self) -> None:
        """Nobody waits in vain for an engine."""
        if self.recovery.down_reason is not None:
            for request in self._schedulers.requests:
                self._events.on_failed(request.group.key, self.recovery.unavailable)


def _late_error(late: Late) -> LateRequestError:
    """What a request is told that cannot be in time; if it never could be, no time to try again."""
    request, needed_s, left_s = late
    can_be_in_time = needed_s <= request.expires_at - request.arrived_at
    return LateRequestError(
        "deadline_ms cannot be met:"
        f" about {needed_s:.2f} s are needed, and {left_s:.2f} s are left",
        retry_after_s=needed_s - left_s if can_be_in_time else None,
    )
