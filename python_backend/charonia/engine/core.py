"""The engine core: one step at a time, from plan to text, and what happens when a step fails.

Owns the joint life of scheduler, executor and output streams. Has no thread and no queue; its
caller adds requests, calls `step` and gets chunks through `deliver`. Must not know Triton.

    step N    plan ─► submit ─► text of step N-1 ─► wait ─► apply
                                 (while N computes)

An engine of two stages also has the next step in flight, of other rows:

    plan N+1 ─► submit ─► text of step N-1 ─► wait for N ─► apply N ─► plan N+2 ─► ...
                           (while N and N+1 compute)
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import Limits, Scheduler, SchedulerStats, Update
from charonia.engine.admission import GenerationRequest, admit, check
from charonia.engine.drafting import make_speculation
from charonia.engine.metrics import Metrics
from charonia.engine.outputs import Chunk
from charonia.engine.recovery import NOT_READY, Recovery
from charonia.engine.reload import HeldRequests, Reload, misfit, take_over
from charonia.engine.step_times import StepTimes
from charonia.engine.streams import OutputStreams
from charonia.errors import (
    CharoniaError,
    EngineDiedError,
    EngineDownError,
    EngineUnloadedError,
    RequestCancelledError,
    RequestQuarantinedError,
    RequestTimeoutError,
    ShuttingDownError,
    StepFailedError,
    UnavailableError,
)
from charonia.events import event
from charonia.protocol import EngineInfo, Executor, Pending
from charonia.text.tokenizer import Tokenizer

DEADLINE_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A step that the engine computes: how many tokens, drafts included, and since when."""

    pending: Pending
    num_tokens: int
    at: float


