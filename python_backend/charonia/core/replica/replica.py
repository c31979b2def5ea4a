"""The scheduler's side of one engine: its requests, its steps and its recovery.

Owns the scheduler, the steps in flight, the search for an engine, the recovery state and the
reload that was ordered. Must not know text, clients, or requests that wait elsewhere: one
`engine_core` may have several replicas.

    add() ─► Scheduler ─ fill() ─► StepsInFlight ─ collect() ─► updates
                 ▲                    │ a step fails, the engine dies, hangs, is unloaded
                 │                    ▼
                 └─── follow() ◄── Recovery: one table of states    another engine, or none

Nothing here waits for an engine. `Executor.open` finds or loads it elsewhere, and `follow` takes
the result. `collect` waits for a step as long as its caller allows.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import (
    Group,
    Late,
    Limits,
    LoadShedding,
    Request,
    Scheduler,
    Update,
)
from charonia.core.recording.kv_events import KVEvents
from charonia.core.replica.engine_search import EngineSearch
from charonia.core.replica.recovery import NOT_READY, SHUTTING_DOWN, Recovery
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
from charonia.events import warning_event
from charonia.metrics.metrics import Metrics
from charonia.protocol import EngineInfo, Executor, Opening


class ReplicaEvents(Protocol):
    """Receives the events of a replica's requests, by their groups."""

    def on_started(self, group: Group) -> None:
        """The first step of a request begins."""
        ...

    def on_failed(self, group: Group, error: CharoniaError) -> None:
        """A request cannot go on here. It must be ended now, with `finish` of all its samples."""
        ...


