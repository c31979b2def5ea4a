"""The live requests of the core: one entry for each, from its arrival to its end.

Owns their output, and the chunks that are sent at their ends. Must not know steps, nor why a
request ends.

    add() ──► held ──open()──► open ──take()──► on_chunk()
                │                │
                └─ fail(), cancel_samples(), the last chunk of take() ──► on_chunk(), an end once
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from charonia.control import Group, Request, Update
from charonia.core.gate.attainment import Attainment
from charonia.core.generation_request import GenerationRequest
from charonia.core.live_entries import LiveEntries
from charonia.core.output.outputs import Chunk, MakeStream, SampleStreams
from charonia.core.request_events import RequestEvents
from charonia.errors import CharoniaError
from charonia.metrics.metrics import Metrics


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has not ended.

    Attributes:
        request: the client's. events: receives what becomes of it.
        arrived_at: its arrival, in seconds. number: see `LiveEntry`.
        cancelled: samples that its client cancelled before it was placed.
        streams: the output of its samples; None until it is placed.
    """

    request: GenerationRequest
    events: RequestEvents
    arrived_at: float
    number: int = 0
    cancelled: set[int] = field(default_factory=set)
    streams: SampleStreams | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return 0 if self.streams is None else self.streams.num_tokens

    @property
    def started_at(self) -> float | None:
        """Time at which its first step began; None before."""
        return None if self.streams is None else self.streams.first.started_at

    @property
    def first_token_s(self) -> float | None:
        """Seconds from its arrival to its first token; None without one."""
        return None if self.streams is None else self.streams.first_token_s

    @property
    def inter_token_s(self) -> float | None:
        """Mean seconds between its tokens, of the slowest sample; None with fewer than two."""
        return None if self.streams is None else self.streams.inter_token_s

    def queue_s(self, now: float) -> float:
        """Seconds from its arrival to its first step; without one, until now."""
        return (now if self.started_at is None else self.started_at) - self.arrived_at

    @property
    def open_samples(self) -> list[str]:
        """Keys of the samples that have not ended, as the control plane has them."""
        return [] if self.streams is None else self.streams.keys_of(sorted(self.streams.open))

    def cancellable(self, indexes: Collection[int]) -> list[str]:
        """Keys of those of these samples that can be cancelled alone."""
        if self.streams is None:
            return []
        return self.streams.keys_of(self.streams.cancellable(indexes))

    def leaves_nothing(self, indexes: Collection[int]) -> bool:
        """Return whether cancelling these samples ends it, and no sample has ended by itself."""
        streams = self.streams
        if streams is None:
            params, cancelled = self.request.params, self.cancelled.union(indexes)
            return params.num_samples == params.n and cancelled.issuperset(range(params.n))
        ends = len(streams.cancellable(indexes)) == len(streams.open)
        return ends and streams.reason == "cancelled"


def owner_of(group: Group) -> LiveRequest | None:
    """The client's request that a group of the control plane computes; None once it has ended."""
    assert group.owner is None or isinstance(group.owner, LiveRequest)
    return group.owner