class EngineCore:
    """Serves requests on any executor and survives its failures.

    Args:
        deliver: called with every chunk, in this caller's thread; must return quickly.
        clock: seconds, monotonic. log: takes one line.
        read_args: what the engine of this moment was loaded with; None is always `engine_args`.

    Attributes:
        last_step_at: when a step was last applied, None before the first.
    """

    def __init__(
        self,
        executor: Executor,
        engine_args: EngineArgs,
        scheduler_args: SchedulerArgs,
        tokenizer: Tokenizer,
        *,
        deliver: Callable[[Chunk], None],
        clock: Callable[[], float],
        log: Callable[[str], None],
        read_args: Callable[[], EngineArgs] | None = None,
    ) -> None:
        self.metrics = Metrics()
        self._executor = executor
        self.engine_args = engine_args
        self._read_args = read_args or (lambda: engine_args)
        self._scheduler_args = scheduler_args
        self._tokenizer = tokenizer
        self._clock = clock
        self._log = log
        self._streams = OutputStreams(tokenizer, self.metrics, deliver=deliver, clock=clock)
        self._updates: list[Update] = []
        self._in_flight: deque[_Submitted] = deque()
        self._held = HeldRequests()
        self._reload: Reload | None = None  # that waits for live requests to finish
        self._stats = SchedulerStats()
        self.last_step_at: float | None = None
        self._step_times = StepTimes()
        self._recovery = Recovery(executor, metrics=self.metrics, clock=clock, log=log)
        self._scheduler: Scheduler | None = None
        self._set_gauges()

    # ------------------------------------------------------------------ connecting

    @property
    def is_up(self) -> bool:
        """Whether there is an engine to run steps on."""
        return self._recovery.is_serving

    @property
    def down_reason(self) -> str | None:
        """Why there is none that requests could wait for; None while there is."""
        return self._recovery.down_reason

    @property
    def has_requests(self) -> bool:
        """Whether anything is live or computed, or chunks are still to be delivered."""
        return any((self._streams, self._updates, self._in_flight, self._held))

    @property
    def info(self) -> EngineInfo:
        """Of the engine as last seen.

        Raises:
            UnavailableError: none was ever there.
        """
        if self._recovery.info is None:
            raise EngineDownError(self.down_reason or NOT_READY)
        return self._recovery.info

    def connect(self) -> bool:
        """Get an engine, if a try is due: the one that is there, or a new one.

        Returns:
            Whether there is one now.
        """
        if not self._recovery.is_due:
            self._expire(self._clock())
            return False
        try:
            info = self._recovery.find()
            self._take_engine(info)
        except CharoniaError as error:
            self._go_without(error)
            return False
        except Exception:
            self._recovery.back_off()  # whoever catches it will call again
            raise
        self._recovery.succeed(info, len(self._streams))
        self._set_gauges()
        return True

    def _go_without(self, error: CharoniaError) -> None:
        """There is no engine, or it is of no use: nobody waits for it in vain."""
        self._expire(self._clock())
        if self._recovery.fail(error, len(self._streams)):
            unavailable = EngineDownError(str(self.down_reason))
            if self._reload is None:
                self._fail_all(unavailable)
            else:  # those that are held wait for another engine
                self._fail_live(unavailable)
        self._set_gauges()

    def watch(self) -> None:
        """Look after an engine that has nothing to do; one that has gone is replaced at once."""
        try:
            self._executor.check()
        except EngineDiedError as error:
            self._on_death(error)

    def _take_engine(self, info: EngineInfo) -> None:
        """Go on with this engine: its limits and arguments, and the requests that fit it."""
        # What is written down now may be meant for a later engine than one that is known.
        args = self.engine_args if self._recovery.knows(info) else self._read_args()
        limits = self._limits_of(info, args)
        if self._scheduler is not None:
            for request in list(self._scheduler.requests):
                if reason := misfit(request, info, limits):
                    self._end(request.key, UnavailableError(reason))
        if self._scheduler is not None and args == self.engine_args:
            self._scheduler.reset(limits, epoch=info.epoch)
        else:
            # What was learned of the times of steps, and of drafts, was true of another engine.
            self._step_times = StepTimes()
            speculation = make_speculation(args.speculative_config)
            self._scheduler = take_over(
                self._scheduler,
                limits,
                epoch=info.epoch,
                stats=self._stats,
                speculation=speculation,
            )
        self.engine_args = args

    def _limits_of(self, info: EngineInfo, args: EngineArgs) -> Limits:
        limits = Limits.of_engine(
            info,
            max_queue_size=self._scheduler_args.max_queue_size,
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

    # ------------------------------------------------------------------ another engine

    def reload(self, reload: Reload) -> None:
        """Go on with the engine that `reload` configures: at once, or when all live is over."""
        if self._reload is not None:
            reload.fail("another reload is under way")
        elif self._scheduler is None:
            reload.fail(self.down_reason or NOT_READY)
        else:
            self._reload = reload
            self.go_on()

    def go_on(self) -> None:
        """Do what is due beside steps: give up what waited too long, and replace the engine."""
        reload = self._reload
        if reload is None:
            return
        self._expire(self._clock())
        reload.num_live, reload.num_held = len(self._streams), len(self._held)
        if reload.is_cancelled:
            reload.fail("it was cancelled while requests were finishing")
        elif reload.drain and self.is_up and self._streams:
            reload.phase = "draining"
            return
        else:
            self._replace_engine(reload)
        self._reload = None
        for request, arrived_at in self._held.release():
            self._admit(request, arrived_at, was_accepted=True)

    def _drop_reload(self, reason: str) -> None:
        if self._reload is not None:
            self._reload.fail(reason)
            self._reload = None

    def _replace_engine(self, reload: Reload) -> None:
        """Load what `reload` configures, or again what there was before."""
        assert self._scheduler is not None
        try:
            reload.install()
        except OSError as error:
            reload.fail(f"the new configuration cannot be written: {error.strerror}")
            return
        self._deliver_updates()  # what is finished need not wait for another engine
        reload.phase = "loading"
        started = self._clock()
        self._recovery.part("reloading", len(self._streams))
        self._in_flight.clear()
        self._scheduler.reset()
        self._set_gauges()
        try:
            info = self._recovery.find()
            self._take_engine(info)
        except Exception as error:
            reason = reload.undo(str(error))
            self._recovery.give_up_reload(reason, len(self._streams))
            if not isinstance(error, CharoniaError):
                raise
            self.connect()
            reload.seconds = self._clock() - started
            reload.fail(reason if self.is_up else f"{reason}; {self.down_reason}")
            return
        self._recovery.succeed(info, len(self._streams))
        try:
            reload.settle()
        except OSError as error:
            self._log(event("engine_reload_unsettled", reason=error.strerror))
        reload.num_live = len(self._streams)
        reload.seconds = self._clock() - started
        reload.phase = "done"

    # ------------------------------------------------------------------ requests come and go

    def check(self, request: GenerationRequest) -> None:
        """Refuse what cannot be served. Reads only; may be called from any thread.

        Raises:
            InvalidRequestError, UnavailableError.
        """
        check(request, self.info, self._living_scheduler().limits, self._tokenizer)

    def check_queue(self, num_arriving: int) -> None:
        """Refuse a request when the queue is full. Reads only; may be called from any thread.

        Args:
            num_arriving: requests that were accepted and are not added yet.

        Raises:
            QueueFullError, UnavailableError.
        """
        self._living_scheduler().check_queue(num_arriving + len(self._held))

    def add(self, request: GenerationRequest) -> None:
        """Take a request in that was checked; what becomes of it comes through `deliver`."""
        self._streams.take_in(request)
        if self._reload is not None:
            self._held.hold(request, self._clock())
        else:
            self._admit(request, self._clock())

    def _admit(
        self, request: GenerationRequest, arrived_at: float, *, was_accepted: bool = False
    ) -> None:
        try:
            scheduler = self._living_scheduler()
            admitted = admit(request, self.info, scheduler.limits, self._tokenizer, arrived_at)
            if reason := misfit(admitted, self.info, scheduler.limits):  # another engine came
                raise UnavailableError(reason)
            scheduler.add(admitted, was_accepted=was_accepted)
        except CharoniaError as error:
            self._streams.refuse(request, arrived_at, error)
        else:
            self._streams.open(request, admitted)

    def _living_scheduler(self) -> Scheduler:
        scheduler = self._scheduler
        if self.down_reason is not None or scheduler is None:
            raise EngineDownError(self.down_reason or NOT_READY)
        return scheduler

    def cancel(self, key: str) -> None:
        """End a request at its client's wish; one that is not live is none of our business."""
        if self._streams.knows(key):
            self.metrics.count("charonia_cancellations_total")
            request_id, num_tokens = self._streams.request_id(key), self._streams.num_tokens(key)
            self._log(event("request_cancelled", key=key, request_id=request_id, tokens=num_tokens))
            self._end(key, RequestCancelledError("the request was cancelled"))

    def cancel_matching(self, request_id: str, tenant: str) -> None:
        """Cancel all live requests that a client gave this id."""
        for key in self._streams.find(request_id, tenant):
            self.cancel(key)

    # ------------------------------------------------------------------ one step

    def step(self) -> bool:
        """Fill the engine, deliver the chunks of the step before, and apply the oldest in flight.

        Returns:
            Whether there was anything to compute.
        """
        assert self._scheduler is not None, "step() before connect()"
        started = self._clock()
        self._expire(started)
        self._submit_plans(self._scheduler, started)
        delivering = self._clock()
        self._deliver_updates()
        self._count_phase("deliver", delivering)
        if not self._in_flight:
            self._set_gauges()
            return False
        try:
            self._apply_oldest(self._scheduler)
        except StepFailedError as error:
            self._in_flight.clear()
            self._on_failed_step(error)
        except (EngineDiedError, TimeoutError) as error:
            self._in_flight.clear()
            self._on_death(error)
        self._set_gauges()
        return True

    def abandon(self, error: CharoniaError) -> None:
        """Fail every request and forget the state they left; the engine is asked anew.

        The state is not touched: whatever error made it useless must not keep anybody waiting.
        """
        self._recovery.forget("the scheduler recovers from an internal error")
        self._scheduler = None
        self._updates = []
        self._in_flight.clear()
        self._drop_reload(str(error))
        self._fail_all(error)
        self._set_gauges()

    def close(self) -> None:
        """Fail what is live and let go of the engine."""
        self._drop_reload("the server is shutting down")
        self._fail_all(ShuttingDownError())
        self._recovery.forget("the server is shutting down")
        self._executor.close()

    # ------------------------------------------------------------------ parts of a step

    def _expire(self, now: float) -> None:
        """End the requests whose time is over."""
        expired = [] if self._scheduler is None else self._scheduler.expire(now)
        for key in [*(request.key for request in expired), *self._held.find_expired(now)]:
            self._end(key, RequestTimeoutError("Request timeout expired"))

    def _submit_plans(self, scheduler: Scheduler, started: float) -> None:
        """Fill the engine: as many steps in flight as it takes, and as there is work for."""
        while len(self._in_flight) < scheduler.limits.max_steps_in_flight:
            plan = scheduler.plan(started)
            if plan is None:
                return
            self.metrics.histograms["charonia_plan_seconds"].observe(self._clock() - started)
            num_tokens = sum(row.num_tokens + row.num_drafts for row in plan.rows)
            submitted = self._clock()
            self._in_flight.append(_Submitted(self._executor.submit(plan), num_tokens, submitted))
            started = self._clock()

    def _apply_oldest(self, scheduler: Scheduler) -> None:
        """Wait for the oldest step in flight, and commit what it did."""
        step = self._in_flight.popleft()
        # No other is ahead of it any more, so from now on it has its own time.
        result = step.pending.result(self._step_deadline_s(step.num_tokens))
        arrived = self._clock()
        self._recovery.note_step()
        self.last_step_at = arrived
        self.metrics.histograms["charonia_step_seconds"].observe(result.seconds)
        self._step_times.observe(step.num_tokens, result.seconds)
        self.metrics.count_collectives(result.collectives or {})
        self._updates = scheduler.apply(result, self._clock())
        self._count_phase("apply", arrived)
        self._count_phase("transit", step.at + result.seconds, arrived)

    def _count_phase(self, phase: str, started: float, ended: float | None = None) -> None:
        seconds = (self._clock() if ended is None else ended) - started
        self.metrics.count("charonia_step_phase_seconds_total", max(seconds, 0.0), phase)

    def _step_deadline_s(self, num_tokens: int) -> float:
        """When to give a step up: far beyond what its tokens should take."""
        predicted = self._step_times.predict(num_tokens)
        return max(self._scheduler_args.min_step_deadline_s, DEADLINE_FACTOR * predicted)

    def _deliver_updates(self) -> None:
        updates, self._updates = self._updates, []
        now = self._clock()
        for update in updates:
            if self._streams.take(update, now):
                assert self._scheduler is not None
                self._scheduler.finish(update.request.key)

    # ------------------------------------------------------------------ failures

    def _on_failed_step(self, error: StepFailedError) -> None:
        """A step raised, the engine lives: a new epoch. Twice in a row counts as death."""
        assert self._scheduler is not None
        if self._recovery.note_failed_step(error, len(self._streams)):
            self._on_death(StepFailedError("two steps failed in a row"))
            return
        try:
            info = self._executor.info()  # which may be another engine by now
            self._take_engine(info)
        except EngineDiedError as death:
            self._on_death(death)
        except CharoniaError as misfortune:
            self._scheduler.reset()
            self._go_without(misfortune)
        else:
            self._recovery.info = info

    def _on_death(self, error: Exception) -> None:
        """The engine is gone: blame, bring up a fresh one, recompute every live request."""
        assert self._scheduler is not None
        guilty = None
        if isinstance(error, EngineUnloadedError):
            self._recovery.part("unloaded", len(self._streams))
        else:
            self._recovery.lose(error, len(self._streams))
            guilty = self._scheduler.blame()
        self._scheduler.reset()
        if guilty is not None:
            self._quarantine(guilty.key)
        # Not down: what comes meanwhile waits for the new engine, unless it cannot be loaded.
        self._set_gauges()
        self.connect()

    def _quarantine(self, key: str) -> None:
        """End the request that stops every engine, so that the others can go on."""
        request_id = self._streams.request_id(key)
        self.metrics.count("charonia_requests_quarantined_total")
        self._log(event("request_quarantined", key=key, request_id=request_id))
        self._end(key, RequestQuarantinedError("the request stops the engine each time it runs"))

    def _fail_all(self, error: CharoniaError) -> None:
        self._fail_live(error)
        held = self._held.keys()
        for key in held:
            self._end(key, error)

    def _fail_live(self, error: CharoniaError) -> None:
        for key in list(self._streams):
            self._end(key, error)

    def _end(self, key: str, error: CharoniaError) -> None:
        """End a live request, or one that is held, with an error."""
        if (held := self._held.remove(key)) is not None:
            self._streams.refuse(*held, error)
        elif key in self._streams:
            if self._scheduler is not None:
                self._scheduler.finish(key)
            self._streams.fail(key, error)

    def _set_gauges(self) -> None:
        gauges = self.metrics.gauges
        gauges["charonia_engine_up", ""] = float(self._recovery.is_serving)
        scheduler = self._scheduler
        num_waiting = (scheduler.num_waiting if scheduler else 0) + len(self._held)
        gauges["charonia_requests_waiting", ""] = num_waiting
        gauges["charonia_requests_running", ""] = scheduler.num_running if scheduler else 0
        if scheduler is not None:
            self.metrics.show_scheduler(scheduler)
