"""The outputs of all requests: each gets its chunks and one end, and is counted.

Owns the output stream of every live request, and what clients call all that were taken in. Must
not know steps, nor why a request ends.
"""

from collections.abc import Callable, Iterator
from math import inf

from charonia.control import Request, Update
from charonia.engine.admission import GenerationRequest
from charonia.engine.attainment import Attainment, RequestEnd
from charonia.engine.metrics import Metrics
from charonia.engine.outputs import Chunk, OutputStream
from charonia.errors import CharoniaError
from charonia.text.tokenizer import Tokenizer


class OutputStreams:
    """From taking a request in to its last chunk.

    Args:
        deliver: called with every chunk; must return quickly. clock: seconds, monotonic.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        metrics: Metrics,
        attainment: Attainment,
        *,
        deliver: Callable[[Chunk], None],
        clock: Callable[[], float],
    ) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._attainment = attainment
        self._deliver = deliver
        self._clock = clock
        self._streams: dict[str, OutputStream] = {}
        self._names: dict[str, tuple[str, str]] = {}  # key: request id and tenant

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

    def request_id(self, key: str) -> str:
        """What its client calls a request that was taken in."""
        return self._names[key][0]

    def num_tokens(self, key: str) -> int:
        """Tokens that a request has generated so far."""
        stream = self._streams.get(key)
        return 0 if stream is None else stream.num_tokens

    def has_started(self, key: str) -> bool:
        """Whether a step has computed anything of a request."""
        stream = self._streams.get(key)
        return stream is not None and stream.request.started_at is not None

    # ------------------------------------------------------------------ from first to last

    def take_in(self, request: GenerationRequest) -> None:
        """Remember a request, which is not live before `open`."""
        self._names[request.key] = (request.request_id, request.params.tenant)

    def open(self, request: GenerationRequest, admitted: Request) -> None:
        """Begin the output of a request that was taken in."""
        self._streams[request.key] = OutputStream(admitted, request.params, self._tokenizer)

    def take(self, update: Update, now: float) -> bool:
        """Deliver what a step committed, if it is a live request's and there is text or an end.

        Returns:
            Whether a stop string ended the request, of which the control plane does not know.
        """
        key = update.request.key
        stream = self._streams.get(key)
        if stream is None:
            return False
        num_tokens, last_at = stream.num_tokens, stream.last_token_at
        chunk = stream.take(update, now)
        if not stream.request.is_probe:
            self._observe_tokens(stream, stream.num_tokens - num_tokens, last_at, now)
        if chunk is None:
            return False
        if chunk.finish_reason is not None:
            self._forget(key, chunk.finish_reason, now)
        self._deliver(chunk)
        return chunk.finish_reason is not None and update.finish_reason is None

    def fail(self, key: str, error: CharoniaError) -> None:
        """End a live request with an error."""
        now = self._clock()
        stream = self._streams[key]
        self._forget(key, error.code.lower(), now)
        self._deliver(stream.fail(error, now))

    def refuse(self, request: GenerationRequest, arrived_at: float, error: CharoniaError) -> None:
        """End a request with an error that was taken in and is not live."""
        del self._names[request.key]
        waited = self._clock() - arrived_at
        if not request.is_probe:
            self._metrics.count_end(
                error.code.lower(),
                queue_s=waited,
                total_s=waited,
                num_prompt=len(request.prompt_ids),
                num_tokens=0,
            )
            self._attainment.note_end(
                RequestEnd(
                    tenant=request.params.tenant,
                    reason=error.code.lower(),
                    num_prompt=len(request.prompt_ids),
                    has_deadline=request.params.deadline_ms is not None,
                )
            )
        self._deliver(Chunk(request.key, error=error))

    def _forget(self, key: str, reason: str, now: float) -> None:
        stream = self._streams.pop(key)
        del self._names[key]
        request = stream.request
        if request.is_probe:
            return
        # At the end, so that requests whose time ran out in the queue are seen as well.
        left_queue_at = now if request.started_at is None else request.started_at
        self._metrics.count_end(
            reason,
            queue_s=left_queue_at - request.arrived_at,
            total_s=now - request.arrived_at,
            num_prompt=request.num_prompt,
            num_tokens=stream.num_tokens,
        )
        self._attainment.note_end(
            RequestEnd(
                tenant=request.tenant,
                reason=reason,
                num_prompt=request.num_prompt,
                num_tokens=stream.num_tokens,
                first_token_s=stream.first_token_s,
                inter_token_s=stream.inter_token_s,
                has_deadline=request.expires_at < inf,
            )
        )

    def _observe_tokens(
        self, stream: OutputStream, num_tokens: int, last_at: float | None, now: float
    ) -> None:
        """Count tokens that a client gets; `last_at` is when it got some before."""
        if not num_tokens:
            return
        self._metrics.count("charonia_generation_tokens_total", num_tokens)
        if last_at is None:
            waited = now - stream.request.arrived_at
            self._metrics.observe_request("charonia_time_to_first_token_seconds", waited)
            num_tokens -= 1
            gap = 0.0
        else:
            gap = (now - last_at) / num_tokens
        self._metrics.histograms["charonia_inter_token_seconds"].observe(gap, num_tokens)
