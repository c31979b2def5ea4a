"""What the scheduler's side keeps of one engine: its requests' steps, and its life.

Owns the scheduler, the executor, the steps in flight, the state of recovery and a reload that is
carried out. Must not know text, clients, or requests that wait elsewhere: several replicas may
stand under one layer of streams (`core`).

    add() ─► Scheduler ─ fill() ─► Executor ─ collect() ─► updates
                 ▲                    │ a step fails, the engine dies, hangs, is unloaded
                 │                    ▼
                 └─── follow() ◄── Recovery: one table of states    another engine, or none

Nothing here waits for an engine: it is looked for and loaded elsewhere (`Executor.open`), and
`follow` sees what came of it. A step's result is waited for as long as the caller says.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import (
    NO_RELIEF,
    CostCurve,
    Limits,
    Relief,
    Request,
    Scheduler,
    SchedulerStats,
    Update,
)
from charonia.engine.drafting import make_speculation
from charonia.engine.metrics import Metrics
from charonia.engine.recovery import NOT_READY, SHUTTING_DOWN, Recovery
from charonia.engine.reload import Reload, misfit, take_over
from charonia.engine.scheduling import (
    make_peak_memory,
    make_policy,
    make_prompt_budget,
    make_step_size,
)
from charonia.engine.transitions import Event, State
from charonia.errors import (
    CharoniaError,
    EngineDiedError,
    EngineDownError,
    EngineHungError,
    EngineUnloadedError,
    LateRequestError,
    RequestQuarantinedError,
    ServerStoppingError,
    ShuttingDownError,
    StepFailedError,
    UnavailableError,
)
from charonia.events import event
from charonia.protocol import EngineInfo, Executor, Opening, Pending

DEADLINE_FACTOR = 10.0


@dataclass(slots=True)
class _Submitted:
    """A step that the engine computes.

    Attributes:
        num_tokens: drafts included. at: when it was handed over.
        since: when no other was ahead of it any more; None before.
    """

    pending: Pending
    num_tokens: int
    at: float
    since: float | None = None


class Replica:
    """Runs requests on one engine, and on the next one when that is lost or replaced.

    Args:
        fail: called with the key of a request that cannot go on here, and why; ends it.
        on_started: called with the key of a request that its first step begins with.
        weight_of: of a tenant, for fair shares.
        clock: seconds, monotonic. log: takes one line.
        read_args: what the engine of this moment was loaded with; None is always `engine_args`.
        wake: called from any thread when `follow` has something to see.

    Attributes:
        engine_args: of the engine as last seen.
        last_step_at: when a step was last applied, None before the first.
    """

    def __init__(
        self,
        executor: Executor,
        engine_args: EngineArgs,
        scheduler_args: SchedulerArgs,
        *,
        metrics: Metrics,
        fail: Callable[[str, CharoniaError], None],
        on_started: Callable[[str], None],
        weight_of: Callable[[str], float],
        clock: Callable[[], float],
        log: Callable[[str], None],
        read_args: Callable[[], EngineArgs] | None,
        wake: Callable[[], None],
    ) -> None:
        self.engine_args = engine_args
        self._executor = executor
        self._scheduler_args = scheduler_args
        self._metrics = metrics
        self._fail = fail
        self._on_started = on_started
        self._weight_of = weight_of
        self._clock = clock
        self._log = log
        self._read_args = read_args or (lambda: engine_args)
        self._wake = wake
        self._stats = SchedulerStats()
        self._relief = NO_RELIEF
        self._step_seconds = CostCurve()
        self._recovery = Recovery(metrics=metrics, clock=clock, log=log)
        self._opening: Opening | None = None
        self._opening_began_at = 0.0
        self._is_opening_void = False  # whatever comes of it is not wanted any more
        self._reload: Reload | None = None  # that is carried out
        self._limits: Limits | None = None
        self._scheduler: Scheduler | None = None
        self._in_flight: deque[_Submitted] = deque()
        self.last_step_at: float | None = None

    # ------------------------------------------------------------------ questions

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine that steps can run on at this very moment."""
        return self._recovery.is_serving

    @property
    def is_busy(self) -> bool:
        """Whether steps are in flight."""
        return bool(self._in_flight)

    @property
    def is_fed(self) -> bool:
        """Whether each stage of the engine has a step to compute."""
        limits = self._limits
        return limits is not None and len(self._in_flight) >= limits.num_stages

    @property
    def down_reason(self) -> str | None:
        """Why requests do not wait for an engine; None while they do, or there is one."""
        return self._recovery.down_reason

    @property
    def unavailable(self) -> UnavailableError:
        """What a request is told that does not wait for an engine."""
        if self._recovery.state is State.STOPPED:
            return ShuttingDownError()
        return EngineDownError(self.down_reason or NOT_READY)

    @property
    def had_engine(self) -> bool:
        """Whether there ever was an engine."""
        return self._recovery.info is not None

    @property
    def info(self) -> EngineInfo:
        """Of the engine as last seen.

        Raises:
            UnavailableError: none was ever there.
        """
        if self._recovery.info is None:
            raise self.unavailable
        return self._recovery.info

    @property
    def limits(self) -> Limits:
        """Of the engine as last seen.

        Raises:
            UnavailableError: there is none that requests could wait for.
        """
        if self.down_reason is not None or self._limits is None:
            raise self.unavailable
        return self._limits

    @property
    def num_running(self) -> int:
        """Requests that have a row of the engine."""
        return self._scheduler.num_running if self._scheduler else 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return self._scheduler.num_waiting if self._scheduler else 0

    def show_metrics(self) -> None:
        """Bring up to date what the metrics say of this replica."""
        self._metrics.gauges["charonia_engine_up", ""] = float(self.is_serving)
        if self._scheduler is not None:
            self._metrics.show_scheduler(self._scheduler)

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Take a request in, of an engine that serves.

        Raises:
            UnavailableError: it does not fit this engine.
        """
        assert self._scheduler is not None, "add() before there was an engine"
        if reason := misfit(request, self.info, self._scheduler.limits):
            raise UnavailableError(reason)
        self._scheduler.add(request)

    def relieve(self, relief: Relief) -> None:
        """Have steps do without something from now on, on any engine."""
        self._relief = relief
        if self._scheduler is not None:
            self._scheduler.relief = relief

    def finish(self, key: str) -> None:
        """End a request; nothing happens when it is not here."""
        if self._scheduler is not None:
            self._scheduler.finish(key)

    # ------------------------------------------------------------------ steps

    def fill(self) -> None:
        """Have as many steps in flight as the engine takes, and as there is work for."""
        scheduler = self._scheduler
        assert scheduler is not None, "fill() before there was an engine"
        while len(self._in_flight) < scheduler.limits.max_steps_in_flight:
            started = self._clock()
            plan = scheduler.plan(started)
            for request, needed_s, left_s in scheduler.take_late():
                reason = f"about {needed_s:.2f} s are needed, and {left_s:.2f} s are left"
                self._fail(request.key, LateRequestError(f"deadline_ms cannot be met: {reason}"))
            if plan is None:
                return
            for request in scheduler.take_started():
                self._on_started(request.key)
            submitted = self._clock()
            self._metrics.histograms["charonia_plan_seconds"].observe(submitted - started)
            num_tokens = sum(row.num_tokens + row.num_drafts for row in plan.rows)
            self._in_flight.append(_Submitted(self._executor.submit(plan), num_tokens, submitted))

    def collect(self, wait_s: float) -> list[Update]:
        """What the oldest step in flight did; nothing when it takes longer than `wait_s`.

        A failure of the step or of the engine is dealt with here.
        """
        step = self._in_flight[0]
        if step.since is None:
            step.since = self._clock()
        try:
            return self._apply(step, wait_s)
        except TimeoutError:
            seconds = self._step_deadline_s(step.num_tokens)
            if self._clock() - step.since >= seconds:
                self._lose(EngineHungError(f"no answer of the engine within {seconds:g} s"))
        except StepFailedError as error:
            self._in_flight.clear()
            if self._recovery.note_failed_step(error, self._num_live):
                self._lose(StepFailedError("two steps failed in a row"))
            else:
                self._recovery.doubt()  # it may be another engine by now
        except EngineDiedError as error:
            self._lose(error)
        return []

    def watch(self) -> None:
        """Look after an engine that has nothing to do."""
        try:
            self._executor.check()
        except EngineDiedError as error:
            self._lose(error)

    def _apply(self, step: _Submitted, wait_s: float) -> list[Update]:
        """Wait for a step, and commit what it did."""
        assert self._scheduler is not None
        result = step.pending.result(wait_s)
        self._in_flight.popleft()
        arrived = self._clock()
        began = max(step.at, self.last_step_at or 0.0)  # not before the one ahead of it has ended
        self._recovery.note_step()
        self.last_step_at = arrived
        self._metrics.histograms["charonia_step_seconds"].observe(result.seconds)
        self._step_seconds.observe(step.num_tokens, result.seconds)
        self._metrics.count_collectives(result.collectives or {})
        updates = self._scheduler.apply(result, self._clock())
        self._metrics.count_phase("apply", self._clock() - arrived)
        self._metrics.count_phase("transit", max(0.0, arrived - began - result.seconds))
        return updates

    def _step_deadline_s(self, num_tokens: int) -> float:
        """When to give a step up: far beyond what its tokens should take."""
        predicted = self._step_seconds.at_most(num_tokens)
        return max(self._scheduler_args.min_step_deadline_s, DEADLINE_FACTOR * predicted)

    # ------------------------------------------------------------------ the engine's life

    def follow(self) -> None:
        """Look for an engine or load one, if that is due, and see what has come of it."""
        recovery = self._recovery
        if self._opening is None and recovery.is_due:
            self._opening_began_at = self._clock()
            self._opening = self._executor.open(
                replace=recovery.is_to_be_loaded, on_done=self._wake
            )
        if self._opening is not None and self._opening.is_done:
            opening, self._opening = self._opening, None
            self._go_on_with(opening)
        if self._is_opening_stuck and recovery.may(Event.STUCK):
            self._give_up_opening()
        if recovery.is_overdue:
            recovery.wait_no_longer(self._num_live)
            self._fail_all_if_down()

    def reload(self, reload: Reload) -> bool:
        """Replace the engine by the one that `reload` configures; see there what comes of it.

        Returns:
            Whether the order was taken, or has failed; False where it is too early for it.
        """
        if self._recovery.state is State.STOPPED:
            reload.fail(SHUTTING_DOWN)
            return True
        if self._is_opening_stuck and self.down_reason is not None:
            reload.fail(self.down_reason)
            return True
        if self._opening is not None or not self._recovery.may(Event.ORDERED):
            return False
        try:
            reload.install()
        except OSError as error:
            reload.fail(f"the new configuration cannot be written: {error.strerror}")
            return True
        reload.begin(self._clock())
        self._reload = reload
        self._recovery.order(self._num_live)
        self._start_over()
        return True

    def abandon(self, error: CharoniaError) -> None:
        """Forget a state that has become useless; the engine is asked anew what it is.

        The state is not touched: whatever made it useless must not keep anybody waiting.
        """
        self._scheduler = None
        self._in_flight.clear()
        if self._recovery.state is State.RELOADING:
            self._is_opening_void = self._opening is not None
            self._miss(error)
        else:
            self._recovery.doubt()
        if self._reload is not None:
            self._end_reload(str(error))

    def close(self) -> None:
        """Let go of the engine."""
        if self._reload is not None:
            self._end_reload(self._reload.undo(SHUTTING_DOWN))
        self._in_flight.clear()
        self._recovery.stop()
        self._executor.close()

    def _go_on_with(self, opening: Opening) -> None:
        """Serve with the engine that was opened, or take note that there is none."""
        is_void, self._is_opening_void = self._is_opening_void, False
        if is_void or self._recovery.state is State.STOPPED:
            return
        try:
            info = opening.result()
            self._take_engine(info)
        except CharoniaError as error:
            self._miss(error)
        except Exception:
            self._recovery.back_off()  # whoever catches it will call again
            raise
        else:
            self._recovery.note_found(info, self._num_live)
            if self._reload is not None:
                self._settle_reload(self._reload)

    def _miss(self, error: CharoniaError) -> None:
        if self._recovery.state is State.CHECKING and isinstance(error, EngineDiedError):
            self._lose(error)
            return
        reload = self._reload
        if reload is not None and not reload.reason:
            # The configuration before it is to be there when an engine is loaded next.
            reload.reason = reload.undo(str(error))
            if not isinstance(error, ServerStoppingError):
                error = EngineDiedError(reload.reason)
        self._recovery.note_missing(error, self._num_live)
        if reload is not None and self.down_reason is not None:
            self._end_reload(f"{reload.reason}; {self.down_reason}")
        self._fail_all_if_down()

    @property
    def _is_opening_stuck(self) -> bool:
        """Whether an engine has been looked for or loaded for longer than may be."""
        seconds = self._clock() - self._opening_began_at
        return self._opening is not None and seconds >= self._scheduler_args.load_timeout_s

    def _give_up_opening(self) -> None:
        """Nobody waits any longer for what is being opened; it is welcome all the same, later.

        Unless a reload ordered it: that fails, and the configuration is the old one again.
        """
        error = EngineDiedError(
            f"it was not loaded within {self._scheduler_args.load_timeout_s:g} s"
        )
        self._is_opening_void |= self._recovery.state is State.RELOADING
        self._recovery.give_up(error, self._num_live)
        if self._reload is not None:
            reason = self._reload.reason or self._reload.undo(str(error))
            self._end_reload(f"{reason}; {self.down_reason}")
        self._fail_all_if_down()

    def _lose(self, error: Exception) -> None:
        """The engine has gone: blame, and have a fresh one recompute every live request."""
        num_live = self._num_live
        guilty = None
        if isinstance(error, ServerStoppingError):
            self._recovery.stop(num_live)
        elif isinstance(error, EngineUnloadedError):
            self._recovery.unload(num_live)
        else:
            self._recovery.lose(error, num_live)
            guilty = self._scheduler.blame() if self._scheduler is not None else None
        self._start_over()
        if guilty is not None:
            quarantine = "the request stops the engine each time it runs"
            self._fail(guilty.key, RequestQuarantinedError(quarantine))
        self._fail_all_if_down()

    def _start_over(self) -> None:
        """Give up the steps in flight: the next engine computes everything anew."""
        self._in_flight.clear()
        if self._scheduler is not None:
            self._scheduler.reset()

    def _take_engine(self, info: EngineInfo) -> None:
        """Go on with this engine: its limits and arguments, and the requests that fit it."""
        # What is written down now may be meant for a later engine than one that is known.
        args = self.engine_args if self._recovery.knows(info) else self._read_args()
        limits = self._limits_of(info, args)
        if self._scheduler is not None:
            for request in list(self._scheduler.requests):
                request.expected_ids.clear()  # they may be no tokens of this engine
                if reason := misfit(request, info, limits):
                    self._fail(request.key, UnavailableError(reason))
        if self._scheduler is not None and args == self.engine_args:
            self._scheduler.reset(limits, epoch=info.epoch)
        else:
            # What was learned of the times of steps, and of drafts, was true of another engine.
            self._step_seconds = CostCurve()
            self._scheduler = take_over(
                self._scheduler,
                limits,
                epoch=info.epoch,
                stats=self._stats,
                speculation=make_speculation(args.speculative_config),
                policy=make_policy(args, self._scheduler_args, self._weight_of),
                prompt_budget=make_prompt_budget(args, self._scheduler_args),
                peak_memory=make_peak_memory(self._scheduler_args),
                step_size=make_step_size(args, self._scheduler_args, limits),
            )
            self._scheduler.relief = self._relief
        self._limits = limits
        self.engine_args = args

    def _limits_of(self, info: EngineInfo, args: EngineArgs) -> Limits:
        limits = Limits.of_engine(
            info,
            async_scheduling=args.async_scheduling,
            enable_prefix_caching=args.enable_prefix_caching,
            enable_chunked_prefill=args.enable_chunked_prefill,
        )
        if limits.max_model_len < info.max_model_len:
            self._log(
                f"warning: max_model_len is lowered from {info.max_model_len} to "
                f"{limits.max_model_len}: the KV cache has {info.num_blocks - 1} blocks of "
                f"{info.kv.block_size} tokens"
            )
        return limits

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
    def _num_live(self) -> int:
        return self._scheduler.num_live if self._scheduler is not None else 0

    def _fail_all_if_down(self) -> None:
        """Nobody waits in vain for an engine."""
        if self.down_reason is not None and self._scheduler is not None:
            for request in list(self._scheduler.requests):
                self._fail(request.key, self.unavailable)
