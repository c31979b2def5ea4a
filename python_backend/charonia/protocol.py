"""The messages between the planes: what the scheduler plans and what the engine answers.

Owns the types that cross a process boundary, their binary form (MessagePack), and the two
protocols, `Executor` and `Pending`, behind which any engine stands. Must not know how a plan is
made or executed.

Time of one step, seen from the scheduler's process::

    plan() ──► Executor.submit(plan) ──► Pending.result(timeout) ──► apply(result)
                     │      (text of the step before is decoded here)     ▲
                     └────────────── engine: check, compute, sample ──────┘

Both sides keep the same cursor per row. A plan carries *diffs* against what the engine already
holds, so (epoch, step_id) must be the successor of the last one executed; anything else is
refused. A plan with `reset` opens a new epoch: the engine forgets all rows and all KV.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec

from charonia.errors import InvalidRequestError, NotSupportedError, shown

FinishReason = Literal["stop", "length"]
UINT64_MAX = 2**64 - 1
INT32_MAX = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request wants its tokens chosen and when to stop. Names and defaults are vLLM's.

    Attributes:
        max_tokens: tokens to generate at most, >= 1; cut to what fits in `max_model_len`.
        min_tokens: EOS, stop tokens and stop strings are held off before this many tokens.
        temperature: 0 is greedy.
        top_p: smallest set of tokens with this probability mass, in (0, 1].
        top_k: this many most likely tokens; 0 or -1 is all.
        min_p: tokens at least this fraction as likely as the most likely one, in [0, 1].
        seed: of the stateless noise; None takes a random one at admission.
        n: sequences per request; only 1 so far. best_of: accepted where it equals n.
        stop: strings that end the text; stop_token_ids: tokens that end it. These and the next
            ones have at most as many entries and characters as `MAX_ENTRIES`, `MAX_CHARACTERS`.
        include_stop_str_in_output: keep the stop string at the end of the text.
        bad_words: strings that must not be generated.
        ignore_eos: go on after the end-of-sequence token.
        skip_special_tokens: leave special tokens out of the text.
        presence_penalty, frequency_penalty: subtracted from logits of generated tokens, [-2, 2].
        repetition_penalty: divides positive, multiplies negative logits of tokens seen in prompt
            or output, > 0.
        logit_bias: added to the logits of these token ids, each in [-100, 100].
        logprobs: this many most likely tokens per generated token, with their raw
            log-probabilities (before temperature and penalties); 0 is the sampled token alone.
        prompt_logprobs: the same for the prompt's tokens; such a request takes no cache hits.
        priority: smaller is sooner, where the scheduling policy asks for it. deadline_ms: total
            time the request may take.
        tenant: whose request this is; caches are isolated by tenant and cache_salt.
        cache_salt: isolates the prefix cache further. speculation: False turns drafts off.
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

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            InvalidRequestError: a value is out of range; the text names it and the range.
            NotSupportedError: `n` other than 1.
        """
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _check(
            "min_tokens",
            self.min_tokens,
            0 <= self.min_tokens <= self.max_tokens,
            f"from 0 to max_tokens ({self.max_tokens})",
        )
        # They must fit into an engine's tensors.
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
        _check("n", self.n, self.n >= 1, "at least 1")
        if self.n != 1:
            raise NotSupportedError(f"n = {self.n} is not supported yet; use n = 1")
        if self.best_of not in (None, self.n):
            raise NotSupportedError(
                f"best_of = {self.best_of} is not supported; leave it out or use n ({self.n})"
            )
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
        for name, most in MAX_ENTRIES.items():
            _check_size(name, len(getattr(self, name)), most, "entries")
        for name, most in MAX_CHARACTERS.items():
            value = getattr(self, name)
            num = len(value) if isinstance(value, str) else sum(map(len, value))
            _check_size(name, num, most, "characters")
        _check("stop", self.stop, all(self.stop), "a string or a list of non-empty strings")
        _check("bad_words", self.bad_words, all(self.bad_words), "a list of non-empty strings")
        _check_range("priority", self.priority, -INT32_MAX, INT32_MAX)
        _check(
            "deadline_ms",
            self.deadline_ms,
            self.deadline_ms is None or 1 <= self.deadline_ms <= 2**31,
            "from 1 to 2147483648",
        )


