"""From a client's request to the control plane's: checked, defaults filled in.

Owns what makes a request acceptable to this engine. Must not know how it is served.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf

from charonia.config import EngineArgs
from charonia.control import Limits, Request
from charonia.errors import InvalidRequestError, NotSupportedError
from charonia.protocol import UINT64_MAX, EngineInfo, RowSampling, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a client asks for.

    Attributes:
        key: unique among all live requests. request_id: the client's own, any text.
        bad_words_ids: the token id sequences that spell the bad words of `params`.
        draft_ids: the client's guess at its first tokens.
        timeout_s: how long it may wait for its first step.
        return_cumulative_logprob: count log-probabilities even where none are returned.
        is_probe: no client's; it appears in no metric of requests.
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


def check(request: GenerationRequest, args: EngineArgs, info: EngineInfo, limits: Limits) -> None:
    """Check a request against an engine and what it was loaded with.

    Raises:
        InvalidRequestError: the prompt is empty or too long, or a token id does not exist.
        NotSupportedError: it has a priority, which the scheduling policy does not ask for.
    """
    params = request.params
    if params.priority and args.scheduling_policy != "priority":
        raise NotSupportedError(
            f"priority = {params.priority} has no effect with scheduling_policy"
            f" {args.scheduling_policy!r}, which serves requests in the order in which they came;"
            ' leave it out, or have the engine loaded with scheduling_policy "priority"'
        )
    assert bool(request.bad_words_ids) == bool(params.bad_words), "bad words were not encoded"
    limits.check_prompt(len(request.prompt_ids))
    _check_ids("input_ids", request.prompt_ids, info.vocab_size)
    _check_ids("draft_input_ids", request.draft_ids, info.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, info.vocab_size)
    _check_ids("logit_bias", tuple(params.logit_bias), info.vocab_size)


def seeds_of(seed: int | None) -> Callable[[], int]:
    """A function that gives 64-bit seeds to requests without one of their own.

    Args:
        seed: the engine's; the same gives the same seeds in the same order. None: random ones.
    """
    generator = random.SystemRandom() if seed is None else random.Random(seed & UINT64_MAX)
    return partial(generator.getrandbits, 64)


def admit(
    request: GenerationRequest,
    info: EngineInfo,
    limits: Limits,
    now: float,
    next_seed: Callable[[], int],
) -> Request:
    """Translate a request that was checked, perhaps against another engine: it may not fit."""
    params = request.params
    num_room = limits.max_model_len - len(request.prompt_ids)
    eos_ids = [] if params.ignore_eos else info.eos_token_ids
    stop_ids = frozenset([*eos_ids, *params.stop_token_ids])
    return Request(
        key=request.key,
        token_ids=list(request.prompt_ids),
        num_prompt=len(request.prompt_ids),
        sampling=_row_sampling(request, stop_ids, next_seed),
        max_tokens=min(params.max_tokens, num_room),
        stop_ids=stop_ids,
        arrived_at=now,
        tenant=params.tenant,
        priority=params.priority,
        expires_at=inf if params.deadline_ms is None else now + params.deadline_ms / 1000,
        cache_scope=cache_scope(params),
        takes_hits=params.prompt_logprobs is None,
        speculates=params.speculation,
        expected_ids=deque(request.draft_ids),
        is_probe=request.is_probe,
    )


def _row_sampling(
    request: GenerationRequest, stop_ids: frozenset[int], next_seed: Callable[[], int]
) -> RowSampling:
    params = request.params
    num_logprobs = -1 if params.logprobs is None else params.logprobs
    if request.return_cumulative_logprob:
        num_logprobs = max(num_logprobs, 0)
    seed = next_seed() if params.seed is None else params.seed & UINT64_MAX
    return RowSampling(
        seed=seed,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        bad_words_ids=request.bad_words_ids,
        min_tokens=params.min_tokens,
        stop_ids=sorted(stop_ids) if params.min_tokens else [],
        num_logprobs=num_logprobs,
        num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
    )


def cache_scope(params: SamplingParams) -> bytes:
    """Tenant and salt, told apart by the tenant's length."""
    tenant = params.tenant.encode()
    return len(tenant).to_bytes(8, "little") + tenant + params.cache_salt.encode()


def _check_ids(name: str, ids: list[int] | tuple[int, ...], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        index, wrong = next((i, x) for i, x in enumerate(ids) if not 0 <= x < vocab_size)
        raise InvalidRequestError(
            f"{name} has token id {wrong} at place {index}; "
            f"the vocabulary has ids 0 to {vocab_size - 1}"
        )
