"""Turns committed tokens into the output for a client: text, log-probabilities, the end.

Owns the output of each sample of a request: its detokenizer, its stop strings and the text that is
held back. Must not know steps or blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import cast

import msgspec
from msgspec.structs import replace

from charonia.control import Request, Update
from charonia.errors import CharoniaError, RequestCancelledError
from charonia.protocol import FinishReason, SamplingParams, TokenLogprobs
from charonia.text.detokenizer import Detokenizer
from charonia.text.stops import StopMatcher
from charonia.text.tokenizer import Tokenizer

PromptLogprobs = list[TokenLogprobs | None]
Timing = dict[str, float | str | list[int]]


class Chunk(msgspec.Struct, frozen=True):
    """A piece of one sample's output. The last one has a finish reason or an error.

    The last chunk after a cancellation also has the text that was held back.

    Attributes:
        text: new text; only the last chunk may have none. token_ids: new tokens, at least one.
        logprobs: one entry per token, if the request asks for them.
        cumulative_logprob: sum over all tokens so far, if log-probabilities are computed.
        prompt_logprobs: in the first chunk, if the request asks for them; None for the first token.
        timing: in the last chunk of the request; see model_repository/README.md.
        index: of the sample in the request. num_open: samples of the request that have not ended.
    """

    key: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    error: CharoniaError | None = None
    num_prompt_tokens: int = 0
    timing: Timing | None = None
    index: int = 0
    num_open: int = 0

    @property
    def is_final(self) -> bool:
        """True if this is the last chunk of the request."""
        return self.ends_sample and not self.num_open

    @property
    def ends_sample(self) -> bool:
        """True if this is the last chunk of its sample."""
        return self.finish_reason is not None or self.error is not None

    def emptied(self) -> "Chunk":
        """A copy without new output, which shows the sample's state."""
        return replace(
            self, text="", token_ids=(), logprobs=None, prompt_logprobs=None, timing=None
        )

    @classmethod
    def merge(cls, chunks: Sequence["Chunk"]) -> "Chunk":
        """Join consecutive chunks of one sample into one."""
        if len(chunks) == 1:
            return chunks[0]
        first, last = chunks[0], chunks[-1]
        parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
        return cls(
            key=first.key,
            index=first.index,
            num_open=last.num_open,
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
            logprobs=tuple(entry for part in parts for entry in part) if parts else None,
            cumulative_logprob=next(
                (
                    chunk.cumulative_logprob
                    for chunk in reversed(chunks)
                    if chunk.cumulative_logprob is not None
                ),
                None,
            ),
            prompt_logprobs=next(
                (one.prompt_logprobs for one in chunks if one.prompt_logprobs is not None), None
            ),
            finish_reason=last.finish_reason,
            error=last.error,
            num_prompt_tokens=last.num_prompt_tokens,
            timing=last.timing,
        )


def merge_samples(chunks: Sequence[Chunk], num_samples: int) -> list[Chunk]:
    """Join the chunks of a whole answer into one for each sample."""
    return [
        Chunk.merge([chunk for chunk in chunks if chunk.index == index])
        for index in range(num_samples)
    ]


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """One candidate at one position: raw log-probability, rank (1 is best), decoded token."""

    logprob: float
    rank: int
    decoded_token: str


def name_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Name one position's candidates by token id, the sampled token first."""
    ranks = [entry.rank, *range(1, len(entry.token_ids))]
    return {
        token_id: Logprob(logprob, rank, tokenizer.token_text(token_id))
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True)
    }


