"""The answer cache: requests that may share an answer, above the core that computes the others.

Owns the choice of requests that are computed once for several clients, the ends of these requests,
and the choice of answers to keep. Has no thread; it is called in the core's. Must not know steps,
nor Triton.

    add() ──► kept? ──────────────────────────► on_chunk(): all of it
          ├─► an equal one runs? join it ─────► on_chunk(): what came so far, and then what comes
          └─► SharedComputation ─► a similar prompt's? ─► on_chunk(): all of it, for each subscriber
                └─► EngineCore ─► on_chunk() ─► on_chunk(): for each subscriber
                                     └─ complete ─► kept

A shared computation has no timeout. Its subscribers have timeouts, and it ends when the last of
them leaves. Requests that are not cacheable pass through to the core.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import msgspec

from charonia.config import EngineArgs, SchedulerArgs
from charonia.core.answers.answer_key import (
    is_determined,
    prompt_digest,
    revision_of,
    scope_of,
)
from charonia.core.answers.answer_store import Answer
from charonia.core.answers.kept_answers import KeptAnswers
from charonia.core.answers.shared_computation import (
    SharedComputation,
    Source,
    Subscriber,
    timing_of_cached,
    whole_answer,
)
from charonia.core.answers.similar import Match, SimilarPrompts
from charonia.core.answers.subscribers import Subscribers
from charonia.core.engine_core import EngineCore
from charonia.core.generation_request import GenerationRequest
from charonia.core.output.outputs import Chunk
from charonia.core.request_events import RequestEvents
from charonia.core.request_registry import LiveRequest
from charonia.errors import (
    CharoniaError,
    RequestCancelledError,
    ShuttingDownError,
)
from charonia.protocol import EngineInfo

Computed = LiveRequest | Subscriber
"""A request that was added: it is computed alone, or its answer is shared or cached."""


class AnswerCache:
    """Answers requests from the cache, or has the core compute them.

    Args:
        core: computes the requests.
        clock: monotonic, in seconds. log: takes one line.
        similar: finds prompts of similar meaning; None if only equal prompts count.
    """

    def __init__(
        self,
        core: EngineCore,
        args: SchedulerArgs,
        *,
        clock: Callable[[], float],
        log: Callable[[str], None],
        similar: SimilarPrompts | None = None,
    ) -> None:
        self._core = core
        self._is_on = args.answer_cache_bytes is not None
        self._metrics = self._core.metrics
        self._kept = KeptAnswers(args, self._metrics, similar)
        self._clock = clock
        self._threshold = args.semantic_cache_threshold or 1.0
        self._computations: dict[SharedComputation, None] = {}
        self._num_computations = 0  # so far
        self._joinable: dict[bytes, SharedComputation] = {}  # by the answer's key
        self._subscribers = Subscribers(self._metrics, self._core.attainment, clock=clock, log=log)
        self._maybe_deserted: list[SharedComputation] = []
        self._seen: tuple[EngineInfo, EngineArgs, int] | None = None
        self._revision: bytes | None = None

    # ------------------------------------------------------------------ requests come and go

    def digest_of(self, request: GenerationRequest) -> bytes | None:
        """Digest of a checked request's prompt; None if the request is not cacheable.

        It takes time in proportion to the prompt's length, so call it outside the core's thread.
        """
        is_cacheable = self._is_on and request.params.use_answer_cache and is_determined(request)
        return prompt_digest(request.prompt_ids) if is_cacheable and not request.is_probe else None

    def add(
        self,
        request: GenerationRequest,
        events: RequestEvents,
        arrived_at: float,
        digest: bytes | None,
    ) -> Computed:
        """Add a checked request; its outcome comes by events.

        Args:
            events: receives them.
            arrived_at: its arrival, by the clock. digest: see `digest_of`.

        Returns:
            The request, for `cancel`, `cancel_samples` and `end`. It may have ended already.
        """
        self._look()
        if self._revision is None or digest is None:
            return self._core.add(request, events, arrived_at)
        key = scope_of(request.params, self._revision) + digest
        subscriber = Subscriber(request, events, arrived_at)
        answer = self._kept_for(key, request)
        if answer is not None:
            self._metrics.count("charonia_answer_cache_hits_total", label="exact")
            self._give_whole(subscriber, answer, Source("exact"))
        elif (shared := self._computation_for(key, request)) is not None:
            self._join(subscriber, shared)
        else:
            self._begin(subscriber, key)
        return subscriber

    def cancel(self, computed: Computed) -> None:
        """Cancel a request for its client; one that has ended is ignored."""
        if isinstance(computed, LiveRequest):
            self._core.cancel(computed)
        elif computed in self._subscribers:
            if (live := computed.live_alone) is not None:
                self._core.cancel(live)  # the core also sends text that was held back
            else:
                self._leave(computed, RequestCancelledError("the request was cancelled"))
            self._subscribers.note_cancelled(computed)

    def end(self, computed: Computed, error: CharoniaError) -> None:
        """End a request with an error; one that has ended is ignored."""
        if isinstance(computed, LiveRequest):
            self._core.end(computed, error)
        elif computed in self._subscribers:
            if (live := computed.live_alone) is not None:
                self._core.end(live, error)
            else:
                self._leave(computed, error)

    def cancel_samples(self, computed: Computed, indexes: Collection[int]) -> None:
        """Cancel some samples of a request, without an error; see the core's method."""
        if isinstance(computed, LiveRequest):
            self._core.cancel_samples(computed, indexes)
        elif computed in self._subscribers:
            self._cancel_samples(computed, indexes)

    def _cancel_samples(self, subscriber: Subscriber, indexes: Collection[int]) -> None:
        params = subscriber.request.params
        wanted = subscriber.open.intersection(indexes)
        if not wanted or params.num_samples > params.n:  # the best are not known yet
            return
        if (live := subscriber.live_alone) is not None:
            self._close_to_others(subscriber.computation)
            # Includes samples that only former subscribers wanted: the core must see the last one
            # end.
            left = subscriber.open.difference(wanted)
            self._core.cancel_samples(live, set(range(params.n)) - left)
        else:
            self._leave(subscriber, None, wanted)
        if not subscriber.open and subscriber.reason == "cancelled":
            self._subscribers.note_cancelled(subscriber)

    def close(self) -> None:
        """End the computations that the core does not have; the core ends the others."""
        for shared in list(self._computations):
            for subscriber in list(shared.subscribers) if shared.live is None else []:
                self._leave(subscriber, ShuttingDownError())

    def abandon(self, error: CharoniaError) -> None:
        """Count all live requests as failed and forget them; the caller tells their clients.

        The computations are discarded unread, since they may be broken.
        """
        self._computations, self._joinable, self._maybe_deserted = {}, {}, []
        self._subscribers.abandon(error)

    def refresh(self) -> None:
        """Drop what is too old, and note whether another engine serves.

        To be called before the core delivers a step's output: its engine may be a new one.
        """
        if self._is_on:
            self._look()
            now = self._clock()
            self._kept.expire(now)
            self._expire(now)
            self._end_deserted()
        self._kept.show_metrics()

    # ------------------------------------------------------------------ from the core

    def note_started(self, shared: SharedComputation) -> None:
        """Note that the first step of a computation, or of one of its samples, begins."""
        if shared in self._computations and shared.started_at is None:
            shared.started_at = self._clock()
            for subscriber in shared.subscribers:
                subscriber.events.on_started()

    def note_first_token(self, shared: SharedComputation) -> None:
        """Note that a computation has its first token."""
        if shared in self._computations:
            shared.has_token = True
            for subscriber in shared.subscribers:
                self._subscribers.note_first_token(subscriber)

    def take(self, shared: SharedComputation, chunk: Chunk) -> None:
        """Take a chunk of a computation; it goes to all subscribers of its sample."""
        if shared not in self._computations:
            return
        now = self._clock()
        if chunk.ends_sample:
            shared.open.discard(chunk.index)
        if chunk.error is None:
            shared.pieces.add(chunk)
        if chunk.is_final:
            self._look()
            self._end(shared, now)
        for subscriber in list(shared.subscribers):
            self._give(subscriber, shared, chunk, now)

    # ------------------------------------------------------------------ who gets what

    def _look(self) -> None:
        """Note whether another model serves, whose tokens differ from the last one's.

        Without an engine the last revision stays: a computation that begins now is kept only if the
        next engine has the same one.
        """
        core = self._core
        if not (self._is_on and core.is_up):
            return
        info, args, limits = core.info, core.engine_args, core.limits
        if self._seen is not None:
            seen_info, seen_args, seen_length = self._seen
            is_same = info is seen_info and args is seen_args
            if is_same and limits.max_model_len == seen_length:
                return
        self._seen = info, args, limits.max_model_len
        revision = revision_of(info, args, limits)
        if revision != self._revision:
            self._revision = revision
            self._joinable.clear()
            for shared in self._computations:
                shared.is_own = False

    def _kept_for(self, key: bytes, request: GenerationRequest) -> Answer | None:
        if not self._core.is_up:  # the next engine may be another one
            return None
        return self._kept.get(key, request, self._clock())

    def _computation_for(self, key: bytes, request: GenerationRequest) -> SharedComputation | None:
        """A computation that a request may join, or None."""
        shared = self._joinable.get(key)
        if shared is None or self._has_order(request):
            return None
        has_all = shared.request.counts_logprobs or not request.counts_logprobs
        is_in_time = shared.request.params.priority <= request.params.priority
        return shared if has_all and is_in_time else None

    def _has_order(self, request: GenerationRequest) -> bool:
        """Return whether a deadline orders a request in the queue; such requests don't join."""
        is_by_deadline = self._core.engine_args.scheduling_policy == "deadline"
        return is_by_deadline and request.params.deadline_ms is not None

    def _begin(self, subscriber: Subscriber, answer_key: bytes) -> None:
        request, arrived_at = subscriber.request, subscriber.arrived_at
        may_join = not self._has_order(request)
        # The first request may leave, and another one may arrive with the same key.
        self._num_computations += 1
        name = f"{request.key}/{self._num_computations}/shared"
        own = replace(request, key=name, is_shared=True, timeout_s=None)
        if may_join:
            params = msgspec.structs.replace(request.params, deadline_ms=None)
            own = replace(own, params=params)
        shared = SharedComputation(answer_key, own, arrived_at)
        subscriber.is_leader = True
        self._computations[shared] = None
        if may_join:
            self._joinable[answer_key] = shared
        self._subscribe(subscriber, shared)
        if not self._kept.ask_for_similar(shared, partial(self._settle, shared)):
            self._compute(shared)

    def _compute(self, shared: SharedComputation) -> None:
        self._metrics.count("charonia_answer_cache_misses_total")
        shared.live = self._core.add(
            shared.request, _ComputationEvents(self, shared), shared.arrived_at
        )

    def _settle(self, shared: SharedComputation, match: Match | None) -> None:
        """Take the answer of the most similar prompt, or compute one."""
        if shared not in self._computations:
            return  # all subscribers have left
        self._look()
        answer = None
        if match is not None:
            shared.vector = match.vector
            if match.key is not None and match.similarity >= self._threshold and shared.is_own:
                answer = self._kept_for(match.key, shared.request)
        if match is None or answer is None:
            self._compute(shared)
            self._maybe_deserted.append(shared)  # single samples may have been cancelled meanwhile
            return
        self._metrics.count("charonia_answer_cache_hits_total", label="semantic")
        self._drop(shared)
        for subscriber in shared.subscribers:
            self._give_whole(subscriber, answer, Source("semantic", match.similarity))

    def _join(self, subscriber: Subscriber, shared: SharedComputation) -> None:
        self._metrics.count("charonia_answer_cache_hits_total", label="joined")
        self._subscribe(subscriber, shared)
        subscriber.events.on_joined()
        if shared.has_token:
            self._subscribers.note_first_token(subscriber)
        now = self._clock()
        for chunk in shared.pieces.so_far():
            self._give(subscriber, shared, chunk, now)

    def _subscribe(self, subscriber: Subscriber, shared: SharedComputation) -> None:
        subscriber.join(shared)
        self._subscribers.add(subscriber)

    def _give(
        self, subscriber: Subscriber, shared: SharedComputation, chunk: Chunk, now: float
    ) -> None:
        """Deliver a chunk of a computation to one of its subscribers."""
        own = subscriber.take(chunk, now)
        if own is None:
            return
        if own.timing is not None:
            own = msgspec.structs.replace(own, timing=shared.timing_for(subscriber, own.timing))
        if own.is_final:
            if not chunk.is_final:  # others still want samples that it cancelled
                own = msgspec.structs.replace(own, timing=subscriber.timing_so_far(now))
                shared.subscribers.remove(subscriber)
                self._maybe_deserted.append(shared)
            self._subscribers.end(subscriber, own, now)
        subscriber.events.on_chunk(own)

    def _give_whole(self, subscriber: Subscriber, answer: Answer, source: Source) -> None:
        """Deliver a cached answer."""
        subscriber.events.on_joined()
        now = self._clock()
        waited_s = now - subscriber.arrived_at
        timing = timing_of_cached(source, waited_s, waited_s, waited_s)
        self._subscribers.note_first_token(subscriber)
        for chunk in whole_answer(answer.pieces(), subscriber.request):
            own = subscriber.take(chunk, now)
            if own is None:  # its client cancelled this sample
                continue
            if own.is_final:
                own = msgspec.structs.replace(own, timing=timing)
                self._subscribers.end(subscriber, own, now)
            subscriber.events.on_chunk(own)

    # ------------------------------------------------------------------ ends

    def _end(self, shared: SharedComputation, now: float) -> None:
        """Finish a computation, and keep its answer if that is complete."""
        self._drop(shared)
        if shared.is_own and shared.pieces.is_complete(shared.request.params.n):
            self._kept.keep(shared, now)

    def _drop(self, shared: SharedComputation) -> None:
        """Forget a computation."""
        del self._computations[shared]
        self._close_to_others(shared)

    def _close_to_others(self, shared: SharedComputation) -> None:
        """Let nobody join a computation any more."""
        if self._joinable.get(shared.answer_key) is shared:
            del self._joinable[shared.answer_key]

    def _expire(self, now: float) -> None:
        """End the requests that have timed out."""
        for subscriber, is_until_start in self._subscribers.take_due(now):
            has_started = subscriber.computation.started_at is not None
            error = self._core.overdue(is_until_start=is_until_start, has_started=has_started)
            if error is not None:
                self.end(subscriber, error)

    def _end_deserted(self) -> None:
        """End samples, and whole computations, that no subscriber wants."""
        computations, self._maybe_deserted = dict.fromkeys(self._maybe_deserted), []
        for shared in computations:
            if shared.live is None:
                continue
            if not shared.subscribers:
                self._core.end(shared.live, RequestCancelledError("nobody wants the other samples"))
            elif unwanted := shared.open.difference(*(one.open for one in shared.subscribers)):
                self._close_to_others(shared)
                self._core.cancel_samples(shared.live, unwanted)

    def _leave(
        self,
        subscriber: Subscriber,
        error: CharoniaError | None,
        indexes: Collection[int] | None = None,
    ) -> None:
        """End a request whose computation goes on for others or has not begun.

        Args:
            error: None if the client cancelled samples. indexes: samples that end; None is all of
                them. If others are left, the request goes on.
        """
        shared, now = subscriber.computation, self._clock()
        indexes = subscriber.open if indexes is None else indexes
        if subscriber.open <= set(indexes):
            shared.subscribers.remove(subscriber)
            if not shared.subscribers:
                self._drop(shared)
        self._maybe_deserted.append(shared)
        for chunk in subscriber.end(indexes, error, subscriber.timing_so_far(now)):
            if chunk.is_final:
                self._subscribers.end(subscriber, chunk, now)
            subscriber.events.on_chunk(chunk)


class _ComputationEvents(RequestEvents):
    """Receives the events of a computation."""

    def __init__(self, answers: AnswerCache, shared: SharedComputation) -> None:
        self._answers = answers
        self._shared = shared

    def on_chunk(self, chunk: Chunk) -> None:
        """See `RequestEvents`."""
        self._answers.take(self._shared, chunk)
        if chunk.is_final:
            self._shared.live = None

    def on_started(self) -> None:
        """See `RequestEvents`."""
        self._answers.note_started(self._shared)

    def on_first_token(self) -> None:
        """See `RequestEvents`."""
        self._answers.note_first_token(self._shared)
