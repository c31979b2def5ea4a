"""The requests of all clients, above the replica that runs them.

Owns the course of every request (`request_registry` has them): when it is placed on the replica,
when and why it ends. Also owns when an operator's reload of the engine begins. Has no thread and no
queue: its caller adds requests, calls `step` and gets events by `RequestEvents`. Must not know
Triton, nor how steps and engines fail; `replica` does.

    add() ──► held ──place──► Replica ──updates──► RequestRegistry ──► on_chunk()
                │                │ cannot go on       │
                └────────────────┴── time, cancel ────┴──► on_chunk(): an error, once

`step` never waits for an engine, so timeouts and cancellations work in each of its states:

    step N    expire ─► follow the engine ─► place ─► plan ─► submit
                  ─► text of step N-1 (while N computes) ─► wait a little ─► apply, if N has ended

Mostly two steps are in flight, of the same rows or, in a pipeline, of different rows:

    apply N-1 ─► text of step N-1 ─► wait a little ─► plan N+1 ─► submit ─► wait for N ─► apply N
                  (while N computes)   (see `plan_time`)
"""

import traceback
from collections.abc import Callable, Collection
from math import inf

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import Group, Limits, LoadShedding, Request, Update
from charonia.core.gate.attainment import Attainment
from charonia.core.gate.tenants import Tenants
from charonia.core.generation_request import GenerationRequest, check, control_requests, seeds_of
from charonia.core.output.outputs import MakeStream
from charonia.core.recording.journal import Journal
from charonia.core.recording.kv_events import KVEvents
from charonia.core.replica.reload import Reload
from charonia.core.replica.replica import Replica
from charonia.core.replica.schedulers import Schedulers
from charonia.core.request_events import RequestEvents
from charonia.core.request_registry import LiveRequest, RequestRegistry, owner_of
from charonia.core.scheduler_factory import rejects_late
from charonia.errors import (
    CharoniaError,
    LateRequestError,
    RequestCancelledError,
    RequestQuarantinedError,
    RequestTimeoutError,
    ShuttingDownError,
)
from charonia.events import error_event, event
from charonia.metrics.metrics import Metrics
from charonia.protocol import EngineInfo, Executor

RESULT_WAIT_S = 0.1
"""Longest wait for a step, in seconds; then cancellations and timeouts are looked at."""
SHOW_EVERY_S = 0.01
"""Interval at which metrics show what steps change, in seconds. It is looked at after each step, or
each `RESULT_WAIT_S` of it. What comes, begins or ends is shown with its step, and so is all when no
step runs."""


