"""Plain values: sampling parameters, chunks, completions, timeouts, health.

Owns immutable values. Must not know how they travel.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length", "cancelled"]
Protocol = Literal["grpc", "http"]
Include = Literal["token_ids", "num_tokens", "timing", "logprobs", "cumulative_logprob"]

DEFAULT_INCLUDE: tuple[Include, ...] = ("token_ids", "num_tokens", "timing")


class Sampling(TypedDict, total=False):
    """Sampling parameters by the server's names, which are vLLM's.

    They are passed on unchanged; the server checks them. None means the server's default.
    """

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    n: int | None
    best_of: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    bad_words: Sequence[str] | None
    allowed_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int | None
    deadline_ms: int | None
    tenant: str | None
    cache_salt: str | None
    speculation: bool | None
    cache_priority: int | Sequence[Mapping[str, float | None]] | None
    cache_ttl_s: float | None
    use_answer_cache: bool | None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The raw log-probability of one token at one position; rank 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int
    text: str


PositionLogprobs = tuple[TokenLogprob, ...]
"""The sampled token first, then the most likely ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Content of one response for one sample: new text and tokens.

    Fields that were not asked for (see `include`) are empty or None.

    Attributes:
        index: index of the sample, of the request's `n`.
        finish_reason: of the sample, in its last chunk; None in all others.
        is_final: whether this is the request's last chunk: all samples have ended.
        logprobs: per new token. prompt_logprobs: per prompt token, in the first chunk; None for
            the first token, which nothing predicts.
        cumulative_logprob: of all tokens of the sample so far.
        num_input_tokens: of the prompt. num_output_tokens: of this chunk.
        timing: seconds and counts measured by the server, in the request's last chunk.
    """

    text: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    cumulative_logprob: float | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    timing: Mapping[str, Any] | None = None
    is_final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One of the answers to a prompt. Its fields are those of `Chunk`, over all of its chunks."""

    index: int
    text: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    num_output_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer.

    Attributes:
        samples: `n` of them, in order. The first sample's fields are also those of the completion:
            `completion.text` is `completion.samples[0].text`.
        prompt_logprobs, num_input_tokens, timing: as in `Chunk`.
    """

    request_id: str
    samples: tuple[Sample, ...]
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    num_input_tokens: int | None = None
    timing: Mapping[str, Any] | None = None

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the first sample."""
        return self.samples[0].finish_reason

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first sample."""
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...] | None:
        """Log-probabilities of the first sample."""
        return self.samples[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """Cumulative log-probability of the first sample."""
        return self.samples[0].cumulative_logprob

    @property
    def num_output_tokens(self) -> int | None:
        """Output tokens of all samples together."""
        return _total(sample.num_output_tokens for sample in self.samples)


def join(request_id: str, chunks: Iterable[Chunk]) -> Completion:
    """Join a stream's chunks.

    Raises:
        ValueError: the last chunk is not final, or a sample has no last chunk.
    """
    parts = list(chunks)
    if not parts or not parts[-1].is_final:
        raise ValueError("the last of the chunks must be final")
    by_sample: dict[int, list[Chunk]] = {}
    for part in parts:
        by_sample.setdefault(part.index, []).append(part)
    prompt_logprobs = (part.prompt_logprobs for part in parts if part.prompt_logprobs is not None)
    return Completion(
        request_id=request_id,
        samples=tuple(_join_sample(by_sample[index]) for index in sorted(by_sample)),
        prompt_logprobs=next(prompt_logprobs, None),
        num_input_tokens=parts[-1].num_input_tokens,
        timing=parts[-1].timing,
    )


def _join_sample(parts: Sequence[Chunk]) -> Sample:
    last = parts[-1]
    if last.finish_reason is None:
        raise ValueError(f"the last chunk of sample {last.index} must have a finish_reason")
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return Sample(
        index=last.index,
        text="".join(part.text for part in parts),
        finish_reason=last.finish_reason,
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=tuple(entry for part in logprobs for entry in part) if logprobs else None,
        cumulative_logprob=last.cumulative_logprob,
        num_output_tokens=_total(part.num_output_tokens for part in parts),
    )


def _total(counts: Iterable[int | None]) -> int | None:
    """Sum the known counts; None if none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts of a request, in seconds; None is no limit, and so are 30 years.

    Attributes:
        total_s: from the call to the last chunk, with all attempts and the pauses between them.
        first_token_s: of each attempt, from sending the request to its first chunk.
    """

    total_s: float | None = None
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("total_s", self.total_s), ("first_token_s", self.first_token_s)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0 or None, but is {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work of a scheduler: present, and done since its start.

    Attributes:
        num_running, num_waiting: requests that have a row of the engine, or wait for one.
        kv_blocks_used: blocks of the KV cache that requests hold, of `kv_blocks_total`.
        prompt_tokens: computed and cached ones. generation_tokens: of all answers.
        cache_queried_tokens: prompt tokens that were looked up in the prefix cache.
        cache_hit_tokens: those of them that were found.
        draft_tokens: tokens that were drafted. accepted_tokens: those that were accepted.
        engine_restarts: how often the engine came back after a failure.
        engine_age_s: seconds since the engine was loaded or found; None while there is none.
    """

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    prompt_tokens: int
    generation_tokens: int
    cache_queried_tokens: int
    cache_hit_tokens: int
    draft_tokens: int
    accepted_tokens: int
    engine_restarts: int
    engine_age_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """The state of the scheduler and its engine.

    Attributes:
        is_up: whether steps can run now. reason: why requests are refused at once; None while they
            are accepted.
        step_age_s: seconds since a step of the engine was last applied; None if none was.
        turn_age_s: seconds since the scheduling thread last looked for work; many seconds mean
            that it hangs.
        max_model_len: tokens of prompt and answer together; None while no engine reports it.
        load: what the scheduler has to do; None if a server of another version lacks a part of it.
    """

    is_up: bool
    reason: str | None
    step_age_s: float | None
    turn_age_s: float | None
    max_model_len: int | None = None
    load: Load | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """The server's readiness; all False if it cannot be reached."""

    is_live: bool
    is_ready: bool
    models: Mapping[str, bool] = field(default_factory=dict)

    @property
    def is_serving(self) -> bool:
        """True if the server and all models that were asked for are ready."""
        return self.is_live and self.is_ready and all(self.models.values())
