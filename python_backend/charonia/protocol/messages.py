"""The messages between the planes, and their binary form (MessagePack).

Owns the types that cross a process boundary. Knows nothing about how a plan is made or executed.
"""

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled"]
KEY_BYTES = 16
"""Length of the key of a block's content: a hash of all tokens up to its end."""


class RowSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, weakref=True):
    """Part of a request's SamplingParams that the engine needs, with all texts as token ids.

    Attributes:
        seed: 64-bit seed of the noise, 0 .. 2**64 - 1.
        top_k: 0 is all.
        bad_words_ids: token id sequences whose last token must not follow the ones before it.
        allowed_ids: only these token ids can be sampled; () allows all.
        min_tokens: `stop_ids` cannot be sampled before this many tokens are generated.
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
    allowed_ids: tuple[int, ...] = ()
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
        num_computed: how many already have their KV in `block_ids` (prefix hits).
        block_ids: its block table; position p is in block_ids[p // block_size].
        num_draft_computed: how many also have the draft model's KV there.
    """

    row: int
    token_ids: list[int]
    num_prompt: int
    num_computed: int
    block_ids: list[int]
    sampling: RowSampling
    num_draft_computed: int = 0


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy a block to another one: K and V of all layers and models."""

    source: int
    target: int


class BlockSave(msgspec.Struct, frozen=True, array_like=True):
    """Copy a block to a slot of a slower tier, over what is there.

    Attributes:
        tier: its index in `KeptBlocks.tiers`. slot: 0 .. num_slots - 1.
        key: key of the content, `KEY_BYTES` long.
        has_draft: whether the draft model's KV is part of the content.
    """

    block_id: int
    tier: int
    slot: int
    key: bytes
    has_draft: bool


class BlockLoad(msgspec.Struct, frozen=True, array_like=True):
    """Copy a slot of a slower tier to a block, if its content has this key."""

    tier: int
    slot: int
    block_id: int
    key: bytes


class RowStep(msgspec.Struct, frozen=True, array_like=True):
    """Work of one row in this step: the next `num_tokens` known tokens after its cursor.

    A row whose cursor reaches its last known token samples the next one, appends it, and reports
    it. With drafts it does so several times. The drafts are computed in the same pass. As long as
    the sampled token equals the draft at its position, the token sampled behind that draft counts
    too::

        known tokens ......... t │ d1   d2   d3      num_drafts = 3
          num_tokens ──────────┘ │  │    │    │
        sampled                 d1  d2   x    ·      2 accepted; the run is d1 d2 x

    The cursor then stands behind the last accepted draft.

    Attributes:
        new_block_ids: appended to the row's block table first; the table must hold the drafts too.
        num_drafts: number of drafts; must be 0 unless `num_tokens` reaches the last known token.
        draft_ids: the drafts; empty if the engine's draft model makes them.
        num_draft_tokens: known tokens that the draft model computes first, after its own cursor.
            They reach the last known token if it makes the drafts.
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
    """One step. The engine drops `leaves`, adds `joins`, and computes `rows`.

    Before that it performs `saves`, `loads` and `copies`, in this order, so the same plan may save
    a block and overwrite it. It may free the memory of `discards`: these blocks are in no block
    table, and their content is useless. After the step `num_blocks` are in use, with the null
    block; None is all. `step_id` counts from 0 in each epoch; step 0, and only it, has `reset` set.
    """

    epoch: int
    step_id: int
    reset: bool = False
    leaves: list[int] = []
    joins: list[NewRow] = []
    saves: list[BlockSave] = []
    loads: list[BlockLoad] = []
    discards: list[int] = []
    num_blocks: int | None = None
    copies: list[BlockCopy] = []
    rows: list[RowStep] = []


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Raw log-probabilities at one position.

    Attributes:
        token_ids: the sampled (or prompt) token first, then the most likely ones, best first.
        logprobs: one for each of `token_ids`.
        rank: rank of the first token; 1 is the most likely. The others have ranks 1, 2, …
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """The run of tokens that a row committed in this step: its accepted drafts and one more.

    It is empty until all known tokens of the row are computed.

    Attributes:
        logprobs: one entry per token of `token_ids`, or None if not requested.
        prompt_logprobs: one entry per prompt token *predicted* in this step, in order: the
            step that computes prompt positions a .. b-1 reports tokens a+1 .. min(b, num_prompt-1).
    """

    row: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


Collectives = dict[str, tuple[int, int, float]]
"""Collective operations of one rank by name: their number, bytes and seconds."""


