"""One computation, and all who get what comes of it.

Owns what each of its subscribers has got so far, and the form in which it gets the rest. Must not
know who may subscribe, nor what is kept of the answer.

    core ──chunk──► SharedComputation ──┬──► subscriber: the one for which it began
                                        ├──► subscriber: joined later, all from the beginning in
                                        │                one piece
                                        └──► subscriber: ...
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from charonia.core.admission import GenerationRequest
from charonia.core.answers.answer_store import Piece, Pieces
from charonia.core.output.outputs import Chunk, Timing
from charonia.errors import CharoniaError
from charonia.protocol import FinishReason


class Source(NamedTuple):
    """Whose answer a request gets that is not computed for itself.

    Attributes:
        kind: an equal one's that was kept; an equal one's that runs; one's whose prompt is similar.
        similarity: of the prompts.
    """

    kind: Literal["exact", "joined", "semantic"]
    similarity: float | None = None


_NOTHING_DONE: Timing = {
    "cached_tokens": 0,
    "computed_tokens": 0,
    "drafted_tokens": 0,
    "accepted_tokens": 0,
    "preemptions": 0,
    "restarts": 0,
}


def timing_of_cached(
    source: Source | None, queue_s: float, first_s: float | None, total_s: float
) -> Timing:
    """The timing of a request for which nothing was computed.

    Args:
        source: None for one that left what is computed to others.
        queue_s, total_s: seconds from its arrival until it was served, and to its end.
        first_s: to its first token; None where there was none.
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
    """The chunks of an answer that was kept, for another request."""
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
    """A client's request that gets what a computation, or the cache, gives.

    Attributes:
        arrived_at: when it came, in seconds.
        open: its samples that have not ended. reason: why the last one ended that did by itself;
            "cancelled" while none did.
        first_at: when there was a first token for it, be it held back.
        num_tokens: that it got, by sample.
    """

    request: GenerationRequest
    arrived_at: float
    _computation: "SharedComputation | None" = None
    open: set[int] = field(default_factory=set)
    reason: FinishReason = "cancelled"
    first_at: float | None = None
    num_tokens: list[int] = field(default_factory=list)
    _spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    """When it got the first tokens of a sample, and the last ones so far."""

    def __post_init__(self) -> None:
        self.open = set(range(self.request.params.n))
        self.num_tokens = [0] * self.request.params.n

    @property
    def key(self) -> str:
        """Its request's."""
        return self.request.key

    @property
    def computation(self) -> "SharedComputation":
        """Whose chunks it gets."""
        assert self._computation is not None, "it gets an answer that was kept"
        return self._computation

    def join(self, computation: "SharedComputation") -> None:
        """Get what comes of a computation."""
        self._computation = computation
        computation.subscribers.append(self)

    @property
    def first_token_s(self) -> float | None:
        """From its arrival to its first token."""
        return None if self.first_at is None else self.first_at - self.arrived_at

    @property
    def inter_token_s(self) -> float | None:
        """From one token to the next in the mean, of the slowest sample."""
        params = self.request.params
        has_one, is_ranked = params.num_samples == 1, params.num_samples > params.n
        found = []
        for index, (first_at, last_at) in self._spans.items():
            if (has_one or is_ranked) and self.first_at is not None:
                first_at = self.first_at  # what came with it, or before it, was held back
            if self.num_tokens[index] > 1:
                found.append((last_at - first_at) / (self.num_tokens[index] - 1))
        return max(found, default=None)

    def queue_s(self, now: float) -> float:
        """How long it waited until something was computed for it, or its end."""
        started_at = None if self._computation is None else self._computation.started_at
        return max(0.0, (now if started_at is None else started_at) - self.arrived_at)

    def timing_so_far(self, now: float) -> Timing:
        """Its timing, where it ends before the computation does."""
        source = None if self is self.computation.leader else Source("joined")
        total_s = now - self.arrived_at
        return timing_of_cached(source, self.queue_s(now), self.first_token_s, total_s)

    def take(self, chunk: Chunk, now: float) -> Chunk | None:
        """A chunk as its client gets it; None where that wants no more of the sample."""
        if not self.open or (chunk.index not in self.open and not chunk.is_final):
            return None
        if chunk.token_ids:
            self._spans[chunk.index] = self._spans.get(chunk.index, (now, now))[0], now
            self.num_tokens[chunk.index] += len(chunk.token_ids)
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
            error: None where its client wants no more of them, which is none.
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
    """A request that is computed, for as many clients as want the same.

    Attributes:
        key: its name in the core. answer_key: what its answer is found by.
        request: what is computed. arrived_at: when the first one came, in seconds.
        leader: who came first; it may have left.
        open: the samples that have not ended.
        is_own: whether all its tokens are the model's that it began with.
        is_computed: whether the core has it; before, a similar prompt is looked for.
        vector: of its prompt, where one was made.
        pieces: what came so far, but for errors. started_at: when its first step began.
        has_token: whether it has a first token.
    """

    key: str
    answer_key: bytes
    request: GenerationRequest
    arrived_at: float
    leader: Subscriber
    open: set[int] = field(default_factory=set)
    is_own: bool = True
    is_computed: bool = False
    vector: Any = None
    subscribers: list[Subscriber] = field(default_factory=list)
    pieces: Pieces = field(default_factory=Pieces)
    started_at: float | None = None
    has_token: bool = False

    def __post_init__(self) -> None:
        self.open = set(range(self.request.params.n))

    def timing_for(self, subscriber: Subscriber, timing: Timing) -> Timing:
        """The timing of one who joined, by that of the computation."""

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
