"""Parameters of a request: the choice of its tokens, its end, and additional outputs.

Owns names, ranges and defaults, which are vLLM's. Knows nothing about tokens or tensors.

To add a parameter, add a field with its range here. If a step needs it, extend
`messages.RowSampling`, `core/generation_request.py`, `data/plan_check.py`, `data/largest_step.py`
and `data/sampling/` (torch and C++, whose sources are in `data/ops/native/`). A new type needs a
`Kind` in `_FIELDS` and a line in `serving/conventions/parameters.py`. Then extend
`gateway/sampling.py` (or `requests.py` in `gateway/openai/` or `gateway/rest/`, if one API has
it), `charonia_client/values.py` and model_repository/README.md, and run `make interface`. If the
parameter changes no token, list it in `core/answers/answer_key.py`; a test asks. If a checkpoint's
generation_config.json may set it, list it in `sampling_defaults.py`. If TensorRT-LLM has it, too,
see `serving/conventions/trtllm/tables.py`. The most used have a field on the gateway's page, see
`settings.js` and `index.html` in `gateway/page/`.
"""

import math
from typing import Any

import msgspec

from charonia.errors import InvalidRequestError, NotSupportedError, shown
from charonia.protocol.field_types import KINDS, Kind, fields_of, read_fields

UINT64_MAX = 2**64 - 1
INT32_MAX = 2**31 - 1
DEFAULT_CACHE_PRIORITY = 35
MAX_CACHE_PRIORITY = 100
MAX_CACHE_RANGES = 32
MAX_TTL_S = 1e9
MAX_LOGPROBS = 20
MAX_SAMPLES = 128
"""Most samples of one prompt; OpenAI's API has the same limit."""
MAX_ENTRIES = {
    "stop": 64,
    "stop_token_ids": 1024,
    "bad_words": 256,
    "allowed_token_ids": 4096,
    "logit_bias": 4096,
}
MAX_CHARACTERS = {"stop": 8192, "bad_words": 8192, "tenant": 256, "cache_salt": 256}

WITHOUT_BEAM_SEARCH: dict[str, Any] = {
    "use_beam_search": False,
    "num_beams": 1,
    "beam_width": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
}
"""Parameters of beam search, each with the value that turns it off."""


def check_no_beam_search(name: str, value: object) -> None:
    """Raises NotSupportedError: the value of a `WITHOUT_BEAM_SEARCH` parameter asks for beams."""
    if value is not None and value != WITHOUT_BEAM_SEARCH[name]:
        raise NotSupportedError(
            f"{name} = {shown(value)} is for beam search, which is not supported; leave it out,"
            " or use best_of for the most likely of several samples"
        )


