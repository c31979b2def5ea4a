"""The requests of all clients, above the replica that runs them.

Owns what becomes of every request (`request_registry` has them): when it is placed on the replica,
when and why it ends, and an operator's order of another engine. Has no thread and no queue; its
caller adds requests, calls `step` and is told of what comes by `RequestEvents`. Must not know
Triton, nor how a step or an engine fails: that is `replica`'s.

    add() ──► held ──place──► Replica ──updates──► RequestRegistry ──► on_chunk()
                │                │ cannot go on       │
                └────────────────┴── time, cancel ────┴──► on_chunk(): an error, once

`step` never waits for an engine, so that time runs and requests are cancelled in every state of it:

    step N    expire ─► follow the engine ─► place ─► plan ─► submit
                  ─► text of step N-1 (while N computes) ─► wait a little ─► apply, if N has ended

Mostly the next step is in flight, too, of the same rows or, in a pipeline, of others:

    apply N-1 ─► text of step N-1 ─► wait a little ─► plan N+1 ─► submit ─► wait for N ─► apply N
                  (while N computes)   (see `plan_time`)
"""

from collections.abc import Callable, Collection

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import Limits, LoadShedding, Update
from charonia.core.admission import GenerationRequest, admit, check, seeds_of
from charonia.core.gate.attainment import Attainment
from charonia.core.gate.tenants import Tenants
from charonia.core.output.outputs import MakeStream
from charonia.core.recording.journal import Journal
from charonia.core.recording.kv_events import KVEvents
from charonia.core.replica.recovery import NOT_READY, SHUTTING_DOWN
from charonia.core.replica.reload import Reload
from charonia.core.replica.replica import Replica
from charonia.core.replica.schedulers import Schedulers
from charonia.core.request_events import RequestEvents
from charonia.core.request_registry import LiveRequest, RequestRegistry
from charonia.core.scheduler_factory import rejects_late
from charonia.errors import (
    CharoniaError,
    LateRequestError,
    RequestCancelledError,
    RequestQuarantinedError,
    RequestTimeoutError,
    ShuttingDownError,
)
from charonia.events import event
from charonia.metrics.metrics import Metrics
from charonia.protocol import EngineInfo, Executor

RESULT_WAIT_S = 0.1
"""How long a step is waited for before others' cancellations and time limits are looked at."""


