"""What goes in and what comes out: sampling parameters, chunks, completions, timeouts, health.

Owns plain immutable values. Must not know how they travel.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length"]
Protocol = Literal["grpc", "http"]
Include = Literal["token_ids", "num_tokens", "timing", "logprobs", "cumulative_logprob"]

DEFAULT_INCLUDE: tuple[Include, ...] = ("token_ids", "num_tokens", "timing")


class Sampling(TypedDict, total=False):
    """Sampling parameters by the server's names, which are vLLM's.

    They are passed on as they are; the server says what is wrong with them, and what it would
    accept. A value of None means the server's default.
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


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The raw log-probability of one token at one position; rank 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int
    text: str


PositionLogprobs = tuple[TokenLogprob, ...]
"""The token that was taken first, then the most likely ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One response: text and tokens that are new since the last one.

    What was not asked for (see `include`) is empty or None.

    Attributes:
        finish_reason: None in all chunks but the last.
        logprobs: per new token. prompt_logprobs: per prompt token, in the first chunk; None for
            the first token, which nothing predicts.
        cumulative_logprob: of all tokens so far.
        num_input_tokens: of the prompt. num_output_tokens: of this chunk.
        timing: seconds and counts that the server measured, in the last chunk.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    cumulative_logprob: float | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    timing: Mapping[str, Any] | None = None

    @property
    def is_final(self) -> bool:
        """Whether this is the request's last chunk."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer; the fields are those of `Chunk`, over all of them."""

    request_id: str
    text: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    cumulative_logprob: float | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    timing: Mapping[str, Any] | None = None


def join(request_id: str, chunks: Iterable[Chunk]) -> Completion:
    """The completion that a stream's chunks make.

    Raises:
        ValueError: the last chunk is not final.
    """
    parts = list(chunks)
    last = parts[-1] if parts else None
    if last is None or last.finish_reason is None:
        raise ValueError("the last of the chunks must have a finish_reason")
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    counts = [part.num_output_tokens for part in parts if part.num_output_tokens is not None]
    return Completion(
        request_id=request_id,
        text="".join(part.text for part in parts),
        finish_reason=last.finish_reason,
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=tuple(entry for part in logprobs for entry in part) if logprobs else None,
        prompt_logprobs=parts[0].prompt_logprobs,
        cumulative_logprob=last.cumulative_logprob,
        num_input_tokens=last.num_input_tokens,
        num_output_tokens=sum(counts) if counts else None,
        timing=last.timing,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long a request may take, in seconds; None is for ever.

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


@dataclass(frozen=True, slots=True)
class Health:
    """What the server says of itself; all False where it cannot be reached."""

    is_live: bool
    is_ready: bool
    models: Mapping[str, bool] = field(default_factory=dict)

    @property
    def is_serving(self) -> bool:
        """Whether the server and all models that were asked about are ready."""
        return self.is_live and self.is_ready and all(self.models.values())