class _Sampling(msgspec.StructMeta):
    """Lets the class accept parameters of beam search that turn it off, and refuse others."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        for name in values.keys() & WITHOUT_BEAM_SEARCH:
            check_no_beam_search(name, values.pop(name))
        return super().__call__(*args, **values)


class CacheRange(msgspec.Struct, frozen=True, kw_only=True):
    """Retention of the prefix cache's blocks whose first token is in a range of positions.

    Attributes:
        start: the first position, >= 0. end: the one behind the last; None is without an end.
        priority: 0 to `MAX_CACHE_PRIORITY`; lower is evicted first. Blocks without a `CacheRange`
            have the default.
        ttl_s: how long the priority lasts once no request uses a block; then the block has the
            default priority. None is for ever.
    """

    start: int = 0
    end: int | None = None
    priority: int = DEFAULT_CACHE_PRIORITY
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        """Check types; `SamplingParams` checks ranges.

        Raises:
            InvalidRequestError: a value of another type; the text names it.
        """
        read_fields(self, _FIELDS_OF_RANGES, "{} of cache_priority")


_FIELDS_OF_RANGES = fields_of(CacheRange)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=_Sampling):
    """Choice of a request's tokens, and its end. Names and defaults are vLLM's.

    Parameters of beam search are accepted if they turn it off; others raise NotSupportedError.

    Attributes:
        max_tokens: most tokens to generate, >= 1; cut to what fits in `max_model_len`.
        min_tokens: EOS, stop tokens and stop strings are suppressed before this many tokens.
        temperature: 0 is greedy.
        top_p: smallest set of tokens with this probability mass, in (0, 1].
        top_k: this many most likely tokens; 0 or -1 is all.
        min_p: tokens at least this fraction as likely as the most likely one, in [0, 1].
        seed: seed of the stateless noise; None takes a random one at admission.
        n: samples of the prompt; sample i is what `seed` + i gives alone. best_of: samples that
            are generated; the n with the greatest log-probability are returned. None is n.
            `MAX_SAMPLES` at most.
        stop: strings that end the text; stop_token_ids: tokens that end it. `MAX_ENTRIES` and
            `MAX_CHARACTERS` limit these and other parameters.
        include_stop_str_in_output: keep the stop string at the end of the text.
        bad_words: strings whose tokens must not be generated, as they spell it at the beginning of
            a text and after a space. Other tokens may still make the same text.
        allowed_token_ids: only these tokens can be generated, at least one; None allows all. EOS
            must be among them to be generated. Where other parameters suppress them all, they are
            equally likely.
        ignore_eos: go on after the end-of-sequence token.
        skip_special_tokens: leave special tokens out of the text.
        presence_penalty, frequency_penalty: subtracted from logits of generated tokens, [-2, 2].
        repetition_penalty: divides positive, multiplies negative logits of tokens seen in prompt
            or output, > 0.
        logit_bias: added to the logits of these token ids, each in [-100, 100].
        logprobs: this many most likely tokens per generated token, with their raw
            log-probabilities (before temperature and penalties); 0 is the sampled token alone.
        prompt_logprobs: the same for the prompt's tokens; such a request takes no cache hits.
        priority: smaller is sooner, if the scheduling policy uses it. deadline_ms: total time the
            request may take.
        tenant: whose request this is; caches are isolated by tenant and cache_salt.
        cache_salt: isolates the prefix cache further. speculation: False turns drafts off.
        cache_priority: priority of the prompt's blocks in the prefix cache, or a list of
            `CacheRange` for ranges of positions, generated tokens included. A dict with the fields
            of a `CacheRange` will do; it must have `priority`. None asks for nothing.
        cache_ttl_s: `ttl_s` of the ranges that give none.
        use_answer_cache: whether it may get the answer of an equal request, and its own answer may
            be kept for others, if the scheduler keeps answers (`answer_cache_bytes`).
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    deadline_ms: int | None = None
    tenant: str = ""
    cache_salt: str = ""
    speculation: bool = True
    cache_priority: int | tuple[CacheRange, ...] | None = None
    cache_ttl_s: float | None = None
    use_answer_cache: bool = True

    def __post_init__(self) -> None:
        """Check types and ranges.

        Raises:
            InvalidRequestError: a value of another type or out of range; the text names it and
                what is accepted.
        """
        read_fields(self, _FIELDS)
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _check(
            "min_tokens",
            self.min_tokens,
            0 <= self.min_tokens <= self.max_tokens,
            f"from 0 to max_tokens ({self.max_tokens})",
        )
        # These must fit into an engine's tensors.
        for name in ("max_tokens", "top_k"):
            value = getattr(self, name)
            _check(name, value, value <= INT32_MAX, f"at most {INT32_MAX}")
        _check_range("temperature", self.temperature, 0.0, 1e6)
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        _check("top_k", self.top_k, self.top_k >= -1, "-1 or 0 (all), or at least 1")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check(
            "seed",
            self.seed,
            self.seed is None or -(2**63) <= self.seed <= UINT64_MAX,
            "a 64-bit integer",
        )
        _check_range("n", self.n, 1, MAX_SAMPLES)
        if self.best_of is not None:
            _check_range("best_of", self.best_of, self.n, MAX_SAMPLES)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check(
            "repetition_penalty",
            self.repetition_penalty,
            0.0 < self.repetition_penalty <= 1e6,
            "above 0 and at most 1e6",
        )
        for token_id, bias in self.logit_bias.items():
            _check_range(f"logit_bias of token {token_id}", bias, -100.0, 100.0)
        _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_lists(self)
        _check_range("priority", self.priority, -INT32_MAX, INT32_MAX)
        _check_range("deadline_ms", self.deadline_ms, 1, INT32_MAX)
        _check_ttl("cache_ttl_s", self.cache_ttl_s)
        if isinstance(self.cache_priority, tuple):
            _check_cache_ranges(self.cache_priority)
        else:
            _check_range("cache_priority", self.cache_priority, 0, MAX_CACHE_PRIORITY)
        if self.cache_ttl_s is not None and self.cache_priority is None:
            raise InvalidRequestError(
                f"cache_ttl_s = {shown(self.cache_ttl_s)} has no effect without a cache_priority"
            )

    @property
    def num_samples(self) -> int:
        """Samples that are generated."""
        return self.n if self.best_of is None else self.best_of