class StepResult(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Results of a step.

    Attributes:
        rows: one result per row of the plan, in the plan's order.
        seconds: time inside the engine. draft_seconds: the draft model's part of it.
        collectives: exchanges of its ranks since the step before; None with a single rank.
        num_blocks: blocks for which there is memory now, with the null block; None is all.
        not_loaded: blocks that could not be loaded because the content was missing or damaged.
        not_saved: indexes of the plan's saves that failed; their slots are empty.
    """

    epoch: int
    step_id: int
    rows: list[RowResult]
    seconds: float
    draft_seconds: float = 0.0
    collectives: Collectives | None = None
    not_loaded: list[int] = []
    not_saved: list[int] = []
    num_blocks: int | None = None


class StepFailure(msgspec.Struct, frozen=True, tag=True):
    """A step raised, but the engine lives; it waits for a plan with `reset`."""

    message: str


class ShutdownNotice(msgspec.Struct, frozen=True, tag=True):
    """The engine is being unloaded; nothing follows. Sent unasked, or instead of an answer."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a rank's KV cache.

    `dtype` is the format of K and V: a float type of torch's, or int8, fp8 or int4 (see
    `data.ops.kv_format`). `bytes_per_block` counts K and V of all layers, with their scales.

    With several ranks it describes rank 0's part: its layers and heads.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    bytes_per_block: int


class SlotContent(msgspec.Struct, frozen=True, array_like=True):
    """Content of a slot of a tier; see `BlockSave`."""

    slot: int
    key: bytes
    has_draft: bool


class TierInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A slower tier of the KV cache, as an engine found or left it.

    Attributes:
        contents: in the order in which they were saved, as far as it is known.
    """

    name: Literal["host", "file"]
    num_slots: int
    contents: list[SlotContent]


class KeptBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that an engine keeps outside its KV cache, and for longer.

    Attributes:
        hash_secret: secret of the hash that made the contents' keys; new keys must use it too.
        slot_bytes: bytes that are moved per block, on the rank with the most.
        tiers: the faster ones first.
    """

    hash_secret: bytes
    slot_bytes: int
    tiers: list[TierInfo]


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Uses of an engine's memory, in bytes; that of rank 0 if there are several.

    Attributes:
        weights: memory in use once the weights were loaded.
        step: peak of the largest step beside that; None if the arguments fix the
            KV cache's size, so that no such step was run.
        kv_cache: the target's and the draft model's. On a CPU memory is taken as it is written to.
        left: memory for other processes once all of that is in use, by all ranks that share the
            machine's memory. total: all memory.
        source: limit of the memory: "machine", a control group, or a GPU.
    """

    weights: int
    step: int | None
    kv_cache: int
    left: int
    total: int
    source: str


class EngineInfo(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Description of an engine for the scheduler.

    Attributes:
        epoch: epoch of the last plan executed, 0 when fresh. pids: all its processes.
        num_blocks: with the null block 0, which is never handed out.
        max_model_len: tokens of prompt and output together.
        eos_token_ids: from the checkpoint's configuration.
        max_draft_len: longest context of the draft model, in tokens; 0 without a draft model.
        num_stages: stages of its pipeline; each can compute a different step, of other rows.
        kept: content of slower tiers now; None without tiers.
        checkpoint: digest of the checkpoints of the model and the draft model; "" if unknown.
        watches_memory: whether results say how many blocks there is memory for.
        memory: its uses; None if these have no meaning, as in a simulation.
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
    kept: KeptBlocks | None = None
    checkpoint: str = ""
    memory: MemoryReport | None = None
    watches_memory: bool = False


EngineRequest = Hello | StepPlan
EngineReply = EngineInfo | StepResult | StepFailure | ShutdownNotice

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(EngineRequest)
_reply_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(EngineReply)


def encode(message: EngineRequest | EngineReply) -> bytes:
    """Encode a message as MessagePack."""
    return _encoder.encode(message)


def decode_request(data: bytes | memoryview) -> EngineRequest:
    """Decode a message from the scheduler.

    Raises:
        msgspec.DecodeError: not MessagePack, or not of the message's types.
    """
    request: EngineRequest = _decode(_request_decoder, data)
    return request


def decode_reply(data: bytes | memoryview) -> EngineReply:
    """Decode a message from the engine.

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
    except UnicodeDecodeError as error:  # msgspec lets it through
        raise msgspec.DecodeError(f"it is not UTF-8: {error.reason}") from None
