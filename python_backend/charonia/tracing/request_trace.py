"""Trace of one request, from its arrival to its last response.

Owns the spans of a request and when each begins and ends. Must not know how they are sent.

    request ─┬─ tokenize     its texts become token ids
             ├─ queue        it waits for its first step
             ├─ shared       it waits for its answer, which is another request's or was kept
             ├─ prefill      a step computes a chunk of its prompt; one span each
             ├─ preempted    it has lost its blocks and waits for others
             ├─ recovery     the engine was lost, and it waits for another one
             ├─ decode       from its first step of one token to the last one; one span a sample
             └─ send         from its first response to its last one

Steps are reported by the scheduling thread and responses by sender threads. A request is over only
after both, and later reports of a surplus step are ignored. A last step may still be reported while
a request ends, so collected data is copied before it is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from charonia.control import Request
from charonia.tracing.traceparent import TraceContext

Value = str | int | float | bool | tuple[str, ...]
MAX_CHUNKS = 100
"""Most spans of prompt chunks; the last one also covers all chunks after it."""


@dataclass(slots=True)
class Span:
    """A part of a request's time, in seconds by the monotonic clock."""

    name: str
    began_at: float
    ended_at: float
    attributes: dict[str, Value] = field(default_factory=dict)


@dataclass(slots=True)
class _Sample:
    """One sample of the request. `ended_at`: the end of its last step."""

    request: Request
    ended_at: float
    num_preemptions: int
    num_restarts: int
    decode: Span | None = None


class RequestTrace:
    """The trace of one request. Implements `StepObserver`.

    Args:
        context: that the request came with. arrived_at: by the monotonic clock.
        export: takes this trace once, at the request's end.

    Attributes:
        spans: so far. attributes: of the request itself. error: why it failed, and the kind of
            that; None if it has not.
        num_tokens: tokens in the responses so far.
        ended_at: when its last response was sent; None before.
    """

    def __init__(
        self, context: TraceContext, arrived_at: float, export: Callable[["RequestTrace"], None]
    ) -> None:
        self.context = context
        self.arrived_at = arrived_at
        self.ended_at: float | None = None
        self.spans: list[Span] = []
        self.attributes: dict[str, Value] = {}
        self.num_tokens = 0
        self.error: tuple[str, str] | None = None
        self._export = export
        self._queued_at = arrived_at
        self._samples: dict[int, _Sample] = {}
        self._num_chunks = 0
        self._last_chunk: Span | None = None
        self._send: Span | None = None

    def note_tokenized(self, began_at: float, ended_at: float, num_tokens: int) -> None:
        """Note that its texts were tokenized."""
        attributes: dict[str, Value] = {"charonia.tokens": num_tokens}
        self.spans.append(Span("tokenize", began_at, ended_at, attributes))
        self._queued_at = ended_at

    def on_step(
        self,
        request: Request,
        num_tokens: int,
        num_drafts: int,
        began_at: float,
        ended_at: float,
    ) -> None:
        """See `StepObserver`."""
        if self.ended_at is not None:
            return
        sample = self._samples.get(request.index)
        if sample is None:
            if not self._samples:
                self.spans.append(Span("queue", self._queued_at, began_at))
            sample = _Sample(request, ended_at, request.num_preemptions, request.num_restarts)
            self._samples[request.index] = sample
        else:
            self._note_interruption(sample, began_at)
            sample.ended_at = ended_at
        if num_tokens > 1 or request.num_computed < request.num_prompt:
            self._note_chunk(request, num_tokens, began_at, ended_at)
        else:
            _note_decode(sample, request.index, num_drafts, began_at, ended_at)

    def note_sent(self, began_at: float, ended_at: float, num_tokens: int) -> None:
        """Note a response, with tokens of all samples."""
        if self._send is None:
            self._send = Span("send", began_at, ended_at, {"charonia.responses": 0})
        span = self._send
        span.ended_at = ended_at
        self.num_tokens += num_tokens
        _add(span, "charonia.responses", 1)
        _add(span, "charonia.seconds", ended_at - began_at)

    def end(
        self,
        ended_at: float,
        *,
        attributes: Mapping[str, Value] | None = None,
        error: tuple[str, str] | None = None,
    ) -> None:
        """End and export it; a second call does nothing.

        Args:
            attributes: further ones of the request. error: its text and kind.
        """
        if self.ended_at is not None:
            return
        self.ended_at = ended_at
        self.error = error
        self.attributes.update(attributes or {})
        samples = list(self._samples.values())
        if not samples:
            self._note_wait(ended_at)
        for sample in samples:
            self._note_interruption(sample, ended_at)
        decodes = (sample.decode for sample in samples)
        self.spans += [span for span in decodes if span is not None]
        if self._send is not None:
            self.spans.append(self._send)
        self._export(self)

    def _note_wait(self, ended_at: float) -> None:
        """Note what a request without a step waited for, until its first response or its end."""
        name = "shared" if self.num_tokens else "queue"
        until = ended_at if self._send is None else self._send.began_at
        self.spans.append(Span(name, self._queued_at, max(self._queued_at, until)))

    def _note_interruption(self, sample: _Sample, until: float) -> None:
        """Note what a sample waited for since its last step, if it lost its row."""
        request = sample.request
        if request.num_restarts > sample.num_restarts:
            name = "recovery"
        elif request.num_preemptions > sample.num_preemptions:
            name = "preempted"
        else:
            return
        attributes: dict[str, Value] = {"charonia.sample": request.index}
        self.spans.append(Span(name, sample.ended_at, until, attributes))
        sample.num_restarts = request.num_restarts
        sample.num_preemptions = request.num_preemptions

    def _note_chunk(
        self, request: Request, num_tokens: int, began_at: float, ended_at: float
    ) -> None:
        self._num_chunks += 1
        span = self._last_chunk
        if span is None or self._num_chunks <= MAX_CHUNKS:
            attributes: dict[str, Value] = {
                "charonia.sample": request.index,
                "charonia.position": request.num_computed,
            }
            span = self._last_chunk = Span("prefill", began_at, ended_at, attributes)
            self.spans.append(span)
        span.ended_at = ended_at
        _add(span, "charonia.tokens", num_tokens)
        _add(span, "charonia.steps", 1)


def _note_decode(
    sample: _Sample, index: int, num_drafts: int, began_at: float, ended_at: float
) -> None:
    if sample.decode is None:
        sample.decode = Span("decode", began_at, ended_at, {"charonia.sample": index})
    span = sample.decode
    span.ended_at = ended_at
    _add(span, "charonia.steps", 1)
    if num_drafts:
        _add(span, "charonia.drafted_tokens", num_drafts)


def _add(span: Span, name: str, value: float) -> None:
    """Add to an attribute that is a number."""
    before = span.attributes.get(name, 0)
    assert isinstance(before, int | float)
    span.attributes[name] = before + value