def _check(name: str, value: object, ok: bool, accepted: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{name} must be {accepted}, but is {shown(value)}")


def _check_size(name: str, num: int, most: int, what: str) -> None:
    if num > most:
        raise InvalidRequestError(f"{name} must have at most {most} {what}, but has {num}")


def _check_lists(params: SamplingParams) -> None:
    """Check the sizes of texts and lists, and that none is empty that must not be."""
    for name, most in MAX_ENTRIES.items():
        _check_size(name, len(getattr(params, name) or ()), most, "entries")
    for name, most in MAX_CHARACTERS.items():
        value = getattr(params, name)
        num = len(value) if isinstance(value, str) else sum(map(len, value))
        _check_size(name, num, most, "characters")
    _check("stop", params.stop, all(params.stop), "a string or a list of non-empty strings")
    _check("bad_words", params.bad_words, all(params.bad_words), "a list of non-empty strings")
    allowed = params.allowed_token_ids
    _check(
        "allowed_token_ids",
        allowed,
        allowed is None or bool(allowed),
        "a list of at least one token id, or be left out",
    )


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    _check(name, value, math.isfinite(value) and low <= value <= high, f"from {low} to {high}")


def _check_ttl(name: str, value: float | None) -> None:
    ok = value is None or 0.0 < value <= MAX_TTL_S
    _check(name, value, ok, f"above 0 and at most {MAX_TTL_S:.0f}")


def _check_cache_ranges(ranges: tuple[CacheRange, ...]) -> None:
    _check_size("cache_priority", len(ranges), MAX_CACHE_RANGES, "ranges")
    end: int | None = 0
    for one in sorted(ranges, key=lambda one: one.start):
        _check_range("start of cache_priority", one.start, 0, INT32_MAX)
        _check(
            "end of cache_priority",
            one.end,
            one.end is None or one.start < one.end <= INT32_MAX,
            f"above start ({one.start}) and at most {INT32_MAX}",
        )
        _check_range("priority of cache_priority", one.priority, 0, MAX_CACHE_PRIORITY)
        _check_ttl("ttl_s of cache_priority", one.ttl_s)
        is_apart = end is not None and end <= one.start
        reaches = "has no end" if end is None else f"ends at {end}"
        _check(
            "start of cache_priority",
            one.start,
            is_apart,
            f"behind the range before it, which {reaches}",
        )
        end = one.end


def _cache_priority(value: Any) -> int | tuple[CacheRange, ...]:
    if isinstance(value, list | tuple):
        return tuple(map(_cache_range, value))
    priority: int = KINDS[int].read(value)
    return priority


def _cache_range(value: Any) -> CacheRange:
    if isinstance(value, CacheRange):
        return value
    names = CacheRange.__struct_fields__
    is_range = isinstance(value, dict) and value.keys() <= {*names} and "priority" in value
    accepted = f"a CacheRange or a dict with {', '.join(names)}, of which priority must be there"
    _check("each range of cache_priority", value, is_range, accepted)
    return CacheRange(**value)


_FIELDS = fields_of(
    SamplingParams,
    {
        **KINDS,
        int | tuple[CacheRange, ...]: Kind("an integer, a list of ranges", _cache_priority),
    },
)
