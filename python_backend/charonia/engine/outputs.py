"""From committed tokens to what a client gets: text, log-probabilities, an end.

Owns one request's output: its detokenizer, its stop strings and what is held back. Must not know
steps or blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from charonia.control import Request, Update
from charonia.errors import CharoniaError, RequestCancelledError
from charonia.protocol import FinishReason, SamplingParams, TokenLogprobs
from charonia.text.detokenizer import Detokenizer
from charonia.text.stops import StopMatcher
from charonia.text.tokenizer import Tokenizer

PromptLogprobs = list[TokenLogprobs | None]
Timing = dict[str, float | list[int]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one request's output. The last one has a finish reason or an error; where that is
    a cancellation, also what was held back until then.

    Attributes:
        text: new text; only the last chunk may have none. token_ids: new tokens, at least one.
        logprobs: one entry per token, when sampling asks for them.
        cumulative_logprob: of all tokens so far, when log-probabilities are counted.
        prompt_logprobs: in the first chunk, when asked for; the first token has None.
        timing: in the last chunk; see model_repository/README.md.
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

    @property
    def is_final(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None

    @classmethod
    def merge(cls, chunks: Sequence["Chunk"]) -> "Chunk":
        """Join consecutive chunks of one request into one."""
        if len(chunks) == 1:
            return chunks[0]
        first, last = chunks[0], chunks[-1]
        parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
        return cls(
            key=first.key,
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
            prompt_logprobs=first.prompt_logprobs,
            finish_reason=last.finish_reason,
            error=last.error,
            num_prompt_tokens=first.num_prompt_tokens,
            timing=last.timing,
        )


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


class OutputStream:
    """Turns the updates of one request into chunks.

    Args:
        request: the control plane's; read for its counts and times.
        params: for stop strings, minimum length and special tokens.
    """

    def __init__(self, request: Request, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.request = request
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self.num_tokens = 0
        self._cumulative_logprob: float | None = None
        self._held: list[int] = []
        self._held_logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: PromptLogprobs | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def first_token_s(self) -> float | None:
        """From the request's arrival to its first token, None before that."""
        at = self.first_token_at
        return None if at is None else at - self.request.arrived_at

    @property
    def inter_token_s(self) -> float | None:
        """From one token to the next in the mean, None before the second one."""
        if self.num_tokens < 2 or self.first_token_at is None or self.last_token_at is None:
            return None
        return (self.last_token_at - self.first_token_at) / (self.num_tokens - 1)

    def take(self, update: Update, now: float) -> Chunk | None:
        """Take what a step committed; return a chunk when there is text, or the end.

        A stop string may end the text here before the control plane knows of it: then the chunk
        has finish reason "stop", and later tokens are surplus.
        """
        self._take_prompt_logprobs(update)
        text, reason = self._decode(update)
        if update.token_ids:
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
        if reason is not None and not self._matcher.stopped:
            text += self._match(self._detokenizer.finish())
            text += self._matcher.finish()
        if not text and reason is None:
            return None
        return self._chunk(text, reason, now)

    def fail(self, error: CharoniaError, now: float) -> Chunk:
        """The last chunk of a request that ends with an error.

        Who cancels a request may want what there is of it: all that was held back is in the chunk.
        """
        text = ""
        if isinstance(error, RequestCancelledError) and not self._matcher.stopped:
            text = self._match(self._detokenizer.finish()) + self._matcher.finish()
        return replace(self._chunk(text, None, now), error=error, timing=self._timing(now))

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

    def _match(self, text: str) -> str:
        """Look for stop strings, but only in what comes after `min_tokens` tokens."""
        return self._matcher.add(text) if self.num_tokens > self._params.min_tokens else text

    def _take_prompt_logprobs(self, update: Update) -> None:
        """Keep them by position: after a preemption the prompt's tokens come once more."""
        if self._prompt_logprobs is not None and update.prompt_logprobs is not None:
            start = update.prompt_offset + 1
            self._prompt_logprobs[start:] = update.prompt_logprobs

    def _chunk(self, text: str, reason: FinishReason | None, now: float) -> Chunk:
        chunk = Chunk(
            key=self.request.key,
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
        request = self.request
        started_at = now if request.started_at is None else request.started_at
        drafts = request.drafts
        timing: Timing = {
            "queue_seconds": started_at - request.arrived_at,
            "total_seconds": now - request.arrived_at,
            "cached_tokens": request.num_cached,
            "computed_tokens": request.num_prompt - request.num_cached,
            "drafted_tokens": drafts.num_drafted,
            "accepted_tokens": drafts.num_accepted,
            "preemptions": request.num_preemptions,
            "restarts": request.num_restarts,
        }
        if self.first_token_s is not None:
            timing["first_token_seconds"] = self.first_token_s
        if drafts.num_rounds:
            timing["draft_rounds"] = drafts.num_rounds
            timing["drafted_at_position"] = drafts.drafted_at
            timing["accepted_at_position"] = drafts.accepted_at
            timing["mean_draft_depth"] = drafts.num_drafted / drafts.num_rounds
            timing["mean_accepted_length"] = drafts.num_accepted / drafts.num_rounds
            timing["draft_seconds"] = drafts.draft_seconds
            timing["verify_seconds"] = drafts.verify_seconds
        return timing