class Replica:
    """Runs requests on one engine, and on the next one when that is lost or replaced.

    Args:
        events: receives events within calls, in the caller's thread.
        schedulers: makes and holds the scheduler of each engine.
        clock: monotonic, in seconds. log: takes one line.
        read_args: returns the arguments of the engine that is loaded now; None always means
            `engine_args`.
        wake: called from any thread when `follow` has something to do.
        kv_events: gets the changes of the prefix cache; None if nobody subscribes.

    Attributes:
        engine_args: of the engine, as last seen. recovery: its state.
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
        self._reload: Reload | None = None  # the last one
        self._limits: Limits | None = None

    # ------------------------------------------------------------------ questions

    @property
    def is_busy(self) -> bool:
        """True if steps are in flight."""
        return len(self._steps) > 0

    @property
    def is_fed(self) -> bool:
        """True if each stage of the engine has a step to compute."""
        limits = self._limits
        return limits is not None and len(self._steps) >= limits.num_stages

    @property
    def last_step_at(self) -> float | None:
        """Time at which the result of a step with tokens last arrived; None before the first."""
        return self._steps.last_step_at

    @property
    def limits(self) -> Limits:
        """Limits of the engine, as last seen.

        Raises:
            UnavailableError: there is no engine, and none is expected.
        """
        if self.recovery.down_reason is not None or self._limits is None:
            raise self.recovery.unavailable
        return self._limits

    @property
    def reload(self) -> Reload | None:
        """The reload that was ordered and is not over; other requests wait for its engine."""
        reload = self._reload
        return None if reload is None or reload.is_over else reload

    def show_metrics(self, num_held: int) -> None:
        """Update the metrics of this replica.

        Args:
            num_held: requests that wait elsewhere.
        """
        gauges, scheduler = self._metrics.gauges, self._scheduler
        gauges["charonia_engine_up", ""] = float(self.recovery.is_serving)
        num_waiting = 0 if scheduler is None else scheduler.num_waiting
        gauges["charonia_requests_waiting", ""] = num_waiting + num_held
        gauges["charonia_requests_running", ""] = 0 if scheduler is None else scheduler.num_running
        if scheduler is not None:
            self._metrics.show_scheduler(scheduler)
        if self._kv_events is not None:
            dropped = "charonia_kv_event_batches_dropped_total", ""
            self._metrics.counters[dropped] = self._kv_events.num_dropped

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Add one sample of a request; an engine must be serving.

        Raises:
            UnavailableError: it does not fit this engine. InvalidRequestError: see `Scheduler.add`.
        """
        assert self._scheduler is not None, "add() before there was an engine"
        if reason := misfit(request, self.recovery.known_info, self._scheduler.limits):
            raise UnavailableError(reason)
        self._scheduler.add(request)

    def shed(self, shedding: LoadShedding) -> None:
        """Apply load shedding to steps from now on, on any engine."""
        self._schedulers.shed(shedding)

    def finish(self, key: str, *, is_complete: bool = False) -> None:
        """End one sample of a request; one that is not live is ignored.

        Args:
            is_complete: whether its answer is complete, by a stop string.
        """
        if self._scheduler is not None:
            self._scheduler.finish(key, is_complete=is_complete)

    # ------------------------------------------------------------------ steps

    def fill(self) -> None:
        """Submit as many steps as the engine takes, if there is work and it is time for them.

        A step that overlaps another one is planned shortly before it is needed, so that it includes
        requests that arrive until then: see `plan_time`.
        """
        scheduler, steps = self._scheduler, self._steps
        assert scheduler is not None, "fill() before there was an engine"
        most = scheduler.limits.max_steps_in_flight
        while len(steps) < most:
            now = self._clock()
            if not steps.is_plan_due(now):
                return
            steps.begin_plan(now)
            plan = scheduler.plan(now)
            for late in scheduler.take_late():
                self._events.on_failed(late.request.group, _late_error(late))
            if plan is None:
                return
            for request in scheduler.take_started():
                self._events.on_started(request.group)
            if (began_at := steps.submit(plan)) is not None:
                steps.set_plan_time(began_at, may_plan_ahead=scheduler.may_plan_ahead)

    def collect(self, wait_s: float) -> list[Update]:
        """Updates of the oldest step in flight; none if it takes longer than `wait_s` seconds.

        It also returns when it is time to plan the next step. Failures of the step or of the engine
        are handled here.
        """
        try:
            step = self._steps.wait(wait_s)
        except StepFailedError as error:
            self._steps.give_up()
            if self.recovery.note_failed_step(error, self._num_live):
                self._lose(StepFailedError("two steps failed in a row"))
            else:
                self.recovery.doubt()  # the engine may be another one by now
        except EngineDiedError as error:
            self._lose(error)
        else:
            return [] if step is None else self._commit(step)
        return []

    def watch(self) -> None:
        """Check that an idle engine is alive."""
        try:
            self._executor.check()
        except EngineDiedError as error:
            self._lose(error)

    def _commit(self, step: EndedStep) -> list[Update]:
        """Apply the result of a step."""
        scheduler = self._scheduler
        assert scheduler is not None, "a step without a scheduler"
        if step.num_tokens:
            self.recovery.note_step()
        if step.result.collectives:
            self._metrics.count_collectives(step.result.collectives)
        updates = scheduler.apply(step.result, self._clock())
        if self._kv_events is not None:
            self._kv_events.flush()
        self._steps.set_plan_time(step.ended_at, may_plan_ahead=scheduler.may_plan_ahead)
        self._metrics.count_phase("apply", self._clock() - step.ended_at)
        return updates

    # ------------------------------------------------------------------ the engine's life

    def follow(self) -> None:
        """Find or load an engine, if that is due, and take the result of an ended attempt."""
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

    def order_reload(self, reload: Reload) -> None:
        """Take an order to replace the engine, which `begin_reload` carries out.

        May be called from any thread, by one at a time.
        """
        if self.reload is not None:
            reload.fail("another reload is under way")
        elif self.recovery.info is None:
            reload.fail(NOT_READY)
        else:
            self._reload = reload

    def begin_reload(self, reload: Reload) -> None:
        """Replace the engine by the one that `reload` configures, unless it is too early for it."""
        if self.recovery.state is State.STOPPED:
            reload.fail(SHUTTING_DOWN)
            return
        if self._search.is_stuck and self.recovery.down_reason is not None:
            reload.fail(self.recovery.down_reason)
            return
        if self._search.is_under_way or not self.recovery.may(Event.ORDERED):
            return
        try:
            reload.configuration.install()
        except OSError as error:
            reload.fail(f"the new configuration cannot be written: {error.strerror}")
            return
        reload.begin(self._clock())
        self.recovery.order(self._num_live)
        self._start_over()

    def abandon(self, error: CharoniaError) -> None:
        """Discard all requests and steps, and connect to the engine again.

        The state is discarded unread, since it may be broken.
        """
        self._schedulers.drop()
        self._steps.give_up()
        if self.recovery.state is State.RELOADING:
            self._search.discard()
            self._miss(error)
        else:
            self.recovery.doubt()
        if (reload := self.reload) is not None:
            reload.fail(str(error), self._clock())

    def close(self) -> None:
        """Release the engine."""
        if (reload := self.reload) is not None:
            reload.fail(reload.undo(SHUTTING_DOWN), self._clock())
        self._steps.give_up()
        self.recovery.stop()
        self._executor.close()

    def _go_on_with(self, opening: Opening) -> None:
        """Serve with the engine that was opened, or note that there is none."""
        if self.recovery.state is State.STOPPED:
            return
        try:
            info = opening.result()
            self._take_engine(info)
        except CharoniaError as error:
            self._miss(error)
        except Exception:
            self.recovery.back_off()  # the caller catches it and calls again
            raise
        else:
            # The tiers have taken over the list of kept blocks, and follow its changes.
            self.recovery.note_found(msgspec.structs.replace(info, kept=None), self._num_live)
            if (reload := self._loading) is not None:
                self._settle_reload(reload)

    def _miss(self, error: CharoniaError) -> None:
        if self.recovery.state is State.CHECKING and isinstance(error, EngineDiedError):
            self._lose(error)
            return
        reload = self._loading
        if reload is not None and not reload.reason:
            # The next engine is to be loaded with the last configuration.
            reload.reason = reload.undo(str(error))
            if not isinstance(error, ServerStoppingError):
                error = EngineDiedError(reload.reason)
        self.recovery.note_missing(error, self._num_live)
        if reload is not None and self.recovery.down_reason is not None:
            reload.fail(f"{reload.reason}; {self.recovery.down_reason}", self._clock())
        self._fail_all_if_down()

    def _give_up_search(self) -> None:
        """Stop waiting for an attempt that is stuck. If it succeeds later, its engine still serves.

        For a reload its result is discarded: the reload fails, and the old configuration is
        restored.
        """
        timeout_s = self._scheduler_args.load_timeout_s
        error = EngineDiedError(f"it was not loaded within {timeout_s:g} s")
        if self.recovery.state is State.RELOADING:
            self._search.discard()
        self.recovery.give_up(error, self._num_live)
        if (reload := self._loading) is not None:
            reason = reload.reason or reload.undo(str(error))
            reload.fail(f"{reason}; {self.recovery.down_reason}", self._clock())
        self._fail_all_if_down()

    def _lose(self, error: Exception) -> None:
        """Handle the loss of the engine: quarantine a guilty request; the others are recomputed."""
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
            self._events.on_failed(guilty.group, RequestQuarantinedError(quarantine))
        self._fail_all_if_down()

    def _start_over(self) -> None:
        """Discard the steps in flight: the next engine recomputes all live requests."""
        self._steps.give_up()
        self._schedulers.reset()

    def _take_engine(self, info: EngineInfo) -> None:
        """Change to this engine: its limits and arguments. Requests that do not fit it fail."""
        # For a known engine the arguments on disk may be newer than those that it was loaded with.
        args = self.engine_args if self.recovery.knows(info) else self._read_args()
        limits = limits_of(info, args, self._log)
        for request in self._schedulers.requests:
            if reason := misfit(request, info, limits):
                self._events.on_failed(request.group, UnavailableError(reason))
        is_like_before = self._scheduler is not None and args == self.engine_args
        if not is_like_before:
            self._steps.forget_times()
        self._schedulers.go_on_with(info, args, limits, is_like_before=is_like_before)
        self._limits = limits
        self.engine_args = args
        self._metrics.show_memory(info.memory)

    def _settle_reload(self, reload: Reload) -> None:
        """End a reload when an engine serves: the new one, or the old one after a failure."""
        if reload.reason:
            reload.fail(reload.reason, self._clock())
            return
        try:
            reload.configuration.settle()
        except OSError as error:
            self._log(warning_event("engine_reload_unsettled", reason=error.strerror))
        reload.num_live = self._num_live
        reload.finish(self._clock())

    # ------------------------------------------------------------------ shared

    @property
    def _loading(self) -> Reload | None:
        """The reload whose engine is being loaded, or the old one again."""
        reload = self._reload
        return reload if reload is not None and reload.phase == "loading" else None

    @property
    def _scheduler(self) -> Scheduler | None:
        return self._schedulers.present

    @property
    def _num_live(self) -> int:
        return self._schedulers.num_live

    def _fail_all_if_down(self) -> None:
        """Fail all live requests if no engine is expected."""
        if self.recovery.down_reason is not None:
            for request in self._schedulers.requests:
                self._events.on_failed(request.group, self.recovery.unavailable)


def _late_error(late: Late) -> LateRequestError:
    """The error of a late request. It has no `retry_after_s` if it never could be in time."""
    request, needed_s, left_s = late
    can_be_in_time = needed_s <= request.expires_at - request.arrived_at
    return LateRequestError(
        "deadline_ms cannot be met:"
        f" about {needed_s:.2f} s are needed, and {left_s:.2f} s are left",
        retry_after_s=needed_s - left_s if can_be_in_time else None,
    )