class EngineCore:
    """Serves requests on any executor and survives its failures. Implements `ReplicaEvents`.

    Args:
        make_stream: makes the output of a sample, of text mostly.
        events: told what becomes of each request.
        clock: seconds, monotonic. log: takes one line.
        read_args: what the engine of this moment was loaded with; None is always `engine_args`.
        wake: called from any thread when `step` has something to do that nobody else tells of.
        tenants: what holds for each; None has all alike.
        kv_events: told what the prefix cache holds; None where nobody listens.
        journal, hash_secret: see `Schedulers`.

    Attributes:
        metrics, attainment: of all requests since the start, and of each tenant's.
    """

    def __init__(
        self,
        executor: Executor,
        engine_args: EngineArgs,
        scheduler_args: SchedulerArgs,
        make_stream: MakeStream,
        events: RequestEvents,
        *,
        clock: Callable[[], float],
        log: Callable[[str], None],
        read_args: Callable[[], EngineArgs] | None = None,
        wake: Callable[[], None] = lambda: None,
        tenants: Tenants | None = None,
        kv_events: KVEvents | None = None,
        journal: Journal | None = None,
        hash_secret: bytes | None = None,
    ) -> None:
        tenants = tenants or Tenants(log=log)
        self.metrics = Metrics()
        self.attainment = Attainment(tenants, self.metrics)
        self._events = events
        self._scheduler_args = scheduler_args
        self._clock = clock
        self._log = log
        self._requests = RequestRegistry(
            make_stream, events, self.metrics, self.attainment, clock=clock
        )
        self._updates: list[Update] = []
        self._seed, self._next_seed = engine_args.seed, seeds_of(engine_args.seed)
        self._reload: Reload | None = None  # that was ordered and is not over
        self._replica = Replica(
            executor,
            engine_args,
            scheduler_args,
            Schedulers(
                scheduler_args,
                weight_of=tenants.weight_of,
                cache_events=kv_events,
                journal=journal,
                hash_secret=hash_secret,
            ),
            self,
            metrics=self.metrics,
            clock=clock,
            log=log,
            read_args=read_args,
            wake=wake,
            kv_events=kv_events,
        )
        self._set_gauges()

    # ------------------------------------------------------------------ questions

    @property
    def is_up(self) -> bool:
        """Whether there is an engine to run steps on."""
        return self._replica.recovery.is_serving

    @property
    def serving_since(self) -> float | None:
        """When the engine that serves was found; None while there is none."""
        return self._replica.recovery.serving_since

    @property
    def down_reason(self) -> str | None:
        """Why requests do not wait for an engine; None while they do, or there is one."""
        return self._replica.recovery.down_reason

    @property
    def has_requests(self) -> bool:
        """Whether anything is live or computed, or chunks are still to be delivered."""
        return any((self._requests, self._updates, self._replica.is_busy))

    @property
    def info(self) -> EngineInfo:
        """Of the engine as last seen.

        Raises:
            UnavailableError: none was ever there.
        """
        return self._replica.recovery.known_info

    @property
    def limits(self) -> Limits:
        """What requests must stay within.

        Raises:
            UnavailableError: there is no engine that they could wait for.
        """
        return self._replica.limits

    @property
    def last_step_at(self) -> float | None:
        """When a step was last applied, None before the first."""
        return self._replica.last_step_at

    @property
    def engine_args(self) -> EngineArgs:
        """Of the engine as last seen."""
        return self._replica.engine_args

    def check(self, request: GenerationRequest) -> None:
        """Refuse what cannot be served. Reads only; may be called from any thread.

        Raises:
            InvalidRequestError, NotSupportedError, UnavailableError.
        """
        check(request, self._replica.engine_args, self._replica.recovery.known_info, self.limits)

    def overdue(self, *, is_until_start: bool, has_started: bool) -> RequestTimeoutError:
        """What a request is told whose time is over.

        Args:
            is_until_start: its `timeout`; else its `deadline_ms`. has_started: it has had a step.
        """
        error = RequestTimeoutError.of(is_until_start=is_until_start)
        if is_until_start or has_started:
            return error
        # The scheduler would have told it so before, if it knew what steps take.
        is_late = rejects_late(self.engine_args, self._scheduler_args)
        return LateRequestError(str(error)) if is_late else error

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: GenerationRequest, arrived_at: float | None = None) -> None:
        """Take a request in that was checked; what becomes of it is told by events.

        Args:
            arrived_at: when it came, by the clock; None is now. Its time runs from then on.
        """
        self._requests.add(request, self._clock() if arrived_at is None else arrived_at)

    def cancel(self, key: str) -> None:
        """End a request at its client's wish; one that is not live is none of our business."""
        live = self._requests.get(key)
        if live is not None:
            self._note_cancelled(live)
            self._end(live, RequestCancelledError("the request was cancelled"))

    def cancel_samples(self, key: str, indexes: Collection[int]) -> None:
        """End some samples of a request at its client's wish, without an error.

        Those that are not there, or have ended, are none of our business. With `best_of` none is
        there before the end, as it is not known which it will be.
        """
        live = self._requests.get(key)
        if live is None:
            return
        if live.leaves_nothing(indexes):
            self._note_cancelled(live)
        for sample in live.cancellable(indexes):
            self._replica.finish(sample)
        self._requests.cancel_samples(live, indexes)

    def end(self, key: str, error: CharoniaError) -> None:
        """End a request that nobody waits for any more; nothing happens when it is not live."""
        live = self._requests.get(key)
        if live is not None:
            self._end(live, error)

    def shed(self, shedding: LoadShedding) -> None:
        """Have steps do without something from now on."""
        self._replica.shed(shedding)

    def reload(self, reload: Reload) -> None:
        """Go on with the engine that `reload` configures: soon, or when all live is over."""
        if self._reload is not None:
            reload.fail("another reload is under way")
        elif self._replica.recovery.info is None:
            reload.fail(NOT_READY)
        else:
            self._reload = reload

    def abandon(self, error: CharoniaError) -> None:
        """Fail every request and forget the state they left; the engine is asked anew.

        The state is not touched: whatever error made it useless must not keep anybody waiting.
        """
        self._replica.abandon(error)
        self._updates = []
        self._drop_reload(str(error))
        self._fail_all(error)
        self._set_gauges()

    def close(self) -> None:
        """Fail what is live and let go of the engine."""
        self._fail_all(ShuttingDownError())
        self._replica.close()
        self._drop_reload(SHUTTING_DOWN)

    # ------------------------------------------------------------------ one step

    def deliver(self) -> None:
        """Deliver what the last step gave, if the engine has another one to compute meanwhile.

        So a text that has met its stop string is in no further step. `step` begins with it; who
        calls it before can bring requests that have come meanwhile into the next plan.
        """
        if self._replica.is_fed:
            self._deliver_updates()

    def step(self) -> bool:
        """Do all that is due, fill the engine, and apply the oldest step in flight if it has ended.

        Returns:
            Whether there is more to do at once; if not, there is nothing before `wake`, a call of
            another method, or some tenth of a second.
        """
        replica = self._replica
        self.deliver()
        self._expire(self._clock())
        if not replica.recovery.is_serving:
            replica.follow()
        if self._reload is not None:
            self._go_on_with_reload(self._reload)
        if self._requests.held:
            self._place_held()
        if replica.recovery.is_serving:
            replica.fill()
        self._deliver_updates()
        was_serving, is_busy = replica.recovery.is_serving, replica.is_busy
        if is_busy:
            self._updates = replica.collect(RESULT_WAIT_S)
        elif was_serving:
            replica.watch()
        self._set_gauges()
        return is_busy or was_serving != replica.recovery.is_serving

    def _expire(self, now: float) -> None:
        """End the requests whose time is over."""
        for key, is_until_start in self._requests.take_due(now):
            live = self._requests.get(key)
            if live is None:  # it had another limit, which is over as well
                continue
            has_started = live.started_at is not None
            if is_until_start and has_started:
                continue
            self._end(live, self.overdue(is_until_start=is_until_start, has_started=has_started))

    def _go_on_with_reload(self, reload: Reload) -> None:
        """Begin with it as soon as that may be; once it is over, those it holds are placed."""
        if not reload.is_over and reload.phase != "loading":
            self._begin_reload(reload)
        if reload.is_over:
            self._reload = None

    def _begin_reload(self, reload: Reload) -> None:
        requests = self._requests
        reload.num_live, reload.num_held = requests.num_open, len(requests.held)
        if reload.is_cancelled:
            reload.fail("it was cancelled while requests were finishing")
        elif reload.drain and self.is_up and requests.num_open:
            reload.phase = "draining"
        else:
            self._deliver_updates()  # what is finished need not wait for another engine
            self._replica.reload(reload)

    def _place_held(self) -> None:
        """Have the replica run what waits for it, or tell it why that cannot be."""
        if self._reload is not None:
            return  # it waits for the next engine
        if self.down_reason is not None:
            for key in list(self._requests.held):
                self.end(key, self._replica.recovery.unavailable)
        elif self.is_up:
            for live in list(self._requests.held.values()):
                self._place(live)

    def _place(self, live: LiveRequest) -> None:
        replica, request = self._replica, live.held
        assert request is not None
        if replica.engine_args.seed != self._seed:  # another engine was loaded
            self._seed = replica.engine_args.seed
            self._next_seed = seeds_of(self._seed)
        try:
            samples = admit(
                request,
                replica.recovery.known_info,
                replica.limits,
                live.arrived_at,
                self._next_seed,
            )
            for sample in samples:
                replica.add(sample)
        except CharoniaError as error:
            self._requests.fail(live, error)
            return
        self._requests.open(live, samples)
        if live.cancelled:
            self.cancel_samples(live.key, live.cancelled)

    def _deliver_updates(self) -> None:
        updates, self._updates = self._updates, []
        if not updates:
            return
        now = self._clock()
        for update in updates:
            if self._requests.take(update, now):
                self._replica.finish(update.request.key, is_complete=True)
        self.metrics.count_phase("deliver", self._clock() - now)

    # ------------------------------------------------------------------ from the replica

    def on_started(self, key: str) -> None:
        """See `ReplicaEvents`."""
        self._events.on_started(key)

    def on_failed(self, key: str, error: CharoniaError) -> None:
        """See `ReplicaEvents`."""
        live = self._requests.get(key)
        if live is None:
            return
        if isinstance(error, RequestQuarantinedError):
            self.metrics.count("charonia_requests_quarantined_total")
            self._log(event("request_quarantined", key=key, request_id=live.request_id))
        self._end(live, error)

    # ------------------------------------------------------------------ ends

    def _note_cancelled(self, live: LiveRequest) -> None:
        """Count a request that its client cancels; what is shared has none of its own."""
        if live.is_shared:
            return
        self.metrics.count("charonia_cancellations_total")
        self._log(
            event(
                "request_cancelled",
                key=live.key,
                request_id=live.request_id,
                tokens=live.num_tokens,
            )
        )

    def _fail_all(self, error: CharoniaError) -> None:
        for key in list(self._requests):
            self.end(key, error)

    def _end(self, live: LiveRequest, error: CharoniaError) -> None:
        """End a request with an error, whether it is held or placed."""
        for sample in live.open_samples:
            self._replica.finish(sample)
        self._requests.fail(live, error)

    def _drop_reload(self, reason: str) -> None:
        if self._reload is not None and not self._reload.is_over:
            self._reload.fail(reason)
        self._reload = None

    def _set_gauges(self) -> None:
        gauges, replica = self.metrics.gauges, self._replica
        gauges["charonia_requests_waiting", ""] = replica.num_waiting + len(self._requests.held)
        gauges["charonia_requests_running", ""] = replica.num_running
        replica.show_metrics()
