"""The engine core: one step at a time, from plan to text, and what happens when a step fails.

Owns the joint life of scheduler, executor and output streams. Has no thread and no queue; its
caller adds requests, calls `step` and gets chunks through `deliver`. Must not know Triton.

    step N    plan ─► submit ─► text of step N-1 ─► wait ─► apply
                                 (while N computes)
"""

import os
from collections.abc import Callable

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import Limits, Scheduler, SchedulerStats, Update
from charonia.engine.admission import GenerationRequest, admit
from charonia.engine.drafting import make_speculation
from charonia.engine.metrics import Metrics
from charonia.engine.outputs import Chunk, OutputStream
from charonia.engine.step_times import StepTimes
from charonia.errors import (
    CharoniaError,
    EngineDiedError,
    RequestCancelledError,
    RequestTimeoutError,
    StepFailedError,
    UnavailableError,
)
from charonia.protocol import EngineInfo, Executor, StepResult
from charonia.text.tokenizer import Tokenizer

CONNECT_RETRY_S = 0.1
BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
DEADLINE_FACTOR = 10.0


class EngineCore:
    """Serves requests on any executor and survives its failures.

    Args:
        deliver: called with every chunk, in this caller's thread; must return quickly.
        clock: seconds, monotonic. log: takes one line.
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
    ) -> None:
        self.metrics = Metrics()
        self._executor = executor
        self._engine_args = engine_args
        self._scheduler_args = scheduler_args
        self._tokenizer = tokenizer
        self._deliver = deliver
        self._clock = clock
        self._log = log
        self._streams: dict[str, OutputStream] = {}
        self._names: dict[str, tuple[str, str]] = {}  # key: request id and tenant
        self._updates: list[Update] = []
        self._stats = SchedulerStats()
        self._step_times = StepTimes()
        self._num_failures = 0
        self._num_connect_failures = 0
        self._retry_at = 0.0
        self._needs_restart = False
        self._info: EngineInfo | None = None
        self._scheduler: Scheduler | None = None
        self.down_reason: str | None = "the engine is not ready yet"
        self._set_gauges()

    # ------------------------------------------------------------------ connecting

    @property
    def is_up(self) -> bool:
        """Whether there is an engine to run steps on."""
        return self.down_reason is None

    @property
    def has_requests(self) -> bool:
        """Whether anything is live, or chunks are still to be delivered."""
        return bool(self._streams) or bool(self._updates)

    @property
    def info(self) -> EngineInfo:
        """Of the engine as last seen.

        Raises:
            UnavailableError: none was ever there.
        """
        if self._info is None:
            raise UnavailableError(self.down_reason or "the engine is not ready yet")
        return self._info

    def connect(self) -> bool:
        """Get an engine, if a try is due: the one that is there, or a new one.

        Returns:
            Whether there is one now.
        """
        if self._clock() < self._retry_at:
            return False
        try:
            if self._needs_restart:
                self._executor.restart()
            self._take_engine(self._executor.info())
        except CharoniaError as error:
            self._on_no_engine(error)
            return False
        except Exception:
            self._back_off()  # whoever catches it will call again
            raise
        if self._needs_restart:
            self.metrics.count("charonia_engine_restarts_total")
        self._needs_restart = False
        self._num_connect_failures = 0
        self.down_reason = None
        self._set_gauges()
        return True

    def _on_no_engine(self, error: CharoniaError) -> None:
        if self._info is None and isinstance(error, EngineDiedError):
            # It is still being loaded for the first time.
            self._retry_at = self._clock() + CONNECT_RETRY_S
            return
        wait = self._back_off()
        self._needs_restart = self._info is not None
        self.down_reason = f"the engine is down and cannot be loaded: {error}"
        self._log(f"{self.down_reason}; next try in {wait:.0f} s")
        self._fail_all(UnavailableError(self.down_reason))

    def _back_off(self) -> float:
        """Put the next try off, further each time; return for how many seconds."""
        wait = BACKOFF_S[min(self._num_connect_failures, len(BACKOFF_S) - 1)]
        self._num_connect_failures += 1
        self._retry_at = self._clock() + wait
        return wait

    def _take_engine(self, info: EngineInfo) -> None:
        limits = Limits.of_engine(
            info,
            max_queue_size=self._scheduler_args.max_queue_size,
            enable_prefix_caching=self._engine_args.enable_prefix_caching,
            enable_chunked_prefill=self._engine_args.enable_chunked_prefill,
        )
        if limits.max_model_len < info.max_model_len:
            self._log(
                f"warning: max_model_len is lowered from {info.max_model_len} to "
                f"{limits.max_model_len}: the KV cache has {info.num_blocks - 1} blocks of "
                f"{info.kv.block_size} tokens"
            )
        self._info = info
        if self._scheduler is None:
            self._scheduler = Scheduler(
                limits,
                hash_secret=os.urandom(32),
                epoch=info.epoch,
                stats=self._stats,
                speculation=make_speculation(self._engine_args.speculative_config),
            )
            return
        self._scheduler.reset(limits, epoch=info.epoch)
        for request in list(self._scheduler.requests):
            if len(request.token_ids) >= limits.max_model_len:
                self._end(
                    request.key,
                    UnavailableError(
                        f"the engine was restarted with max_model_len {limits.max_model_len}; "
                        f"the request has {len(request.token_ids)} tokens already"
                    ),
                )

    # ------------------------------------------------------------------ requests come and go

    def check(self, request: GenerationRequest) -> None:
        """Refuse what cannot be served. Reads only; may be called from any thread.

        Raises:
            InvalidRequestError, UnavailableError.
        """
        admit(request, self.info, self._living_scheduler().limits, self._tokenizer, 0.0)

    def check_queue(self, num_arriving: int) -> None:
        """Refuse a request when the queue is full. Reads only; may be called from any thread.

        Args:
            num_arriving: requests that were accepted and are not added yet.

        Raises:
            QueueFullError, UnavailableError.
        """
        self._living_scheduler().check_queue(num_arriving)

    def add(self, request: GenerationRequest) -> None:
        """Take a request in; whatever happens to it comes through `deliver`, errors too."""
        now = self._clock()
        try:
            scheduler = self._living_scheduler()
            admitted = admit(request, self.info, scheduler.limits, self._tokenizer, now)
            scheduler.add(admitted)
        except CharoniaError as error:
            self._deliver(Chunk(request.key, error=error, num_prompt_tokens=0))
            return
        self._streams[request.key] = OutputStream(admitted, request.params, self._tokenizer)
        self._names[request.key] = (request.request_id, request.params.tenant)

    def _living_scheduler(self) -> Scheduler:
        scheduler = self._scheduler
        if self.down_reason is not None or scheduler is None:
            raise UnavailableError(self.down_reason or "the engine is not ready yet")
        return scheduler

    def cancel(self, key: str) -> None:
        """End a request at its client's wish; one that is not live is none of our business."""
        if key in self._streams:
            self.metrics.count("charonia_cancellations_total")
            self._end(key, RequestCancelledError("the request was cancelled"))

    def cancel_matching(self, request_id: str, tenant: str) -> None:
        """Cancel all live requests that a client gave this id."""
        for key in [key for key, name in self._names.items() if name == (request_id, tenant)]:
            self.cancel(key)

    # ------------------------------------------------------------------ one step

    def step(self) -> bool:
        """Run one step and deliver the chunks of the one before.

        Returns:
            Whether there was anything to compute.
        """
        assert self._scheduler is not None, "step() before connect()"
        started = self._clock()
        for request in self._scheduler.expire(started):
            self._end(request.key, RequestTimeoutError("Request timeout expired"))
        plan = self._scheduler.plan(started)
        pending, submitted = None, started
        if plan is not None:
            self.metrics.histograms["charonia_plan_seconds"].observe(self._clock() - started)
            submitted = self._clock()
            pending = self._executor.submit(plan)
        delivering = self._clock()
        self._deliver_updates()
        self._count_phase("deliver", delivering)
        if pending is None:
            self._set_gauges()
            return False
        try:
            result = pending.result(self._step_deadline_s())
        except StepFailedError as error:
            self._on_failed_step(error)
        except (EngineDiedError, TimeoutError) as error:
            self._on_death(str(error) or "it did not answer in time")
        else:
            arrived = self._clock()
            self._apply(result)
            self._count_phase("apply", arrived)
            self._count_phase("transit", submitted + result.seconds, arrived)
        self._set_gauges()
        return True

    def abandon(self, error: CharoniaError) -> None:
        """Fail every request and forget the state they left; the engine is asked anew.

        The state is not touched: whatever error made it useless must not keep anybody waiting.
        """
        self.down_reason = "the scheduler recovers from an internal error"
        self._scheduler = None
        self._updates = []
        self._num_failures = 0
        self._set_gauges()
        self._fail_all(error)

    def close(self) -> None:
        """Fail what is live and let go of the engine."""
        self._fail_all(UnavailableError("the server is shutting down"))
        self.down_reason = "the server is shutting down"
        self._executor.close()

    # ------------------------------------------------------------------ parts of a step

    def _apply(self, result: StepResult) -> None:
        assert self._scheduler is not None
        self._num_failures = 0
        self.metrics.histograms["charonia_step_seconds"].observe(result.seconds)
        self._step_times.observe(self._scheduler.num_tokens_in_flight, result.seconds)
        self._updates = self._scheduler.apply(result, self._clock())

    def _count_phase(self, phase: str, started: float, ended: float | None = None) -> None:
        seconds = (self._clock() if ended is None else ended) - started
        self.metrics.count("charonia_step_phase_seconds_total", max(seconds, 0.0), phase)

    def _step_deadline_s(self) -> float:
        """When to give a step up: far beyond what its tokens should take."""
        assert self._scheduler is not None
        predicted = self._step_times.predict(self._scheduler.num_tokens_in_flight)
        return max(self._scheduler_args.min_step_deadline_s, DEADLINE_FACTOR * predicted)

    def _deliver_updates(self) -> None:
        updates, self._updates = self._updates, []
        now = self._clock()
        for update in updates:
            stream = self._streams.get(update.request.key)
            if stream is not None:
                self._deliver_update(stream, update, now)

    def _deliver_update(self, stream: OutputStream, update: Update, now: float) -> None:
        assert self._scheduler is not None
        num_tokens, last_at = stream.num_tokens, stream.last_token_at
        chunk = stream.take(update, now)
        self._observe_tokens(stream, stream.num_tokens - num_tokens, last_at, now)
        if chunk is None:
            return
        if chunk.finish_reason is not None:
            key = update.request.key
            if update.finish_reason is None:  # a stop string: the scheduler does not know yet
                self._scheduler.finish(key)
            self._forget(key, chunk.finish_reason, now)
        self._deliver(chunk)

    def _observe_tokens(
        self, stream: OutputStream, num_tokens: int, last_at: float | None, now: float
    ) -> None:
        """Count tokens that a client gets; `last_at` is when it got some before."""
        if not num_tokens:
            return
        self.metrics.count("charonia_generation_tokens_total", num_tokens)
        if last_at is None:
            waited = now - stream.request.arrived_at
            self.metrics.observe_request("charonia_time_to_first_token_seconds", waited)
            num_tokens -= 1
            gap = 0.0
        else:
            gap = (now - last_at) / num_tokens
        self.metrics.histograms["charonia_inter_token_seconds"].observe(gap, num_tokens)

    # ------------------------------------------------------------------ failures

    def _on_failed_step(self, error: StepFailedError) -> None:
        """A step raised, the engine lives: a new epoch. Twice in a row counts as death."""
        assert self._scheduler is not None
        self._num_failures += 1
        self._log(f"a step failed: {error}")
        if self._num_failures > 1:
            self._on_death("two steps failed in a row")
            return
        try:
            self._scheduler.reset(epoch=self._executor.info().epoch)
        except EngineDiedError as death:
            self._on_death(str(death))

    def _on_death(self, reason: str) -> None:
        """The engine is gone: blame, bring up a fresh one, recompute every live request."""
        assert self._scheduler is not None
        self._log(f"the engine died: {reason}; {len(self._streams)} requests are live")
        self._num_failures = 0
        guilty = self._scheduler.blame()
        self._scheduler.reset()
        if guilty is not None:
            self._end(guilty.key, CharoniaError("the request stops the engine each time it runs"))
        started = self._clock()
        # Not down: what comes meanwhile waits for the new engine, unless it cannot be loaded.
        self._needs_restart = True
        self._set_gauges()
        if self.connect():
            self._log(f"the engine is back after {self._clock() - started:.1f} s")

    def _fail_all(self, error: CharoniaError) -> None:
        for key in list(self._streams):
            self._end(key, error)

    def _end(self, key: str, error: CharoniaError) -> None:
        """End a live request with an error."""
        stream = self._streams.get(key)
        if stream is None:
            return
        if self._scheduler is not None:
            self._scheduler.finish(key)
        now = self._clock()
        self._forget(key, error.code.lower(), now)
        self._deliver(stream.fail(error, now))

    def _forget(self, key: str, reason: str, now: float) -> None:
        stream = self._streams.pop(key)
        del self._names[key]
        request = stream.request
        self.metrics.count("charonia_finished_total", label=reason)
        # At the end, so that requests whose time ran out in the queue are seen as well.
        left_queue_at = now if request.started_at is None else request.started_at
        self.metrics.observe_request("charonia_queue_seconds", left_queue_at - request.arrived_at)
        self.metrics.observe_request("charonia_request_seconds", now - request.arrived_at)
        self.metrics.observe_request("request_prompt_tokens", request.num_prompt)
        self.metrics.observe_request("request_generation_tokens", stream.num_tokens)

    def _set_gauges(self) -> None:
        metrics, scheduler, stats = self.metrics, self._scheduler, self._stats
        metrics.gauges["charonia_engine_up", ""] = float(self.is_up and not self._needs_restart)
        num_running = scheduler.num_running if scheduler else 0
        num_waiting = scheduler.num_waiting if scheduler else 0
        metrics.gauges["charonia_requests_running", ""] = num_running
        metrics.gauges["charonia_requests_waiting", ""] = num_waiting
        if scheduler is None:
            return
        kv = scheduler.kv
        for state, value in (
            ("total", kv.num_blocks - 1),
            ("used", kv.num_used),
            ("cached", kv.num_cached),
            ("free", kv.num_free - kv.num_cached),
        ):
            metrics.gauges["charonia_kv_blocks", state] = value
        counters = metrics.counters
        counters["charonia_prompt_tokens_total", "computed"] = stats.prompt_tokens_computed
        counters["charonia_prompt_tokens_total", "cached"] = stats.prompt_tokens_cached
        counters["charonia_preemptions_total", ""] = stats.preemptions
        counters["charonia_prefix_cache_queried_tokens_total", ""] = stats.prefix_queried_tokens
        counters["charonia_prefix_cache_hit_tokens_total", ""] = stats.prefix_hit_tokens
        metrics.gauges["charonia_draft_depth", ""] = stats.draft_depth
        metrics.show_drafts(stats.drafts)