class SampleStream(ABC):
    """The output of one sample.

    Args:
        request: the control plane's.

    Attributes:
        num_tokens: so far. first_token_at, last_token_at: by the clock of `take`; None before the
            first token.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_tokens = 0
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None before that."""
        at = self.first_token_at
        return None if at is None else at - self.request.arrived_at

    @property
    def inter_token_s(self) -> float | None:
        """Mean seconds between tokens; None before the second one."""
        if self.num_tokens < 2 or self.first_token_at is None or self.last_token_at is None:
            return None
        return (self.last_token_at - self.first_token_at) / (self.num_tokens - 1)

    @abstractmethod
    def take(self, update: Update, now: float) -> Chunk | None:
        """Take the update of a step; return a chunk if there is text or the end."""

    @abstractmethod
    def fail(self, error: CharoniaError, now: float) -> Chunk:
        """The last chunk of a sample that ends with an error."""

    @abstractmethod
    def cancel(self, now: float) -> Chunk:
        """The last chunk of a cancelled sample. The request goes on, so it has no error."""


MakeStream = Callable[[Request, SamplingParams], SampleStream]


class OutputStream(SampleStream):
    """Turns the updates of one sample into chunks of text.

    Args:
        request: the control plane's; its counts and times are read.
        params: for stop strings, minimum length and special tokens.
    """

    def __init__(self, request: Request, params: SamplingParams, tokenizer: Tokenizer) -> None:
        super().__init__(request)
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self._cumulative_logprob: float | None = None
        self._held: list[int] = []
        self._held_logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: PromptLogprobs | None = (
            None if params.prompt_logprobs is None else [None]
        )

    def take(self, update: Update, now: float) -> Chunk | None:
        """See `SampleStream`.

        A stop string ends the text before the control plane knows of it. The chunk then has finish
        reason "stop", and later tokens are ignored.
        """
        self._take_prompt_logprobs(update)
        text, reason = self._decode(update)
        if update.token_ids:
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
        if reason is not None:
            text += self._rest()
            if self._matcher.stopped:  # the detokenizer may have held back the end of a stop string
                reason = "stop"
        if not text and reason is None:
            return None
        return self._chunk(text, reason, now)

    def fail(self, error: CharoniaError, now: float) -> Chunk:
        """See `SampleStream`.

        The last chunk of a cancelled request includes all that was held back: its client may want
        it.
        """
        text = self._rest() if isinstance(error, RequestCancelledError) else ""
        return replace(self._chunk(text, None, now), error=error, timing=self._timing(now))

    def cancel(self, now: float) -> Chunk:
        """See `SampleStream`. The chunk includes all that was held back."""
        return self._chunk(self._rest(), "cancelled", now)

    def _decode(self, update: Update) -> tuple[str, FinishReason | None]:
        """Decode token by token, up to the one that completes a stop string."""
        text = ""
        hides_stop = update.finish_reason == "stop" and not self._params.include_stop_str_in_output
        for index, token_id in enumerate(update.token_ids):
            self.num_tokens += 1
            self._held.append(token_id)
            if update.logprobs is not None:
                entry = update.logprobs[index]
                self._held_logprobs.append(entry)
                self._cumulative_logprob = (self._cumulative_logprob or 0.0) + entry.logprobs[0]
            if not (hides_stop and index == len(update.token_ids) - 1):
                text += self._match(self._detokenizer.add((token_id,)))
            if self._matcher.stopped:
                return text, "stop"
        return text, update.finish_reason

    def _rest(self) -> str:
        """The text that was held back; empty after a stop string."""
        if self._matcher.stopped:
            return ""
        return self._match(self._detokenizer.finish()) + self._matcher.finish()

    def _match(self, text: str) -> str:
        """Look for stop strings, but only after `min_tokens` tokens."""
        return self._matcher.add(text) if self.num_tokens > self._params.min_tokens else text

    def _take_prompt_logprobs(self, update: Update) -> None:
        """Store them by position: after a preemption they come once more."""
        if self._prompt_logprobs is not None and update.prompt_logprobs is not None:
            start = update.prompt_offset + 1
            self._prompt_logprobs[start:] = update.prompt_logprobs

    def _chunk(self, text: str, reason: FinishReason | None, now: float) -> Chunk:
        chunk = Chunk(
            key=self.request.group.key,
            index=self.request.index,
            text=text,
            token_ids=tuple(self._held),
            logprobs=None if self._params.logprobs is None else tuple(self._held_logprobs),
            cumulative_logprob=self._cumulative_logprob,
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=reason,
            num_prompt_tokens=self.request.num_prompt,
            timing=None if reason is None else self._timing(now),
        )
        self._prompt_logprobs = None
        self._held = []
        self._held_logprobs = []
        return chunk

    def _timing(self, now: float) -> Timing:
        """The timing of this sample."""
        request = self.request
        is_started = request.started_at is not None
        started_at = now if request.started_at is None else request.started_at
        drafts = request.drafts
        timing: Timing = {
            "queue_seconds": started_at - request.arrived_at,
            "total_seconds": now - request.arrived_at,
            "cached_tokens": request.num_cached,
            "computed_tokens": request.num_prompt - request.num_cached if is_started else 0,
            "drafted_tokens": drafts.num_drafted,
            "accepted_tokens": drafts.num_accepted,
            "preemptions": request.num_preemptions,
            "restarts": request.num_restarts,
            "engine_seconds": request.engine_seconds,
            "engine_flops": request.engine_flops,
        }
        if self.first_token_s is not None:
            timing["first_token_seconds"] = self.first_token_s
            timing["prefill_seconds"] = self.first_token_s - (started_at - request.arrived_at)
            timing["decode_seconds"] = now - request.arrived_at - self.first_token_s
        if drafts.num_rounds:
            timing["draft_rounds"] = drafts.num_rounds
            timing["drafted_at_position"] = drafts.drafted_at
            timing["accepted_at_position"] = drafts.accepted_at
            timing["mean_draft_depth"] = drafts.num_drafted / drafts.num_rounds
            timing["mean_accepted_length"] = drafts.num_accepted / drafts.num_rounds
            timing["draft_seconds"] = drafts.draft_seconds
            timing["verify_seconds"] = drafts.verify_seconds
        return timing


