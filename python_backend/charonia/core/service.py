"""The engine service: the core in a thread of its own, with methods for any thread.

Owns the one scheduling thread and its inbox. Must not know Triton: chunks go to the request's sink,
which is called in the service's thread.
"""

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

from charonia.config import MIN_ANSWER_BYTES, EngineArgs, SchedulerArgs
from charonia.control import Limits
from charonia.core.accepted_request import AcceptedRequest, AcceptedRequests, Sink
from charonia.core.answers import AnswerCache, PromptIndex, SimilarPrompts
from charonia.core.engine_core import EngineCore
from charonia.core.gate.degradation import Degradation
from charonia.core.gate.gate import Gate
from charonia.core.gate.queue_order import Entry
from charonia.core.gate.tenants import Tenants
from charonia.core.generation_request import GenerationRequest
from charonia.core.output.outputs import OutputStream
from charonia.core.recording.journal import Journal
from charonia.core.recording.kv_events import KVEvents
from charonia.core.recording.recorder import Recorder, RecordingExecutor
from charonia.core.replica.reload import Reload
from charonia.core.request_log import RequestLog
from charonia.errors import (
    CharoniaError,
    ConfigError,
    ShuttingDownError,
    UnavailableError,
)
from charonia.events import Log, error_event
from charonia.metrics.metrics import Metrics
from charonia.protocol import EngineInfo, Executor, SamplingParams
from charonia.text.tokenizer import Tokenizer

_INVALID = "invalid"
IDLE_WAIT_S = 0.1
LOOK_EVERY_S = 0.25
"""Interval at which queue waits and the tenants' requests are measured, in seconds."""


@dataclass(frozen=True, slots=True)
class ServiceState:
    """State of the service.

    Attributes:
        is_up: whether steps can run. down_reason: why requests are refused; None while they are
            accepted.
        serving_since: when the current engine was found, on the monotonic clock; None while there
            is none.
        num_live: accepted requests that have not ended.
        last_step_at: when a step with tokens was last applied, on the monotonic clock; None before
            the first.
        last_turn_at: when the thread's loop last began a turn; None before the first. It begins one
            at least ten times a second, unless a turn is held up.
    """

    is_up: bool
    down_reason: str | None
    serving_since: float | None
    num_live: int
    last_step_at: float | None
    last_turn_at: float | None


