"""The messages between scheduler and engine, and what a request asks for.

Timeline of one step, in the scheduler's process::

    plan() ──► Executor.submit(plan) ──► Pending.result(timeout) ──► apply(result)
                     │      (text of the step before is decoded here)     ▲
                     └────────────── engine: check, compute, sample ──────┘

Both sides keep the same cursor per row. A plan carries *diffs* against what the engine already
holds, so (epoch, step_id) must be the successor of the last one executed; anything else is
refused. A plan with `reset` opens a new epoch: the engine forgets all rows and all KV.

Knows nothing about how a plan is made or executed.
"""

from charonia.protocol.executor import (
    Executor,
    Opening,
    Pending,
)
from charonia.protocol.messages import (
    KEY_BYTES,
    BlockCopy,
    BlockLoad,
    BlockSave,
    Collectives,
    EngineInfo,
    EngineReply,
    EngineRequest,
    FinishReason,
    Hello,
    KeptBlocks,
    KVLayout,
    MemoryReport,
    NewRow,
    RowResult,
    RowSampling,
    RowStep,
    ShutdownNotice,
    SlotContent,
    StepFailure,
    StepPlan,
    StepResult,
    TierInfo,
    TokenLogprobs,
    decode_reply,
    decode_request,
    encode,
)
from charonia.protocol.sampling_params import (
    DEFAULT_CACHE_PRIORITY,
    INT32_MAX,
    MAX_CACHE_RANGES,
    MAX_CHARACTERS,
    MAX_ENTRIES,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    UINT64_MAX,
    WITHOUT_BEAM_SEARCH,
    CacheRange,
    SamplingParams,
    check_no_beam_search,
)

__all__ = [
    "DEFAULT_CACHE_PRIORITY",
    "INT32_MAX",
    "KEY_BYTES",
    "MAX_CACHE_RANGES",
    "MAX_CHARACTERS",
    "MAX_ENTRIES",
    "MAX_LOGPROBS",
    "MAX_SAMPLES",
    "UINT64_MAX",
    "WITHOUT_BEAM_SEARCH",
    "BlockCopy",
    "BlockLoad",
    "BlockSave",
    "CacheRange",
    "Collectives",
    "EngineInfo",
    "EngineReply",
    "EngineRequest",
    "Executor",
    "FinishReason",
    "Hello",
    "KVLayout",
    "KeptBlocks",
    "MemoryReport",
    "NewRow",
    "Opening",
    "Pending",
    "RowResult",
    "RowSampling",
    "RowStep",
    "SamplingParams",
    "ShutdownNotice",
    "SlotContent",
    "StepFailure",
    "StepPlan",
    "StepResult",
    "TierInfo",
    "TokenLogprobs",
    "check_no_beam_search",
    "decode_reply",
    "decode_request",
    "encode",
]