_LEAST = ("queue_seconds", "first_token_seconds")
_GREATEST = ("total_seconds",)
_DIFFERENCES = {
    "prefill_seconds": ("first_token_seconds", "queue_seconds"),
    "decode_seconds": ("total_seconds", "first_token_seconds"),
}
_MEANS = {"mean_draft_depth": "drafted_tokens", "mean_accepted_length": "accepted_tokens"}


def merged_timing(timings: Sequence[Timing]) -> Timing:
    """The timing of a request, merged from its samples.

    Its times are from its arrival to the first step, the first token and the last end of any
    sample, and the differences of these.
    """
    if len(timings) == 1:
        return timings[0]
    merged: Timing = {}
    for name in dict.fromkeys(name for timing in timings for name in timing):
        values = [timing[name] for timing in timings if name in timing]
        if isinstance(values[0], list):
            columns = zip_longest(*cast("list[list[int]]", values), fillvalue=0)
            merged[name] = [sum(column) for column in columns]
        elif name not in _MEANS and name not in _DIFFERENCES:
            combine = min if name in _LEAST else max if name in _GREATEST else sum
            merged[name] = combine(cast("list[float]", values))
    if "first_token_seconds" in merged:
        for name, (until, since) in _DIFFERENCES.items():
            merged[name] = cast("float", merged[until]) - cast("float", merged[since])
    for name, total in _MEANS.items():
        if any(name in timing for timing in timings):
            merged[name] = cast("float", merged[total]) / cast("float", merged["draft_rounds"])
    # The first sample has the fewest cached tokens: the others also hit what it has computed.
    # Samples that never started have computed none and do not count.
    found = [cast("float", one["cached_tokens"]) for one in timings if one["computed_tokens"]]
    merged["prompt_cached_tokens"] = min(found, default=0)
    return merged


