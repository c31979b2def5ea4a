"""Turns a client's request into the control plane's: checks it and fills in defaults.

Owns the checks of a request against the engine. Must not know how it is served.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf

import msgspec

from charonia.config import EngineArgs
from charonia.control import Group, Limits, Request
from charonia.errors import InvalidRequestError, NotSupportedError
from charonia.events import request_fields
from charonia.protocol import UINT64_MAX, CacheRange, EngineInfo, RowSampling, SamplingParams
from charonia.tracing.request_trace import RequestTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A client's request.

    Attributes:
        key: unique among all live requests. request_id: the client's own id, any text.
        bad_words_ids: the bad words of `params`, as sequences of token ids.
        draft_ids: the client's guess at the first tokens of the answer.
        timeout_s: how long it may wait for its first step.
        return_cumulative_logprob: sum log-probabilities even if those of single tokens are not
            returned.
        is_probe: whether it is a health probe; probes are not counted in the metrics of requests.
        is_shared: computed for the requests of several clients; `answers` counts those.
        trace_id: of W3C's Trace Context; None if it came without.
        trace: gets the steps that compute for it; None if it is not traced.
    """

    key: str
    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    bad_words_ids: list[list[int]] = field(default_factory=list)
    draft_ids: list[int] = field(default_factory=list)
    request_id: str = ""
    return_cumulative_logprob: bool = False
    timeout_s: float | None = None
    is_probe: bool = False
    is_shared: bool = False
    trace: RequestTrace | None = None
    trace_id: str | None = None

    @property
    def log_fields(self) -> dict[str, str | None]:
        """The fields of lines that concern it."""
        return request_fields(
            key=self.key,
            request_id=self.request_id,
            tenant=self.params.tenant,
            trace_id=self.trace_id,
        )

    @property
    def counts_logprobs(self) -> bool:
        """True if log-probabilities of its tokens are computed."""
        params = self.params
        is_ranked = params.num_samples > params.n
        return self.return_cumulative_logprob or is_ranked or params.logprobs is not None


def check(request: GenerationRequest, args: EngineArgs, info: EngineInfo, limits: Limits) -> None:
    """Check a request against an engine and its arguments.

    Raises:
        InvalidRequestError: the prompt is empty or too long, or a token id does not exist.
        NotSupportedError: it has a priority, but the scheduling policy does not use priorities.
    """
    params = request.params
    if params.priority and args.scheduling_policy != "priority":
        raise NotSupportedError(
            f"priority = {params.priority} has no effect with scheduling_policy"
            f" {args.scheduling_policy!r}, which serves requests in the order of their"
            f" {'arrival' if args.scheduling_policy == 'fcfs' else 'deadlines'};"
            ' leave it out, or have the engine loaded with scheduling_policy "priority"'
        )
    assert bool(request.bad_words_ids) == bool(params.bad_words), "bad words were not encoded"
    limits.check_prompt(len(request.prompt_ids))
    _check_ids("input_ids", request.prompt_ids, info.vocab_size)
    _check_ids("draft_input_ids", request.draft_ids, info.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, info.vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), info.vocab_size)
    _check_ids("logit_bias", tuple(params.logit_bias), info.vocab_size)


def seeds_of(seed: int | None) -> Callable[[], int]:
    """A function that gives 64-bit seeds to requests without one of their own.

    Args:
        seed: the engine's; equal seeds give equal sequences. None gives random seeds.
    """
    generator = random.SystemRandom() if seed is None else random.Random(seed & UINT64_MAX)
    return partial(generator.getrandbits, 64)


def control_requests(
    request: GenerationRequest,
    info: EngineInfo,
    limits: Limits,
    now: float,
    next_seed: Callable[[], int],
) -> list[Request]:
    """Translate a checked request. The check may have been against another engine.

    Returns:
        One request of the control plane for each sample.
    """
    group = Group(request.key, request.trace)
    seed = next_seed() if request.params.seed is None else request.params.seed
    return [
        _sample(request, info, limits, now, group, seed, index)
        for index in range(request.params.num_samples)
    ]


def _sample(
    request: GenerationRequest,
    info: EngineInfo,
    limits: Limits,
    now: float,
    group: Group,
    seed: int,
    index: int,
) -> Request:
    params = request.params
    scores_prompt = params.prompt_logprobs is not None and not index  # once is enough
    num_room = limits.max_model_len - len(request.prompt_ids)
    eos_ids = [] if params.ignore_eos else info.eos_token_ids
    stop_ids = frozenset([*eos_ids, *params.stop_token_ids])
    return Request(
        key=f"{request.key}#{index}" if index else request.key,
        group=group,
        index=index,
        token_ids=list(request.prompt_ids),
        num_prompt=len(request.prompt_ids),
        sampling=_row_sampling(request, stop_ids, seed + index, scores_prompt=scores_prompt),
        max_tokens=min(params.max_tokens, num_room),
        stop_ids=stop_ids,
        arrived_at=now,
        tenant=params.tenant,
        priority=params.priority,
        expires_at=inf if params.deadline_ms is None else now + params.deadline_ms / 1000,
        cache_scope=cache_scope(params),
        takes_hits=not scores_prompt,
        retention=_retention(params, len(request.prompt_ids)),
        speculates=params.speculation,
        expected_ids=deque(request.draft_ids),
        is_probe=request.is_probe,
    )


def _row_sampling(
    request: GenerationRequest, stop_ids: frozenset[int], seed: int, *, scores_prompt: bool
) -> RowSampling:
    params = request.params
    return RowSampling(
        seed=seed & UINT64_MAX,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        bad_words_ids=request.bad_words_ids,
        allowed_ids=params.allowed_token_ids or (),
        min_tokens=params.min_tokens,
        stop_ids=sorted(stop_ids) if params.min_tokens else [],
        num_logprobs=(params.logprobs or 0) if request.counts_logprobs else -1,
        num_prompt_logprobs=(params.prompt_logprobs or 0) if scores_prompt else -1,
    )


def _retention(params: SamplingParams, num_prompt: int) -> tuple[CacheRange, ...]:
    """The cache ranges of a request, in order."""
    wanted, ttl_s = params.cache_priority, params.cache_ttl_s
    if wanted is None:
        return ()
    if isinstance(wanted, int):
        return (CacheRange(end=num_prompt, priority=wanted, ttl_s=ttl_s),)
    ranges = sorted(wanted, key=lambda one: one.start)
    return tuple(
        one if one.ttl_s is not None else msgspec.structs.replace(one, ttl_s=ttl_s)
        for one in ranges
    )


def cache_scope(params: SamplingParams) -> bytes:
    """Tenant and salt. The tenant's length comes first, so that no two pairs are alike."""
    tenant = params.tenant.encode()
    return len(tenant).to_bytes(8, "little") + tenant + params.cache_salt.encode()


def _check_ids(name: str, ids: list[int] | tuple[int, ...], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        index, wrong = next((i, x) for i, x in enumerate(ids) if not 0 <= x < vocab_size)
        raise InvalidRequestError(
            f"{name} has token id {wrong} at place {index}; "
            f"the vocabulary has ids 0 to {vocab_size - 1}"
        )
