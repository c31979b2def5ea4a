"""The JSON of REST answers.

Owns their fields. Must not know where the values come from.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from charonia_client import Completion, Load, PositionLogprobs


class Token(msgspec.Struct):
    """A token that was possible at one position. Rank 1 is the most likely one.

    Attributes:
        logprob: null where it is no finite number.
    """

    token_id: int
    text: str
    logprob: float | None
    rank: int


Position = list[Token]
"""The sampled token first, then the most likely ones."""


class Sample(msgspec.Struct, kw_only=True):
    """One of several answers to a prompt."""

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[Position] | UnsetType = UNSET


class GenerateAnswer(msgspec.Struct, kw_only=True):
    """The answer of /v1/generate.

    Attributes:
        prompt_tokens, generated_tokens: counts; the latter of all samples.
        text, token_ids, finish_reason, logprobs: of the first sample.
        throughput_tokens_per_sec: generated tokens over the latency.
        samples: all of them, if the request asked for several.
    """

    request_id: str
    model: str
    prompt_tokens: int
    generated_tokens: int
    text: str
    token_ids: list[int]
    finish_reason: str
    latency_ms: float
    throughput_tokens_per_sec: float
    samples: list[Sample] | UnsetType = UNSET
    logprobs: list[Position] | UnsetType = UNSET
    prompt_logprobs: list[Position | None] | UnsetType = UNSET

    @classmethod
    def of(
        cls, completion: Completion, *, request_id: str, model: str, num_prompt: int, seconds: float
    ) -> "GenerateAnswer":
        """Write a whole answer.

        Args:
            num_prompt: tokens of the prompt. seconds: since the request came.
        """
        samples = [
            Sample(
                text=one.text,
                token_ids=list(one.token_ids),
                finish_reason=one.finish_reason,
                logprobs=positions_of(one.logprobs),
            )
            for one in completion.samples
        ]
        first, num_tokens = samples[0], sum(len(one.token_ids) for one in samples)
        return cls(
            request_id=request_id,
            model=model,
            prompt_tokens=num_prompt,
            generated_tokens=num_tokens,
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            latency_ms=1000 * seconds,
            throughput_tokens_per_sec=num_tokens / seconds,
            samples=samples if len(samples) > 1 else UNSET,
            logprobs=first.logprobs,
            prompt_logprobs=prompt_positions_of(completion.prompt_logprobs),
        )


class Piece(msgspec.Struct, kw_only=True):
    """An event of a stream of /v1/generate: what is new of one sample.

    Attributes:
        sample: its number, if the request asked for several.
        finish_reason: null until the sample ends.
        model and the fields behind it: in the last event only, see `GenerateAnswer`.
    """

    request_id: str
    sample: int | UnsetType = UNSET
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[Position] | UnsetType = UNSET
    prompt_logprobs: list[Position | None] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    generated_tokens: int | UnsetType = UNSET
    latency_ms: float | UnsetType = UNSET
    throughput_tokens_per_sec: float | UnsetType = UNSET


class Failure(msgspec.Struct):
    """An entry of a batch that failed.

    Attributes:
        error: as in the answer to a request that fails, with the HTTP `status` that it would have.
    """

    request_id: str
    error: dict[str, Any]


Response = Annotated[
    Any,  # GenerateAnswer | Failure, which msgspec cannot describe
    msgspec.Meta(
        extra_json_schema={
            "anyOf": [
                {"$ref": "#/components/schemas/GenerateAnswer"},
                {"$ref": "#/components/schemas/Failure"},
            ]
        }
    ),
]


class Totals(msgspec.Struct, kw_only=True):
    """Figures of a whole batch; the rate is that of all generated tokens."""

    request_ids: list[str]
    total_latency_ms: float
    batch_throughput_tokens_per_sec: float


class BatchAnswer(Totals, kw_only=True):
    """The answer of /v1/batch: the responses in the order of the requests."""

    responses: list[Response]


class BatchLine(msgspec.Struct):
    """A line of a streamed batch: the response to the request with this index."""

    index: int
    response: Response


class ServerHealth(msgspec.Struct):
    """A server's readiness for requests, and the reason if it is not ready.

    Attributes:
        fallback: true for a server of the fallback model.
    """

    server: str
    ready: bool
    reason: str | None
    fallback: bool | UnsetType = UNSET


class Health(msgspec.Struct, kw_only=True):
    """The answer of /health/ready, and of /v1/health with `live`.

    Attributes:
        status: "ready", "not ready" or "draining". servers: left out while draining.
    """

    live: bool | UnsetType = UNSET
    status: Literal["ready", "not ready", "draining"]
    servers: list[ServerHealth] | UnsetType = UNSET


class ServerFigures(msgspec.Struct):
    """A server's state and its own figures; `load` is null where it tells none."""

    server: str
    is_up: bool
    reason: str | None
    load: Load | None


class Times(msgspec.Struct):
    """Median and 99th percentile."""

    p50: float
    p99: float


class MetricsAnswer(msgspec.Struct, kw_only=True):
    """The answer of /v1/metrics.

    Attributes:
        total_requests: prompts that were answered since the gateway's start. Each entry of a batch
            and each prompt of a completion counts, whatever API was called. Several samples are one
            answer. What failed doesn't count.
        total_tokens_generated: tokens of these answers.
        avg_latency_ms: mean time from a client's call to the end of the answer to a prompt.
        avg_throughput_tokens_per_sec: the tokens of these answers over the sum of their latencies,
            so the speed of one answer. `tokens_per_sec` is that of the gateway.
        requests_in_flight: HTTP requests whose work isn't done. A batch is one.
        cache_hit_rate, acceptance_rate: of all servers together, since their start.
        tokens_per_sec: of the last ten seconds. ttft_ms: of the last minute's streams.
    """

    total_requests: int
    total_tokens_generated: int
    avg_latency_ms: float | None
    avg_throughput_tokens_per_sec: float | None
    cache_hit_rate: float | None
    acceptance_rate: float | None
    uptime_s: float
    requests_in_flight: int
    tokens_per_sec: float
    ttft_ms: Times | None
    servers: list[ServerFigures]


def positions_of(found: Sequence[PositionLogprobs] | None) -> list[Position] | UnsetType:
    """Write log-probabilities; UNSET where the request asked for none."""
    return UNSET if found is None else list(map(_position, found))


def prompt_positions_of(
    found: Sequence[PositionLogprobs | None] | None,
) -> list[Position | None] | UnsetType:
    """Write those of a prompt, whose first token has none."""
    return UNSET if found is None else list(map(_optional, found))


def _optional(found: PositionLogprobs | None) -> Position | None:
    return None if found is None else _position(found)


def _position(found: PositionLogprobs) -> Position:
    return [Token(one.token_id, one.text, one.logprob, one.rank) for one in found]