class RequestRegistry(LiveEntries[LiveRequest]):
    """The live requests, from arrival to last chunk.

    Args:
        make_stream: makes the output of a sample.
        clock: monotonic, in seconds.

    Attributes:
        held: the requests that wait to be placed, in order of arrival.
    """

    def __init__(
        self,
        make_stream: MakeStream,
        metrics: Metrics,
        attainment: Attainment,
        *,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(attainment)
        self._make_stream = make_stream
        self._metrics = metrics
        self._clock = clock
        self._gaps = metrics.histograms["charonia_inter_token_seconds"]
        self.held: dict[LiveRequest, None] = {}

    @property
    def num_open(self) -> int:
        """Number of live requests that are placed."""
        return len(self) - len(self.held)

    def add(self, entry: LiveRequest) -> None:
        """Add a request, held until `open`. Its timeouts count from its arrival."""
        super().add(entry)
        self.held[entry] = None

    def open(self, live: LiveRequest, samples: Sequence[Request]) -> None:
        """Begin the output of a held request, which is placed now."""
        samples[0].group.owner = live
        live.streams = SampleStreams(samples, live.request.params, self._make_stream)
        del self.held[live]

    def take(self, update: Update, now: float) -> bool:
        """Send a step's output, if its request is live and there is text or an end.

        Returns:
            Whether a stop string ended the sample; the control plane does not know of these.
        """
        index = update.request.index
        live = owner_of(update.request.group)
        if live is None or (streams := live.streams) is None or index not in streams.open:
            return False
        stream = streams.streams[index]
        num_tokens, last_at = stream.num_tokens, stream.last_token_at
        is_first = last_at is None and not streams.num_tokens
        chunks = streams.take(update, now)
        num_new = stream.num_tokens - num_tokens
        if num_new and not live.request.is_probe:
            self._observe_tokens(live, num_new, last_at, now, is_first=is_first)
        if not streams.open:
            self._end(live, streams.reason, now)
        for chunk in chunks:
            live.events.on_chunk(chunk)
        return index not in streams.open and update.finish_reason is None

    def cancel_samples(self, live: LiveRequest, indexes: Collection[int]) -> None:
        """Cancel those of these samples that can be cancelled alone.

        Samples of a held request end once it is placed, or at once if no other sample is left.
        """
        now, streams = self._clock(), live.streams
        if streams is not None:
            chunks = streams.cancel(indexes, now)
            if not streams.open:
                self._end(live, streams.reason, now)
        else:
            is_over = live.leaves_nothing(indexes)
            live.cancelled.update(indexes)
            chunks = _cancelled(live.request) if is_over else []
            if is_over:
                self._end(live, "cancelled", now)
        for chunk in chunks:
            live.events.on_chunk(chunk)

    def fail(self, live: LiveRequest, error: CharoniaError) -> None:
        """End a request with an error."""
        now, streams = self._clock(), live.streams
        self._end(live, error.kind, now)
        key = live.request.key
        chunks = [Chunk(key, error=error)] if streams is None else streams.fail(error, now)
        for chunk in chunks:
            live.events.on_chunk(chunk)

    def _end(self, entry: LiveRequest, reason: str, now: float) -> None:
        """See `LiveEntries`; also counts the tokens that were computed."""
        request = entry.request
        assert entry in self, "it has ended"
        self.held.pop(entry, None)
        if entry.streams is not None:
            entry.streams.first.group.owner = None
            if not request.is_probe:
                num_prompt = len(request.prompt_ids)
                self._attainment.note_computed(request.params.tenant, num_prompt, entry.num_tokens)
        super()._end(entry, reason, now)

    def _observe_tokens(
        self,
        live: LiveRequest,
        num_tokens: int,
        last_at: float | None,
        now: float,
        *,
        is_first: bool,
    ) -> None:
        """Count tokens that a client gets of a sample.

        Args:
            last_at: time of the sample's previous tokens. is_first: whether no sample had tokens
                before.
        """
        self._metrics.count_tokens(num_tokens)
        if last_at is not None:
            self._gaps.observe((now - last_at) / num_tokens, num_tokens)
            return
        if is_first and live.request.is_shared:
            live.events.on_first_token()
        elif is_first:
            waited = now - live.arrived_at
            self._metrics.observe_request("charonia_time_to_first_token_seconds", waited)
        self._gaps.observe(0.0, num_tokens - 1)


def _cancelled(request: GenerationRequest) -> list[Chunk]:
    """The last chunks of a request that was cancelled before it was placed."""
    num_samples = request.params.num_samples
    return [
        Chunk(
            request.key,
            finish_reason="cancelled",
            num_prompt_tokens=len(request.prompt_ids),
            index=index,
            num_open=num_samples - 1 - index,
        )
        for index in range(num_samples)
    ]
