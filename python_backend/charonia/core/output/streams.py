"""The outputs of all requests: each gets its chunks and one end, and is counted.

Owns the output streams of every live request, and what clients call all that were taken in. Must
not know steps, nor why a request ends.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from math import inf

from charonia.control import Request, Update
from charonia.core.admission import GenerationRequest
from charonia.core.gate.attainment import Attainment, RequestEnd
from charonia.core.metrics.metrics import Metrics
from charonia.core.output.outputs import Chunk, MakeStream, SampleStream, SampleStreams
from charonia.core.request_events import RequestEvents
from charonia.errors import CharoniaError


class OutputStreams:
    """From taking a request in to its last chunk.

    Args:
        make_stream: makes that of a sample.
        events: told of every chunk, and of a shared request's first token.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        make_stream: MakeStream,
        events: RequestEvents,
        metrics: Metrics,
        attainment: Attainment,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._make_stream = make_stream
        self._metrics = metrics
        self._attainment = attainment
        self._events = events
        self._clock = clock
        self._streams: dict[str, SampleStreams] = {}
        self._names: dict[str, tuple[str, str]] = {}  # key: request id and tenant
        self._shared: set[str] = set()  # keys of those that others count

    # ------------------------------------------------------------------ questions

    def __len__(self) -> int:
        """How many are live: open, and not at their end."""
        return len(self._streams)

    def __iter__(self) -> Iterator[str]:
        """Keys of all that are live."""
        return iter(self._streams)

    def __contains__(self, key: str) -> bool:
        return key in self._streams

    def knows(self, key: str) -> bool:
        """Whether a request was taken in and has had no end."""
        return key in self._names

    def is_shared(self, key: str) -> bool:
        """Whether others count a request that was taken in; see `GenerationRequest`."""
        return key in self._shared

    def request_id(self, key: str) -> str:
        """What its client calls a request that was taken in."""
        return self._names[key][0]

    def num_tokens(self, key: str) -> int:
        """Tokens that a request has generated so far."""
        streams = self._streams.get(key)
        return 0 if streams is None else streams.num_tokens

    def has_started(self, key: str) -> bool:
        """Whether a step has computed anything of a request."""
        streams = self._streams.get(key)
        return streams is not None and streams.first.started_at is not None

    def open_samples(self, key: str) -> list[str]:
        """The control plane's names of the samples of a live request that go on."""
        streams = self._streams[key]
        return [streams.streams[index].request.key for index in sorted(streams.open)]

    def cancellable(self, key: str, indexes: Collection[int]) -> list[str]:
        """Likewise of those of these samples that can be cancelled alone."""
        streams = self._streams[key]
        return [streams.streams[index].request.key for index in streams.cancellable(indexes)]

    def leaves_nothing(self, key: str, indexes: Collection[int]) -> bool:
        """Whether a live request ends with these samples, and none of it ended by itself."""
        streams = self._streams[key]
        ends = len(streams.cancellable(indexes)) == len(streams.open)
        return ends and streams.reason == "cancelled"

    # ------------------------------------------------------------------ from first to last

    def take_in(self, request: GenerationRequest) -> None:
        """Remember a request, which is not live before `open`."""
        self._names[request.key] = (request.request_id, request.params.tenant)
        if request.is_shared:
            self._shared.add(request.key)

    def open(self, request: GenerationRequest, samples: Sequence[Request]) -> None:
        """Begin the output of a request that was taken in."""
        self._streams[request.key] = SampleStreams(samples, request.params, self._make_stream)

    def take(self, update: Update, now: float) -> bool:
        """Deliver what a step committed, if it is a live request's and there is text or an end.

        Returns:
            Whether a stop string ended the sample, of which the control plane does not know.
        """
        key, index = update.request.group.key, update.request.index
        streams = self._streams.get(key)
        if streams is None or index not in streams.open:
            return False
        stream = streams.streams[index]
        num_tokens, last_at = stream.num_tokens, stream.last_token_at
        is_first = not streams.num_tokens
        chunks = streams.take(update, now)
        if not stream.request.is_probe:
            num_new = stream.num_tokens - num_tokens
            self._observe_tokens(stream, num_new, last_at, now, is_first=is_first)
        if not streams.open:
            self._forget(key, streams.reason, now)
        for chunk in chunks:
            self._events.on_chunk(chunk)
        return index not in streams.open and update.finish_reason is None

    def cancel(self, key: str, indexes: Collection[int]) -> None:
        """End those of these samples of a live request that can be cancelled alone."""
        now = self._clock()
        streams = self._streams[key]
        chunks = streams.cancel(indexes, now)
        if not streams.open:
            self._forget(key, streams.reason, now)
        for chunk in chunks:
            self._events.on_chunk(chunk)

    def fail(self, key: str, error: CharoniaError) -> None:
        """End a live request with an error."""
        now = self._clock()
        streams = self._streams[key]
        self._forget(key, error.kind, now)
        for chunk in streams.fail(error, now):
            self._events.on_chunk(chunk)

    def refuse(self, request: GenerationRequest, arrived_at: float, error: CharoniaError) -> None:
        """End a request with an error that was taken in and is not live."""
        self._forget_unopened(request, arrived_at, error.kind)
        self._events.on_chunk(Chunk(request.key, error=error))

    def cancel_unopened(self, request: GenerationRequest, arrived_at: float) -> None:
        """End a request that was taken in and is not live, and of which no sample is wanted."""
        self._forget_unopened(request, arrived_at, "cancelled")
        num_samples = request.params.num_samples
        for index in range(num_samples):
            self._events.on_chunk(
                Chunk(
                    request.key,
                    finish_reason="cancelled",
                    num_prompt_tokens=len(request.prompt_ids),
                    index=index,
                    num_open=num_samples - 1 - index,
                )
            )

    def _forget_unopened(self, request: GenerationRequest, arrived_at: float, reason: str) -> None:
        self._forget_name(request.key)
        if request.is_probe or request.is_shared:
            return
        waited = self._clock() - arrived_at
        self._metrics.count_end(
            reason,
            queue_s=waited,
            total_s=waited,
            num_prompt=len(request.prompt_ids),
            num_tokens=0,
        )
        self._attainment.note_end(
            RequestEnd(
                tenant=request.params.tenant,
                reason=reason,
                has_deadline=request.params.deadline_ms is not None,
            )
        )

    def _forget(self, key: str, reason: str, now: float) -> None:
        streams = self._streams.pop(key)
        is_shared = key in self._shared
        self._forget_name(key)
        request = streams.first
        if request.is_probe:
            return
        self._attainment.note_computed(request.tenant, request.num_prompt, streams.num_tokens)
        if is_shared:
            return
        # At the end, so that requests whose time ran out in the queue are seen as well.
        left_queue_at = now if request.started_at is None else request.started_at
        self._metrics.count_end(
            reason,
            queue_s=left_queue_at - request.arrived_at,
            total_s=now - request.arrived_at,
            num_prompt=request.num_prompt,
            num_tokens=streams.num_tokens,
        )
        self._attainment.note_end(
            RequestEnd(
                tenant=request.tenant,
                reason=reason,
                first_token_s=streams.first_token_s,
                inter_token_s=streams.inter_token_s,
                has_deadline=request.expires_at < inf,
            )
        )

    def _forget_name(self, key: str) -> None:
        del self._names[key]
        self._shared.discard(key)

    def _observe_tokens(
        self,
        stream: SampleStream,
        num_tokens: int,
        last_at: float | None,
        now: float,
        *,
        is_first: bool,
    ) -> None:
        """Count tokens of a sample that a client gets.

        Args:
            last_at: when there were some of it before. is_first: there were none of any sample.
        """
        if not num_tokens:
            return
        self._metrics.count("charonia_generation_tokens_total", num_tokens)
        if last_at is None:
            key = stream.request.group.key
            if is_first and key in self._shared:
                self._events.on_first_token(key)
            elif is_first:
                waited = now - stream.request.arrived_at
                self._metrics.observe_request("charonia_time_to_first_token_seconds", waited)
            num_tokens -= 1
            gap = 0.0
        else:
            gap = (now - last_at) / num_tokens
        self._metrics.histograms["charonia_inter_token_seconds"].observe(gap, num_tokens)
