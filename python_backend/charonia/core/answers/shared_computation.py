"""One computation and its subscribers.

Owns what each subscriber has received so far, and how it receives the rest. Must not know which
requests may subscribe, nor what is cached of the answer.

    core ──chunk──► SharedComputation ──┬──► subscriber: the one for which it began
                                        ├──► subscriber: joined later, all from the beginning in
                                        │                one piece
                                        └──► subscriber: ...
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from charonia.core.answers.answer_store import Piece, Pieces
from charonia.core.generation_request import GenerationRequest
from charonia.core.output.outputs import Chunk, Timing
from charonia.core.request_events import RequestEvents
from charonia.core.request_registry import LiveRequest
from charonia.errors import CharoniaError
from charonia.protocol import FinishReason


class Source(NamedTuple):
    """Source of the answer to a request for which it was not computed.

    Attributes:
        kind: "exact", the cached answer of an equal request; "joined", the computation of an equal
            request; "semantic", the cached answer of a request with a similar prompt.
        similarity: cosine similarity of the prompts.
    """

    kind: Literal["exact", "joined", "semantic"]
    similarity: float | None = None


_COST = ("engine_seconds", "engine_flops")
_NOTHING_DONE: Timing = {
    "cached_tokens": 0,
    "computed_tokens": 0,
    "drafted_tokens": 0,
    "accepted_tokens": 0,
    "preemptions": 0,
    "restarts": 0,
    "engine_seconds": 0.0,
    "engine_flops": 0.0,
}


def timing_of_cached(
    source: Source | None, queue_s: float, first_s: float | None, total_s: float
) -> Timing:
    """The timing of a request for which nothing was computed.

    Args:
        source: None for a request that left its computation to other subscribers.
        queue_s, total_s: seconds from its arrival to its start, and to its end.
        first_s: seconds to its first token; None without one.
    """
    timing: Timing = {"queue_seconds": queue_s, "total_seconds": total_s, **_NOTHING_DONE}
    if first_s is not None:
        timing["first_token_seconds"] = first_s
    if source is not None:
        timing["cached"] = source.kind
        if source.similarity is not None:
            timing["similarity"] = source.similarity
    return timing


def whole_answer(pieces: Sequence[Piece], request: GenerationRequest) -> Iterator[Chunk]:
    """The chunks of a cached answer, for a new request."""
    num_open = request.params.n
    for piece in pieces:
        num_open -= piece.finish_reason is not None
        yield Chunk(
            request.key,
            piece.text,
            tuple(piece.token_ids),
            None if piece.logprobs is None else tuple(piece.logprobs),
            piece.cumulative_logprob,
            piece.prompt_logprobs,
            piece.finish_reason,
            num_prompt_tokens=len(request.prompt_ids),
            index=piece.index,
            num_open=num_open,
        )


@dataclass(slots=True, eq=False)
class Subscriber:
    """A client's request that is answered from a shared computation or from the cache.

    Attributes:
        events: receives what becomes of it.
        arrived_at: its arrival, in seconds. number: see `LiveEntry`.
        is_leader: whether its computation began for it.
        open: its samples that have not ended. reason: finish reason of the last sample that was not
            cancelled; "cancelled" without one.
        first_at: when its first token was there, even if it was held back.
    """

    request: GenerationRequest
    events: RequestEvents
    arrived_at: float
    number: int = 0
    is_leader: bool = False
    _computation: "SharedComputation | None" = None
    open: set[int] = field(default_factory=set)
    reason: FinishReason = "cancelled"
    first_at: float | None = None
    _received: list[int] = field(default_factory=list)
    """Number of tokens it has received of each sample."""
    _spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Times at which it received the first and the latest tokens of each sample."""

    def __post_init__(self) -> None:
        self.open = set(range(self.request.params.n))
        self._received = [0] * self.request.params.n

    @property
    def key(self) -> str:
        """Key of its request."""
        return self.request.key

    @property
    def computation(self) -> "SharedComputation":
        """The computation whose chunks it gets."""
        assert self._computation is not None, "it gets an answer that was kept, or has ended"
        return self._computation

    @property
    def live_alone(self) -> LiveRequest | None:
        """Its computation in the core, if it is there and nobody else wants it."""
        shared = self.computation
        return shared.live if len(shared.subscribers) == 1 else None

    def join(self, computation: "SharedComputation") -> None:
        """Subscribe to a computation."""
        self._computation = computation
        computation.subscribers.append(self)

    def leave(self) -> None:
        """Let go of the computation, which refers to it."""
        self._computation = None

    @property
    def num_tokens(self) -> int:
        """Tokens that it has received."""
        return sum(self._received)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return None if self.first_at is None else self.first_at - self.arrived_at

    @property
    def inter_token_s(self) -> float | None:
        """Mean seconds between tokens, of the slowest sample."""
        params = self.request.params
        has_one, is_ranked = params.num_samples == 1, params.num_samples > params.n
        found = []
        for index, (first_at, last_at) in self._spans.items():
            if (has_one or is_ranked) and self.first_at is not None:
                first_at = self.first_at  # earlier tokens were held back
            if self._received[index] > 1:
                found.append((last_at - first_at) / (self._received[index] - 1))
        return max(found, default=None)

    def queue_s(self, now: float) -> float:
        """Seconds that it waited for the computation's start, or for its own end."""
        started_at = None if self._computation is None else self._computation.started_at
        return max(0.0, (now if started_at is None else started_at) - self.arrived_at)

    def timing_so_far(self, now: float) -> Timing:
        """Return its timing if it ends before the computation does."""
        source = None if self.is_leader else Source("joined")
        total_s = now - self.arrived_at
        return timing_of_cached(source, self.queue_s(now), self.first_token_s, total_s)

    def take(self, chunk: Chunk, now: float) -> Chunk | None:
        """A chunk in the form for its client; None if it has cancelled the sample."""
        if not self.open or (chunk.index not in self.open and not chunk.is_final):
            return None
        if chunk.token_ids:
            self._spans[chunk.index] = self._spans.get(chunk.index, (now, now))[0], now
            self._received[chunk.index] += len(chunk.token_ids)
        if chunk.finish_reason is not None and chunk.finish_reason != "cancelled":
            self.reason = chunk.finish_reason
        if chunk.is_final:
            self.open.clear()
        elif chunk.ends_sample:
            self.open.discard(chunk.index)
        scores = chunk.cumulative_logprob if self.request.counts_logprobs else None
        return replace(
            chunk,
            key=self.key,
            num_open=len(self.open),
            cumulative_logprob=scores,
        )

    def end(
        self, indexes: Collection[int], error: CharoniaError | None, timing: Timing
    ) -> Iterator[Chunk]:
        """The last chunks of samples that end while the computation goes on.

        Args:
            error: None if its client has cancelled the samples.
        """
        for index in sorted(self.open.intersection(indexes)):
            self.open.discard(index)
            yield Chunk(
                self.key,
                finish_reason="cancelled" if error is None else None,
                error=error,
                index=index,
                num_open=len(self.open),
                num_prompt_tokens=len(self.request.prompt_ids),
                timing=None if self.open else timing,
            )