MAX_LOGPROBS = 20
MAX_ENTRIES = {"stop": 64, "stop_token_ids": 1024, "bad_words": 256, "logit_bias": 4096}
MAX_CHARACTERS = {"stop": 8192, "bad_words": 8192, "tenant": 256, "cache_salt": 256}


def _check(name: str, value: object, ok: bool, accepted: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{name} must be {accepted}, but is {shown(value)}")


def _check_size(name: str, num: int, most: int, what: str) -> None:
    if num > most:
        raise InvalidRequestError(f"{name} must have at most {most} {what}, but has {num}")


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    _check(name, value, math.isfinite(value) and low <= value <= high, f"from {low} to {high}")


class RowSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, weakref=True):
    """What the engine needs of a request's SamplingParams: everything is token ids by now.

    Attributes:
        seed: 64-bit seed of the noise, 0 .. 2**64 - 1.
        top_k: 0 is all.
        bad_words_ids: token id sequences whose last token must not follow the ones before it.
        min_tokens: while fewer tokens are generated, `stop_ids` cannot be sampled.
        num_logprobs, num_prompt_logprobs: -1 none, 0 the token itself, k also the top k.
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    bad_words_ids: list[list[int]] = []
    min_tokens: int = 0
    stop_ids: list[int] = []
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1


class NewRow(msgspec.Struct, frozen=True):
    """A request that joins a row of the engine, for the first time or after a preemption.

    Attributes:
        row: 0 .. max_num_seqs - 1, free until now.
        token_ids: all its tokens so far, prompt and generated.
        num_prompt: how many of them are the prompt.
        num_computed: how many have their KV in `block_ids` already (prefix hits).
        block_ids: its blocks so far; position p lives in block_ids[p // block_size].
        num_draft_computed: how many have the draft model's KV in them, too.
    """

    row: int
    token_ids: list[int]
    num_prompt: int
    num_computed: int
    block_ids: list[int]
    sampling: RowSampling
    num_draft_computed: int = 0


class RowStep(msgspec.Struct, frozen=True, array_like=True):
    """What one row computes in this step: the next `num_tokens` known tokens after its cursor.

    A row whose cursor reaches its last known token samples the next one, appends it, and reports
    it. With drafts it does so several times: they are computed in the same pass, and as long as
    the sampled token is the draft at its place, the token sampled behind that draft counts too::

        known tokens ......... t │ d1   d2   d3      num_drafts = 3
          num_tokens ──────────┘ │  │    │    │
        sampled                 d1  d2   x    ·      2 accepted; the run is d1 d2 x

    The cursor then stands behind the last accepted draft.

    Attributes:
        new_block_ids: appended to the row's block table first; it must hold the drafts too.
        num_drafts: how many, >= 0; any only where `num_tokens` reaches the last known token.
        draft_ids: the drafts; empty where the engine's draft model is to guess them.
        num_draft_tokens: known tokens that the draft model computes first, after its own cursor;
            they reach the last known token where it is to guess.
    """

    row: int
    num_tokens: int
    new_block_ids: list[int] = []
    num_drafts: int = 0
    draft_ids: list[int] = []
    num_draft_tokens: int = 0


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Asks an engine for its EngineInfo."""


class StepPlan(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One step. The engine first drops `leaves`, then adds `joins`, then computes `rows`.

    `step_id` counts from 0 in each epoch; step 0 has `reset` set and only it has.
    """

    epoch: int
    step_id: int
    reset: bool = False
    leaves: list[int] = []
    joins: list[NewRow] = []
    rows: list[RowStep] = []


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Raw log-probabilities at one position.

    Attributes:
        token_ids: the sampled (or prompt) token first, then the most likely ones, best first.
        logprobs: of each of `token_ids`.
        rank: of the first token, 1 is the most likely. The others have ranks 1, 2, …
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """The run of tokens that a row committed in this step: its accepted drafts and one more.

    It is empty while the row's known tokens are not all computed.

    Attributes:
        logprobs: one entry per token of `token_ids`, or None when not asked for.
        prompt_logprobs: one entry per prompt token *predicted* in this step, in order: the
            step that computes prompt positions a .. b-1 reports tokens a+1 .. min(b, num_prompt-1).
    """

    row: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


Collectives = dict[str, tuple[int, int, float]]
"""Collective operations of one rank by name: how many, of how many bytes, in how many seconds."""


class StepResult(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a step committed.

    Attributes:
        rows: of each row of the plan, in the plan's order.
        seconds: what it took inside the engine. draft_seconds: the draft model's part of that.
        collectives: what its ranks exchanged since the step before; None where there is one.
    """

    epoch: int
    step_id: int
    rows: list[RowResult]
    seconds: float
    draft_seconds: float = 0.0
    collectives: Collectives | None = None


class StepFailure(msgspec.Struct, frozen=True, tag=True):
    """A step raised and the engine lives; it waits for a plan with `reset`."""

    message: str


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """The engine is being unloaded; nothing follows. Said unasked, or instead of an answer."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a rank's KV cache; `bytes_per_block` counts K and V of all its layers.

    Where an engine has several ranks, what it tells of is rank 0's part: its layers and heads.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    bytes_per_block: int


class EngineInfo(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What the scheduler must know of an engine.

    Attributes:
        epoch: of the last plan executed, 0 when fresh. pids: of all its processes.
        num_blocks: with the null block 0, which is never handed out.
        max_model_len: tokens of prompt and output together.
        eos_token_ids: as the checkpoint's configuration says.
        max_draft_len: tokens that the draft model can look back on; 0 where there is none.
        num_stages: of its pipeline, each of which can compute another step, of other rows.
    """

    epoch: int
    pids: list[int]
    num_blocks: int
    kv: KVLayout
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_ids: list[int]
    architecture: str
    dtype: str
    device: str
    num_parameters: int
    max_draft_len: int = 0
    num_stages: int = 1


EngineRequest = Hello | StepPlan
EngineReply = EngineInfo | StepResult | StepFailure | Farewell

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(EngineRequest)
_reply_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(EngineReply)


def encode(message: EngineRequest | EngineReply) -> bytes:
    """Encode a message as MessagePack."""
    return _encoder.encode(message)


def decode_request(data: bytes | memoryview) -> EngineRequest:
    """Decode what the scheduler sent.

    Raises:
        msgspec.DecodeError: not MessagePack, or not of the message's types.
    """
    request: EngineRequest = _decode(_request_decoder, data)
    return request


def decode_reply(data: bytes | memoryview) -> EngineReply:
    """Decode what the engine answered.

    Raises:
        msgspec.DecodeError: not MessagePack, or not of the message's types.
    """
    reply: EngineReply = _decode(_reply_decoder, data)
    return reply


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview) -> Any:
    try:
        return decoder.decode(data)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
    except UnicodeDecodeError as error:  # which msgspec lets through
        raise msgspec.DecodeError(f"it is not UTF-8: {error.reason}") from None


class Pending(Protocol):
    """A step under way."""

    def result(self, timeout: float | None) -> StepResult:
        """Wait for the step, at most `timeout` seconds; it may be asked again.

        Raises:
            StepFailedError: the step raised, or the plan was refused; the engine lives.
            EngineDiedError: the engine is gone or does not answer.
            TimeoutError: still under way after `timeout`.
        """
        ...


class Opening(Protocol):
    """An engine that is being looked for or loaded."""

    @property
    def is_done(self) -> bool:
        """Whether it is known what came of it."""
        ...

    def result(self) -> EngineInfo:
        """What the engine is, once this is done.

        Raises:
            EngineDiedError: there is none, or it cannot be loaded; the text says why.
            EngineUnloadedError: none is to be there.
            ServerStoppingError: nor will there be one, as the server is shutting down.
        """
        ...


class Executor(Protocol):
    """Any engine, as the scheduler's side sees it."""

    def open(self, *, replace: bool, on_done: Callable[[], None]) -> Opening:
        """Begin to look for the engine, or to load one. One at a time; no step is in flight.

        Args:
            replace: kill what is left of the engine and load a fresh one, instead of asking the
                one that is there what it is.
            on_done: called at the end, from any thread, unless it is done when this returns.
        """
        ...

    def submit(self, plan: StepPlan) -> Pending:
        """Start a step, behind those under way: at most one for each stage, and one more.

        Steps run in this order, and their results are asked for in it. When one fails, those
        behind it are given up: nobody asks for their results.
        """
        ...

    def check(self) -> None:
        """Say whether an engine that has nothing to do is well; waits for nothing.

        Raises:
            EngineDiedError: it has gone, or does not answer; EngineUnloadedError: on purpose.
            ServerStoppingError: the server is shutting down.
        """
        ...

    def close(self) -> None:
        """Let go of the engine."""
        ...