class EngineCore:
    """Serves requests on any executor and survives its failures. Implements `ReplicaEvents`.

    Args:
        make_stream: makes the output of a sample, mostly text.
        clock: monotonic, in seconds. log: takes one line.
        read_args: returns the arguments of the engine that is loaded now; None always means
            `engine_args`.
        wake: called from any thread when `step` has work that no other call announces, such as a
            result.
        tenants: weights and limits of the tenants; None treats all alike.
        kv_events: gets the changes of the prefix cache; None if nobody subscribes.
        journal, hash_secret: see `Schedulers`.

    Attributes:
        metrics, attainment: counts since the start, of all requests and by tenant.
    """

    def __init__(
        self,
        executor: Executor,
        engine_args: EngineArgs,
        scheduler_args: SchedulerArgs,
        make_stream: MakeStream,
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
        self._scheduler_args = scheduler_args
        self._clock = clock
        self._log = log
        self._requests = RequestRegistry(make_stream, self.metrics, self.attainment, clock=clock)
        self._updates: list[Update] = []
        self._shown_at = -inf  # so too where something is to be shown at once
        self._seed, self._next_seed = engine_args.seed, seeds_of(engine_args.seed)
        self._replica = Replica(
            executor,
            engine_args,
            scheduler_args,
            Schedulers(
                scheduler_args,
                tenants,
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
        """True if there is an engine to run steps on."""
        return self._replica.recovery.is_serving

    @property
    def serving_since(self) -> float | None:
        """Time at which the current engine was found; None while there is none."""
        return self._replica.recovery.serving_since

    @property
    def down_reason(self) -> str | None:
        """Reason why requests fail at once; None if there is an engine or they wait for one."""
        return self._replica.recovery.down_reason

    @property
    def has_requests(self) -> bool:
        """True if requests are live, steps are in flight, or chunks are not delivered yet."""
        return any((self._requests, self._updates, self._replica.is_busy))

    @property
    def info(self) -> EngineInfo:
        """Info of the engine, as last seen.

        Raises:
            UnavailableError: there was no engine yet.
        """
        return self._replica.recovery.known_info

    @property
    def limits(self) -> Limits:
        """Limits that requests must keep.

        Raises:
            UnavailableError: there is no engine, and none is expected.
        """
        return self._replica.limits

    @property
    def last_step_at(self) -> float | None:
        """Time at which a step was last applied; None before the first."""
        return self._replica.last_step_at

    @property
    def engine_args(self) -> EngineArgs:
        """Arguments of the engine, as last seen."""
        return self._replica.engine_args

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that cannot be served. Reads only; may be called from any thread.

        Raises:
            InvalidRequestError, NotSupportedError, UnavailableError.
        """
        check(request, self._replica.engine_args, self._replica.recovery.known_info, self.limits)

    def overdue(self, *, is_until_start: bool, has_started: bool) -> RequestTimeoutError | None:
        """The error of a request that has timed out; None if its timeout does not count any more.

        Args:
            is_until_start: whether its `timeout` is over; else its `deadline_ms`. has_started:
                whether it has had a step.
        """
        if is_until_start and has_started:
            return None
        error = RequestTimeoutError.of(is_until_start=is_until_start)
        if is_until_start or has_started:
            return error
        # The scheduler would have rejected it as late, had it known how long steps take.
        is_late = rejects_late(self.engine_args, self._scheduler_args)
        return LateRequestError(str(error)) if is_late else error

    # ------------------------------------------------------------------ requests come and go

    def add(
        self, request: GenerationRequest, events: RequestEvents, arrived_at: float | None = None
    ) -> LiveRequest:
        """Add a checked request; its outcome comes by events.

        Args:
            events: receives them.
            arrived_at: its arrival, by the clock; None is now. Its timeouts count from then.

        Returns:
            The live request, for `cancel`, `cancel_samples` and `end`.
        """
        live = LiveRequest(request, events, self._clock() if arrived_at is None else arrived_at)
        self._requests.add(live)
        self._shown_at = -inf
        return live

    def cancel(self, live: LiveRequest) -> None:
        """Cancel a request for its client; one that has ended is ignored."""
        if live in self._requests:
            self._note_cancelled(live)
            self._end(live, RequestCancelledError("the request was cancelled"))

    def cancel_samples(self, live: LiveRequest, indexes: Collection[int]) -> None:
        """Cancel some samples of a request for its client, without an error.

        Samples that do not exist or have ended are ignored. With `best_of` no sample can be
        cancelled alone, because the best ones are known only at the end.
        """
        if live not in self._requests:
            return
        self._shown_at = -inf
        if live.leaves_nothing(indexes):
            self._note_cancelled(live)
        for sample in live.cancellable(indexes):
            self._replica.finish(sample)
        self._requests.cancel_samples(live, indexes)

    def end(self, live: LiveRequest, error: CharoniaError) -> None:
        """End a request with an error; one that has ended is ignored."""
        if live in self._requests:
            self._end(live, error)

    def shed(self, shedding: LoadShedding) -> None:
        """Apply load shedding to steps from now on."""
        self._replica.shed(shedding)

    def reload(self, reload: Reload) -> None:
        """Change to the engine that `reload` configures; see there when that is.

        May be called from any thread, by one at a time.
        """
        self._replica.order_reload(reload)

    def abandon(self, error: CharoniaError) -> None:
        """Fail every request, discard their state and connect to the engine again.

        The state is discarded unread, since it may be broken; no client may wait because of that.
        A request that cannot even be failed is logged and forgotten.
        """
        self._replica.abandon(error)
        self._updates = []
        for live in list(self._requests):
            try:
                self._end(live, error)
            except Exception:
                self._log(f"error: {traceback.format_exc()}")
        self._set_gauges()

    def close(self) -> None:
        """Fail the live requests and release the engine."""
        self._fail_all(ShuttingDownError())
        self._replica.close()

    # ------------------------------------------------------------------ one step

    def deliver(self) -> None:
        """Deliver the last step's output, if the engine has another step to compute meanwhile.

        So a sample that has met its stop string is in no further step. `step` begins with this.
        A caller that does it earlier can add requests that arrived meanwhile to the next plan.
        """
        if self._replica.is_fed:
            self._deliver_updates()

    def step(self) -> bool:
        """Do all due work, fill the engine, and apply the oldest step in flight if it has ended.

        Returns:
            Whether there is more to do at once. If not, the caller may wait for `wake`, another
            call, or about a tenth of a second.
        """
        replica = self._replica
        self.deliver()
        self._expire(self._clock())
        if not replica.recovery.is_serving:
            replica.follow()
        if (reload := replica.reload) is not None and reload.phase != "loading":
            self._go_on_with_reload(reload)
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
        is_serving = replica.recovery.is_serving
        if not is_busy or was_serving != is_serving or self._is_to_show():
            self._set_gauges()
        return is_busy or was_serving != is_serving

    def _expire(self, now: float) -> None:
        """End the requests that have timed out."""
        for live, is_until_start in self._requests.take_due(now):
            has_started = live.started_at is not None
            error = self.overdue(is_until_start=is_until_start, has_started=has_started)
            if error is not None:
                self._end(live, error)

    def _go_on_with_reload(self, reload: Reload) -> None:
        """Begin the reload as soon as it may begin."""
        requests = self._requests
        reload.num_live, reload.num_held = requests.num_open, len(requests.held)
        if reload.is_cancelled:
            reload.fail("it was cancelled while requests were finishing")
        elif reload.drain and self.is_up and requests.num_open:
            reload.phase = "draining"
        else:
            self._deliver_updates()  # finished output need not wait for another engine
            self._replica.begin_reload(reload)

    def _place_held(self) -> None:
        """Place the held requests on the replica, or fail them if there is no engine."""
        if self._replica.reload is not None:
            return  # they wait for the next engine
        if self.down_reason is not None:
            for live in list(self._requests.held):
                self._end(live, self._replica.recovery.unavailable)
        elif self.is_up:
            for live in list(self._requests.held):
                self._place(live)

    def _place(self, live: LiveRequest) -> None:
        replica = self._replica
        if replica.engine_args.seed != self._seed:  # another engine was loaded
            self._seed = replica.engine_args.seed
            self._next_seed = seeds_of(self._seed)
        added: list[Request] = []
        try:
            samples = control_requests(
                live.request,
                replica.recovery.known_info,
                replica.limits,
                live.arrived_at,
                self._next_seed,
            )
            for sample in samples:
                replica.add(sample)
                added.append(sample)
        except CharoniaError as error:
            for sample in added:
                replica.finish(sample.key)
            self._requests.fail(live, error)
            self._shown_at = -inf
            return
        self._requests.open(live, samples)
        if live.cancelled:
            self.cancel_samples(live, live.cancelled)

    def _deliver_updates(self) -> None:
        updates, self._updates = self._updates, []
        if not updates:
            return
        now = self._clock()
        for update in updates:
            if self._requests.take(update, now):
                self._replica.finish(update.request.key, is_complete=True)
                self._shown_at = -inf
        self.metrics.count_phase("deliver", self._clock() - now)

    # ------------------------------------------------------------------ from the replica

    def on_started(self, group: Group) -> None:
        """See `ReplicaEvents`."""
        self._shown_at = -inf
        if (live := owner_of(group)) is not None:
            live.events.on_started()

    def on_failed(self, group: Group, error: CharoniaError) -> None:
        """See `ReplicaEvents`."""
        live = owner_of(group)
        if live is None:
            return
        if isinstance(error, RequestQuarantinedError):
            self.metrics.count("charonia_requests_quarantined_total")
            self._log(error_event("request_quarantined", **live.request.log_fields))
        self._end(live, error)

    # ------------------------------------------------------------------ ends

    def _note_cancelled(self, live: LiveRequest) -> None:
        """Count a request that its client cancels; a shared computation has no client."""
        if live.request.is_shared:
            return
        self.metrics.count("charonia_cancellations_total")
        self._log(event("request_cancelled", **live.request.log_fields, tokens=live.num_tokens))

    def _fail_all(self, error: CharoniaError) -> None:
        for live in list(self._requests):
            self._end(live, error)

    def _end(self, live: LiveRequest, error: CharoniaError) -> None:
        """End a request with an error, whether it is held or placed."""
        self._shown_at = -inf
        for sample in live.open_samples:
            self._replica.finish(sample)
        self._requests.fail(live, error)

    def _is_to_show(self) -> bool:
        """Return whether metrics are to show the counts that a step has changed."""
        has_end = any(update.finish_reason is not None for update in self._updates)
        return has_end or self._clock() >= self._shown_at + SHOW_EVERY_S

    def _set_gauges(self) -> None:
        self._shown_at = self._clock()
        self._replica.show_metrics(num_held=len(self._requests.held))