@dataclass(slots=True, eq=False)
class SharedComputation:
    """A computation for all clients that sent an equal request.

    Attributes:
        answer_key: the key of its answer in the cache.
        request: the request that is computed. arrived_at: arrival of the first one, in seconds.
        open: the samples that have not ended.
        is_own: whether all its tokens come from the model revision that it began with.
        live: the core's; None while a similar prompt is looked for, and after the end.
        vector: of its prompt, if one was computed.
        pieces: its output so far, without errors. started_at: when its first step began.
        has_token: whether it has a first token.
    """

    answer_key: bytes
    request: GenerationRequest
    arrived_at: float
    open: set[int] = field(default_factory=set)
    is_own: bool = True
    live: LiveRequest | None = None
    vector: Any = None
    subscribers: list[Subscriber] = field(default_factory=list)
    pieces: Pieces = field(default_factory=Pieces)
    started_at: float | None = None
    has_token: bool = False

    def __post_init__(self) -> None:
        self.open = set(range(self.request.params.n))

    def timing_for(self, subscriber: Subscriber, timing: Timing) -> Timing:
        """The timing of a subscriber at the computation's end, from that of the computation.

        The cost is in the timing of one: the leader, or else of those left the one that came first.
        """
        if subscriber.is_leader:
            return timing
        own = self._timing_of_joined(subscriber, timing)
        if subscriber is self.subscribers[0]:  # the leader has left
            own |= {name: timing[name] for name in _COST if name in timing}
        return own

    def _timing_of_joined(self, subscriber: Subscriber, timing: Timing) -> Timing:
        def since_it_came(name: str) -> float | None:
            value = timing.get(name)
            if not isinstance(value, int | float):
                return None
            return max(0.0, self.arrived_at + value - subscriber.arrived_at)

        return timing_of_cached(
            Source("joined"),
            since_it_came("queue_seconds") or 0.0,
            since_it_came("first_token_seconds"),
            since_it_came("total_seconds") or 0.0,
        )