class EngineService:
    """Serves requests of many threads on one engine.

    Args:
        log: takes one line, from any thread. read_args, kv_events: as `EngineCore`.
        request_log: follows the requests; None follows none.
        prompt_index: finds similar prompts for the semantic cache; None turns that off.

    Raises:
        ConfigError: the tenants' file is wrong, the record cannot be written, or the answer cache
            has no room for even one answer with its vector.
    """

    def __init__(
        self,
        executor: Executor,
        engine_args: EngineArgs,
        scheduler_args: SchedulerArgs,
        tokenizer: Tokenizer,
        *,
        log: Callable[[str], None],
        read_args: Callable[[], EngineArgs] | None = None,
        kv_events: KVEvents | None = None,
        prompt_index: PromptIndex | None = None,
        request_log: RequestLog | None = None,
    ) -> None:
        if prompt_index is not None:
            _check_room(scheduler_args, prompt_index)
        tenants_file = scheduler_args.tenants_file
        self._tenants = Tenants(
            None if tenants_file is None else Path(tenants_file),
            has_shares=scheduler_args.fair_share,
            log=log,
        )
        self._request_log = request_log or RequestLog(Log(log, lambda: "info"))
        self._gate = Gate(self._tenants, scheduler_args, clock=time.monotonic)
        self._recorder: Recorder | None = None
        self._journal: Journal | None = None
        if scheduler_args.record_dir is not None:
            directory, max_bytes = Path(scheduler_args.record_dir), scheduler_args.record_max_bytes
            self._recorder = Recorder(directory, max_bytes, log=log)
            executor = RecordingExecutor(executor, self._recorder, time.monotonic)
            if scheduler_args.record_schedule:
                has_token_ids = scheduler_args.record_token_ids
                self._journal = Journal(directory, max_bytes, has_token_ids=has_token_ids, log=log)
        self._similar = None
        if prompt_index is not None:
            self._similar = SimilarPrompts(prompt_index, tokenizer.decode, post=self._post, log=log)
        self._core = EngineCore(
            executor,
            engine_args,
            scheduler_args,
            partial(OutputStream, tokenizer=tokenizer),
            clock=time.monotonic,
            log=log,
            read_args=read_args,
            wake=self._wake_up,
            tenants=self._tenants,
            kv_events=kv_events,
            journal=self._journal,
        )
        self._answers = AnswerCache(
            self._core, scheduler_args, clock=time.monotonic, log=log, similar=self._similar
        )
        self._degradation = Degradation(scheduler_args, self._tenants, self._core.metrics, log=log)
        self._looked_at = 0.0
        self._log = log
        self._live = AcceptedRequests(self._gate, self._answers, self._post)
        self._inbox: list[Callable[[], None]] = []
        self._is_closing = False
        self._drained_at = inf
        self._last_turn_at: float | None = None
        self._is_woken = False
        self._wake = threading.Condition()
        self._is_connected = threading.Event()
        self._thread = threading.Thread(target=self._run, name="charonia-scheduling", daemon=True)

    @property
    def metrics(self) -> Metrics:
        """Metrics since the start."""
        return self._core.metrics

    @property
    def info(self) -> EngineInfo:
        """Info of the engine. Raises UnavailableError before there was one."""
        return self._core.info

    @property
    def state(self) -> ServiceState:
        """Current state. Reads only; may be called from any thread."""
        core = self._core
        return ServiceState(
            is_up=core.is_up,
            down_reason=core.down_reason,
            serving_since=core.serving_since,
            num_live=len(self._live),
            last_step_at=core.last_step_at,
            last_turn_at=self._last_turn_at,
        )

    def oldest_s(self, count: int) -> list[float]:
        """Ages of this many live requests, the oldest first, in seconds; fewer if there are fewer.

        They are those that were admitted first, without probes. An age counts from the arrival,
        which is earlier. May be called from any thread.
        """
        now = time.monotonic()
        return [max(0.0, now - arrived_at) for arrived_at in self._live.arrivals(count)]

    def start(self, *, wait_s: float = 0.0) -> None:
        """Start the thread. It connects to the engine as soon as there is one.

        Args:
            wait_s: return when it is connected, or after so many seconds.

        Raises:
            RuntimeError: a limit of processes is reached; it may be called again.
        """
        if self._similar is not None:
            self._similar.start()
        if self._thread.ident is None:
            self._thread.start()
        self._is_connected.wait(wait_s)

    def submit(
        self, request: GenerationRequest, sink: Sink, arrived_at: float | None = None
    ) -> AcceptedRequest:
        """Add a request. Its chunks go to `sink`; the last one has a finish reason or an error.

        Args:
            request: no other live request has its key.
            sink: called in the service's thread; must return quickly and not raise.
            arrived_at: its arrival, by the monotonic clock; None is now.

        Returns:
            The accepted request, which can be cancelled.

        Raises:
            InvalidRequestError, QueueFullError, UnavailableError, LateRequestError: it is refused
                at once; `sink` is not called.
        """
        arrived_at = time.monotonic() if arrived_at is None else arrived_at
        recorded = None
        if self._recorder is not None and request.prompt_ids and not request.is_probe:
            recorded = self._recorder.follow(request, arrived_at)
        try:
            self._core.check(request)
            digest = self._answers.digest_of(request)
            followed = self._request_log.follow(request, arrived_at)
            with self._wake:
                entry = self._admit(request, arrived_at)
                accepted = AcceptedRequest(request.key, entry, self._live, sink, followed, recorded)
                capped = self._degradation.capped(request)
                self._live.add(accepted)
                self._post(partial(accepted.compute, capped, arrived_at, digest))
                if recorded is not None:
                    self._inbox.append(recorded.note_taken_in)
        except CharoniaError as error:
            if not request.is_probe:
                self.count_rejection(error, request.params)
                self._request_log.note_refused(error, request.log_fields)
            if recorded is not None:
                recorded.note_refused(error)
            raise
        return accepted

    def check_tenant(self, params: SamplingParams, num_coming: int) -> None:
        """Refuse a request early that `submit` would refuse whatever its prompt is.

        Args:
            num_coming: requests of its tenant that are on their way to `submit`.

        Raises:
            InvalidRequestError, QueueFullError, UnavailableError: as `submit`.
        """
        self._degradation.check(params)
        self._gate.check(params.tenant, num_coming)

    def count_rejection(self, error: CharoniaError, params: SamplingParams | None = None) -> None:
        """Count a refused request, refused here or before `submit`.

        A tenant's count leaves out invalid requests: it tells of limits and of the server's state.

        Args:
            params: the request's, if they are known.
        """
        with self._wake:
            reason = _rejection(error)
            self.metrics.count("charonia_rejections_total", label=reason)
            if params is None:
                return
            tenant, has_deadline = params.tenant, params.deadline_ms is not None
            if reason != _INVALID:
                label = self._tenants.label_of(tenant)
                self.metrics.count("charonia_tenant_rejections_total", label=label)
            if not error.is_clients_doing:
                # Missed targets are counted in the service's thread, as the ends of requests are.
                self._inbox.append(
                    partial(self._core.attainment.note_refusal, tenant, has_deadline=has_deadline)
                )

    @property
    def limits(self) -> Limits:
        """Limits that requests must keep. May be called from any thread.

        Raises:
            UnavailableError: there is no engine, and none is expected.
        """
        return self._core.limits

    def count_cancellation(self) -> None:
        """Count a request whose client cancelled it before it was submitted."""
        self._post(partial(self.metrics.count, "charonia_cancellations_total"))

    @property
    def engine_args(self) -> EngineArgs:
        """Arguments of the engine, as last seen."""
        return self._core.engine_args

    def reload(self, reload: Reload) -> None:
        """Change to another engine; `reload` shows the progress, and always gets a result."""
        with self._wake:
            if self._is_closing:
                reload.fail("the server is shutting down")
                return
            self._core.reload(reload)
            self._wake_up()

    def drain(self) -> int:
        """Refuse new requests, except probes; all others go on.

        Returns:
            Number of live requests, without probes.
        """
        with self._wake:
            self._drained_at = min(self._drained_at, time.monotonic())
            return self._gate.num_live

    def close(self) -> None:
        """End every request with an error and stop the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread.ident is None:  # the thread was never started
            self._core.close()
        elif self._thread.is_alive():
            self._thread.join()
        if self._similar is not None:
            self._similar.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._journal is not None:
            self._journal.close()

    def _admit(self, request: GenerationRequest, arrived_at: float) -> Entry:
        """Admit a request or refuse it; another one may give way. The caller holds the lock."""
        # Requests that arrived before the drain began are still accepted.
        is_too_late = arrived_at >= self._drained_at and not request.is_probe
        if self._is_closing or is_too_late:
            raise ShuttingDownError
        if not request.is_probe:
            self._degradation.check(request.params)
        self._gate.follow(self._core.engine_args)
        num_queued = len(self._live) - self._core.limits.max_num_seqs
        entry, leaver = self._gate.enter(request, arrived_at, num_queued=num_queued)
        if leaver is not None:
            self._inbox.append(partial(self._give_way, *leaver))
        return entry

    def _post(self, call: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(call)
            self._wake.notify()

    # ------------------------------------------------------------------ the thread

    def _give_way(self, entry: Entry, error: CharoniaError) -> None:
        """End a request that gives way to another one, unless it has started meanwhile."""
        accepted = self._live.of(entry)
        if entry.is_leaving and accepted is not None:
            accepted.end(error)

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._turn()
            except Exception as error:
                num_lost = len(self._live)
                reason = f"{type(error).__name__}: {error}"
                self._log(error_event("scheduler_error", failed_requests=num_lost, reason=reason))
                self._log(f"error: {traceback.format_exc()}")
                self._abandon(CharoniaError(f"internal error: {type(error).__name__}"))
        self._take_inbox()
        self._answers.close()
        self._core.close()

    def _turn(self) -> None:
        self._last_turn_at = time.monotonic()
        self._tenants.refresh(self._last_turn_at)
        if self._last_turn_at - self._looked_at >= LOOK_EVERY_S:
            self._look(self._last_turn_at)
        if self._recorder is not None:
            self._recorder.flush(now=self._last_turn_at)
        if self._journal is not None:
            self._journal.flush(now=self._last_turn_at)
        self._answers.refresh()
        self._core.deliver()
        self._take_inbox()
        if self._core.step():
            return
        if self._core.is_up:
            self._is_connected.set()
        with self._wake:
            if not (self._inbox or self._is_closing or self._is_woken):
                self._wake.wait(IDLE_WAIT_S)
            self._is_woken = False

    def _look(self, now: float) -> None:
        """Measure queue waits and the tenants' requests; degrade or recover."""
        self._looked_at = now
        if self._degradation.observe(self._gate.wait_s(), now):
            self._core.shed(self._degradation.shedding)
        gauges = self.metrics.gauges
        for label, (num_waiting, num_running) in self._gate.num_of_tenants().items():
            if ("charonia_tenant_requests_waiting", label) not in gauges:
                self.metrics.name_tenant(label)
            gauges["charonia_tenant_requests_waiting", label] = num_waiting
            gauges["charonia_tenant_requests_running", label] = num_running

    def _wake_up(self) -> None:
        with self._wake:
            self._is_woken = True
            self._wake.notify()

    def _abandon(self, error: CharoniaError) -> None:
        """Recover from a bug of ours: every client gets an error, and the service goes on."""
        self._answers.abandon(error)
        self._core.abandon(error)
        with self._wake:
            # Requests that the core does not know: still in the inbox, or lost from it.
            left, self._inbox = self._live.all(), []
        for accepted in left:
            try:
                accepted.fail(error)
            except Exception:  # one whose state is broken; the others must be told
                self._log(f"error: {traceback.format_exc()}")

    def _take_inbox(self) -> None:
        with self._wake:
            inbox, self._inbox = self._inbox, []
        for call in inbox:
            call()


def _rejection(error: CharoniaError) -> str:
    return error.kind if isinstance(error, UnavailableError) else _INVALID


def _check_room(args: SchedulerArgs, index: PromptIndex) -> None:
    """Raises ConfigError: the answer cache has no room for one answer with its vector."""
    least = MIN_ANSWER_BYTES + index.bytes_per_prompt
    if args.answer_cache_bytes is not None and args.answer_cache_bytes < least:
        raise ConfigError(
            f"answer_cache_bytes = {args.answer_cache_bytes} holds no answer that a similar prompt"
            f" could be given, of which each takes {least} bytes at least"
        )