class SampleStreams:
    """The output of all samples of one request.

    With `best_of`, no output comes before all samples have ended. Then the samples with the
    greatest cumulative log-probability come, the greatest first.

    Args:
        requests: the control plane's, one for each sample.

    Attributes:
        open: samples that have not ended.
        reason: finish reason of the last sample that was not cancelled; "cancelled" without one.
    """

    def __init__(
        self, requests: Sequence[Request], params: SamplingParams, make_stream: MakeStream
    ) -> None:
        self.streams = [make_stream(request, params) for request in requests]
        self.open = set(range(len(requests)))
        self.reason: FinishReason = "cancelled"
        self._timings: list[Timing] = []
        self._num_best = params.n if len(requests) > params.n else None
        self._held: list[list[Chunk]] = [[] for _ in requests]

    @property
    def first(self) -> Request:
        """The request of the first sample."""
        return self.streams[0].request

    def keys_of(self, indexes: Collection[int]) -> list[str]:
        """Keys of these samples, as the control plane has them."""
        return [self.streams[index].request.key for index in indexes]

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request's arrival to its first token of any sample; None before that."""
        found = [one.first_token_s for one in self.streams if one.first_token_s is not None]
        return min(found, default=None)

    @property
    def inter_token_s(self) -> float | None:
        """Mean seconds between tokens, of the slowest sample."""
        found = [one.inter_token_s for one in self.streams if one.inter_token_s is not None]
        return max(found, default=None)

    def take(self, update: Update, now: float) -> list[Chunk]:
        """Take the update of an open sample; return the chunks that are ready."""
        index = update.request.index
        chunk = self.streams[index].take(update, now)
        return [] if chunk is None else self._ready(chunk)

    def cancellable(self, indexes: Collection[int]) -> list[int]:
        """Return those of these samples that can be cancelled alone; none with `best_of`."""
        return sorted(self.open.intersection(indexes)) if self._num_best is None else []

    def cancel(self, indexes: Collection[int], now: float) -> list[Chunk]:
        """Cancel those of these samples that can be cancelled; return their last chunks."""
        cancellable = self.cancellable(indexes)
        return [
            chunk for index in cancellable for chunk in self._ready(self.streams[index].cancel(now))
        ]

    def fail(self, error: CharoniaError, now: float) -> list[Chunk]:
        """End the open samples with an error; return their last chunks."""
        return [
            chunk
            for index in sorted(self.open)
            for chunk in self._ready(self.streams[index].fail(error, now))
        ]

    def _ready(self, chunk: Chunk) -> list[Chunk]:
        if chunk.ends_sample:
            self.open.discard(chunk.index)
            self._timings.append(chunk.timing or {})
        if chunk.finish_reason is not None and chunk.finish_reason != "cancelled":
            self.reason = chunk.finish_reason
        chunk = replace(chunk, num_open=len(self.open), timing=None)
        if self._num_best is not None:
            self._held[chunk.index].append(chunk)
            return [] if self.open else self._best(self._num_best)
        return [self._timed(chunk)]

    def _timed(self, last: Chunk) -> Chunk:
        return replace(last, timing=merged_timing(self._timings)) if last.is_final else last

    def _best(self, num: int) -> list[Chunk]:
        """The most likely samples, each in one chunk; the last one has the error, if any."""
        whole = [Chunk.merge(chunks) for chunks in self._held]
        error = next((chunk.error for chunk in whole if chunk.error is not None), None)
        prompt_logprobs = whole[0].prompt_logprobs
        whole.sort(key=lambda chunk: chunk.cumulative_logprob or 0.0, reverse=True)
        best = [
            replace(chunk, index=index, num_open=num - 1 - index, prompt_logprobs=None)
            for index, chunk in enumerate(whole[:num])
        ]
        best[0] = replace(best[0], prompt_logprobs=prompt_logprobs)
        best[-1] = self._timed(replace(best[-1], error=error))
        return best
