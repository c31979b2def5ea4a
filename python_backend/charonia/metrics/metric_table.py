"""The table of metrics: name, kind, meaning, labels and buckets of every family.

Owns what Prometheus is told of a family. Must not know its values (`metrics`), nor how a page is
made.

To add a metric: add a `Metric` to `METRICS` and a call that counts it (`Metrics.count` or
`Metrics.observe_request`, or a gauge in `Metrics.show_scheduler`), and run `make interface` for the
table of model_repository/README.md. The page then shows it. The gateway's metrics are in
`gateway/observing.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from charonia.errors import KINDS, UnavailableError

Kind = Literal["counter", "gauge", "histogram"]
Place = Literal["triton", "page"]

PHASES = ("deliver", "transit", "apply", "draft", "verify")
"""Phases of a step, beside `charonia_plan_seconds` and the engine's `charonia_step_seconds`.

deliver: text and chunks of the step before; the engine computes meanwhile.
transit: from sending the plan until its result is here, less the engine's own time.
apply: committing the result.
draft, verify: of steps with drafts, in the draft model and in the rest of the engine."""

FAILURES = ("step_failed", "died", "hung", "load_failed")
"""Failures of the engine, each counted once.

step_failed: a step raised, and the engine lives. died: its process ended or hung up.
hung: it lives, but a step passed its deadline or a question was not answered.
load_failed: it cannot be loaded, or not in time; counted at every try."""

ENGINE_STATES = (
    "starting",
    "serving",
    "checking",
    "replacing",
    "down",
    "reloading",
    "restoring",
    "unloaded",
    "missed",
    "stopped",
)
"""States of the engine, those of `core/replica/transitions.py`; steps run in `serving` only."""

CACHED = ("exact", "joined", "semantic")
"""How a request is answered without being computed, as in `cached` of its timing."""

ENDS = ("stop", "length", *KINDS)
"""How an accepted request ends: a finish reason, or the kind of its error."""

OPERATIONS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter")
"""Collective operations of ranks."""

UNAVAILABLE = tuple(kind for kind, error in KINDS.items() if issubclass(error, UnavailableError))
"""Why a valid request is refused."""

OTHERS = "other"
"""Stands for all tenants that have no name in metrics."""

_PLAN_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_REQUEST_SECONDS = (*_STEP_SECONDS, 30.0, 60.0, 120.0)
# With the thresholds of docker/prometheus/alerts.yml: a quantile is exact only at a bound.
_FIRST_TOKEN_SECONDS = tuple(sorted((*_REQUEST_SECONDS, 2.0)))
_INTER_TOKEN_SECONDS = tuple(sorted((*_STEP_SECONDS, 0.2)))
_TOKENS = tuple(float(2**power) for power in range(18))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One family. Its series have the labels `model` and `version`, and at most one more.

    Series under vLLM's names also have `model_name` and `engine`, see `labels_of`.

    Attributes:
        help: its meaning, in one sentence.
        label: the further label, "" if there is none. values: those of its values that are known
            beforehand; a counter shows them from the start.
        buckets: upper bounds of a histogram's buckets, ascending; +Inf is added.
        place: "triton" is on Triton's own page. "page" is only on the page of `charonia serve` and
            `charonia metrics`: observations per token or step, which are too frequent for Triton's
            metrics, and the page's own state.
        shows: name of the counter, gauge, histogram or observations whose values it shows; "" is
            its own name. A counter without a label shows the sum of all labels of that.
        info: further labels of a gauge that is always 1, and says something by them.
    """

    name: str
    kind: Kind
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    place: Place = "triton"
    shows: str = ""
    info: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """Name of its values in `Metrics`."""
        return self.shows or self.name


SCHEDULER_UP = Metric(
    name="charonia_scheduler_up",
    kind="gauge",
    help="Whether the scheduler has answered this scrape. If 0, its own histograms are missing, "
    "and the rest may be out of date.",
    place="page",
)
KV_BLOCKS = Metric(
    name="charonia_kv_blocks",
    kind="gauge",
    help="Blocks of the KV cache by state. Blocks of live requests are used; for blocks set "
    "aside there is no memory at the moment.",
    label="state",
    values=("total", "used", "cached", "free", "aside"),
)
TIER_BLOCKS = Metric(
    name="charonia_kv_tier_blocks",
    kind="gauge",
    help="Blocks in the tiers below the KV cache.",
    label="tier",
    values=("host", "file"),
)
REQUESTS_RUNNING = Metric(
    name="charonia_requests_running",
    kind="gauge",
    help="Requests that have a row of the engine.",
)
REQUESTS_WAITING = Metric(
    name="charonia_requests_waiting",
    kind="gauge",
    help="Requests that wait for a row or for an engine.",
)
ENGINE_STATE = Metric(
    name="charonia_engine_state",
    kind="gauge",
    help="Whether this is the engine's present state.",
    label="state",
    values=ENGINE_STATES,
)
MAX_ROWS = Metric(
    name="charonia_max_rows",
    kind="gauge",
    help="Maximum of concurrent requests, as set or as chosen by max_num_seqs auto.",
)
TRITON_BLOCKS = Metric(
    name="nv_trt_llm_kv_cache_block_metrics",
    kind="gauge",
    help="Blocks of the KV cache, tokens per block, and the share in use, by TensorRT-LLM's words.",
    label="kv_cache_block_type",
    values=("max", "free", "used", "tokens_per", "fraction"),
)
TRITON_REQUESTS = Metric(
    name="nv_trt_llm_request_metrics",
    kind="gauge",
    help="Requests by TensorRT-LLM's words: active ones run or wait, scheduled ones have a row.",
    label="request_type",
    values=("active", "scheduled", "waiting", "max"),
)

METRICS = (
    SCHEDULER_UP,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    Metric(
        name="charonia_queue_seconds",
        kind="histogram",
        help="Time from a request's arrival to its first step, or to its end if it had none.",
        buckets=_REQUEST_SECONDS,
    ),
    Metric(
        name="charonia_time_to_first_token_seconds",
        kind="histogram",
        help="Time from a request's arrival to its first token.",
        buckets=_FIRST_TOKEN_SECONDS,
    ),
    Metric(
        name="charonia_inter_token_seconds",
        kind="histogram",
        help="Time per token after a request's first, one observation per token.",
        buckets=_INTER_TOKEN_SECONDS,
        place="page",
    ),
    Metric(
        name="charonia_request_seconds",
        kind="histogram",
        help="Time from a request's arrival to its end.",
        buckets=_REQUEST_SECONDS,
    ),
    Metric(
        name="charonia_prompt_tokens_total",
        kind="counter",
        help="Prompt tokens that were computed or found in the prefix cache.",
        label="source",
        values=("computed", "cached"),
    ),
    Metric(
        name="charonia_generation_tokens_total",
        kind="counter",
        help="Tokens generated for clients.",
    ),
    Metric(
        name="charonia_finished_total",
        kind="counter",
        help="Finished requests by finish reason or kind of error.",
        label="reason",
        values=ENDS,
    ),
    Metric(
        name="charonia_rejections_total",
        kind="counter",
        help="Requests refused before they were queued.",
        label="reason",
        values=("invalid", *UNAVAILABLE),
    ),
    Metric(
        name="charonia_cancellations_total",
        kind="counter",
        help="Requests whose client cancelled them or went away.",
    ),
    Metric(
        name="charonia_degradation_level",
        kind="gauge",
        help="Number of rungs of the degradation ladder in effect, 0 without pressure.",
    ),
    Metric(
        name="charonia_capped_requests_total",
        kind="counter",
        help="Low-priority requests whose max_tokens was lowered under pressure.",
    ),
    Metric(
        name="charonia_preemptions_total",
        kind="counter",
        help="Times that a running request gave up its blocks and was recomputed later.",
    ),
    Metric(
        name="charonia_kv_event_batches_dropped_total",
        kind="counter",
        help="Batches of KV events dropped because they came faster than they were sent.",
    ),
    Metric(
        name="charonia_kv_blocks_evicted_total",
        kind="counter",
        help="Blocks of the KV cache evicted for new content.",
    ),
    Metric(
        name="charonia_kv_blocks_saved_total",
        kind="counter",
        help="Blocks saved to lower tiers, once for each tier.",
    ),
    Metric(
        name="charonia_kv_blocks_loaded_total",
        kind="counter",
        help="Blocks loaded from lower tiers.",
    ),
    Metric(
        name="charonia_kv_loads_failed_total",
        kind="counter",
        help="Blocks that were lost or damaged in a lower tier, and were computed instead.",
    ),
    TIER_BLOCKS,
    Metric(
        name="charonia_prefix_waits_total",
        kind="counter",
        help="Requests that waited for a prefix that another one was computing.",
    ),
    Metric(
        name="charonia_prefix_cache_queried_tokens_total",
        kind="counter",
        help="Prompt tokens looked up in the prefix cache.",
    ),
    Metric(
        name="charonia_prefix_cache_hit_tokens_total",
        kind="counter",
        help="Prompt tokens found in the prefix cache.",
    ),
    Metric(
        name="charonia_answer_cache_hits_total",
        kind="counter",
        help="Requests answered by an earlier equal one (exact), an equal one that was running "
        "(joined), or an earlier similar one (semantic).",
        label="kind",
        values=CACHED,
    ),
    Metric(
        name="charonia_answer_cache_misses_total",
        kind="counter",
        help="Requests that were looked up in the answer cache and computed.",
    ),
    Metric(
        name="charonia_answer_cache_evicted_total",
        kind="counter",
        help="Answers evicted from the answer cache, for lack of bytes or because of their age.",
        label="why",
        values=("bytes", "age"),
    ),
    Metric(
        name="charonia_answer_cache_answers",
        kind="gauge",
        help="Answers in the answer cache.",
    ),
    Metric(
        name="charonia_answer_cache_bytes",
        kind="gauge",
        help="Bytes of the answers in the answer cache.",
    ),
    KV_BLOCKS,
    Metric(
        name="charonia_kv_retained_blocks",
        kind="gauge",
        help="Blocks of the KV cache, used or cached, that are evicted after all others because of "
        "`cache_priority`.",
    ),
    Metric(
        name="charonia_step_seconds",
        kind="histogram",
        help="Time that the engine computed in a step.",
        buckets=_STEP_SECONDS,
        place="page",
    ),
    Metric(
        name="charonia_plan_seconds",
        kind="histogram",
        help="Time that the scheduler took to plan a step.",
        buckets=_PLAN_SECONDS,
        place="page",
    ),
    Metric(
        name="charonia_step_phase_seconds_total",
        kind="counter",
        help="Time of steps beside planning and computing, by phase.",
        label="phase",
        values=PHASES,
    ),
    Metric(
        name="charonia_draft_tokens_total",
        kind="counter",
        help="Tokens drafted by speculation.",
    ),
    Metric(
        name="charonia_accepted_tokens_total",
        kind="counter",
        help="Drafted tokens that were accepted.",
    ),
    Metric(
        name="charonia_draft_rounds_total",
        kind="counter",
        help="Steps of a request in which drafted tokens were verified.",
    ),
    Metric(
        name="charonia_drafted_at_position_total",
        kind="counter",
        help="Drafted tokens by their place in a run of drafts, from 0.",
        label="position",
    ),
    Metric(
        name="charonia_accepted_at_position_total",
        kind="counter",
        help="Accepted tokens by their place in a run of drafts, from 0.",
        label="position",
    ),
    Metric(
        name="charonia_draft_depth",
        kind="gauge",
        help="Drafted tokens per decoding request in the last step.",
    ),
    MAX_ROWS,
    Metric(
        name="charonia_max_step_tokens",
        kind="gauge",
        help="Maximum tokens of a step, as set or as chosen by max_num_batched_tokens auto.",
    ),
    Metric(
        name="charonia_engine_memory_bytes",
        kind="gauge",
        help="The first rank's memory at its start: in use with weights, for the largest step (0 "
        "is not measured), for the KV cache, and left.",
        label="part",
        values=("weights", "step", "kv_cache", "left"),
    ),
    Metric(
        name="charonia_engine_up",
        kind="gauge",
        help="Whether there is an engine that can run steps.",
    ),
    ENGINE_STATE,
    Metric(
        name="charonia_engine_restarts_total",
        kind="counter",
        help="Engines that replaced a lost one.",
    ),
    Metric(
        name="charonia_engine_reloads_total",
        kind="counter",
        help="Engines that replaced another one by an operator's order.",
    ),
    Metric(
        name="charonia_engine_failures_total",
        kind="counter",
        help="Failures of the engine by kind.",
        label="kind",
        values=FAILURES,
    ),
    Metric(
        name="charonia_recovery_seconds",
        kind="histogram",
        help="Time from noticing the loss of an engine until requests ran again.",
        buckets=_REQUEST_SECONDS,
    ),
    Metric(
        name="charonia_requests_recomputed_total",
        kind="counter",
        help="Live requests that continued on another engine.",
    ),
    Metric(
        name="charonia_requests_quarantined_total",
        kind="counter",
        help="Requests that failed alone because they stop the engine each time they run.",
    ),
    Metric(
        name="charonia_collective_calls_total",
        kind="counter",
        help="Collective operations of the engine's first rank, by operation.",
        label="operation",
        values=OPERATIONS,
    ),
    Metric(
        name="charonia_collective_bytes_total",
        kind="counter",
        help="Bytes that the engine's first rank gave to collective operations, by operation.",
        label="operation",
        values=OPERATIONS,
    ),
    Metric(
        name="charonia_collective_seconds_total",
        kind="counter",
        help="Time that the engine's first rank spent in collective operations, waiting included.",
        label="operation",
        values=OPERATIONS,
    ),
    Metric(
        name="charonia_tenant_requests_running",
        kind="gauge",
        help="Requests of a tenant that have had a step.",
        label="tenant",
        values=(OTHERS,),
    ),
    Metric(
        name="charonia_tenant_requests_waiting",
        kind="gauge",
        help="Requests of a tenant that wait for their first step.",
        label="tenant",
        values=(OTHERS,),
    ),
    Metric(
        name="charonia_tenant_requests_total",
        kind="counter",
        help="Finished requests of a tenant.",
        label="tenant",
        values=(OTHERS,),
    ),
    Metric(
        name="charonia_tenant_rejections_total",
        kind="counter",
        help="Requests of a tenant refused before they were queued, without invalid ones.",
        label="tenant",
        values=(OTHERS,),
    ),
    Metric(
        name="charonia_tenant_prompt_tokens_total",
        kind="counter",
        help="Prompt tokens of a tenant's answered requests.",
        label="tenant",
        values=(OTHERS,),
    ),
    Metric(
        name="charonia_tenant_generation_tokens_total",
        kind="counter",
        help="Tokens generated for a tenant, including samples that best_of leaves out. What is "
        "computed for several requests counts once.",
        label="tenant",
        values=(OTHERS,),
    ),
    Metric(
        name="charonia_ttft_target_met_total",
        kind="counter",
        help="Requests whose first token came within the tenant's target.",
        label="tenant",
        values=(OTHERS,),
    ),
    Metric(
        name="charonia_ttft_target_missed_total",
        kind="counter",
        help="Requests whose first token came later than the tenant's target, or never. Refused "
        "ones count, unless the client or its tenant is the cause.",
        label="tenant",
        values=(OTHERS,),
    ),
    Metric(
        name="charonia_inter_token_target_met_total",
        kind="counter",
        help="Requests whose mean time between tokens met the tenant's target.",
        label="tenant",
        values=(OTHERS,),
    ),
    Metric(
        name="charonia_inter_token_target_missed_total",
        kind="counter",
        help="Requests whose mean time between tokens missed the tenant's target.",
        label="tenant",
        values=(OTHERS,),
    ),
    Metric(
        name="charonia_deadline_met_total",
        kind="counter",
        help="Requests with a deadline that were answered in time.",
        label="tenant",
        values=(OTHERS,),
    ),
    Metric(
        name="charonia_deadline_missed_total",
        kind="counter",
        help="Requests with a deadline that were not answered in time. Refused ones count, "
        "unless the client or its tenant is the cause.",
        label="tenant",
        values=(OTHERS,),
    ),
    TRITON_BLOCKS,
    TRITON_REQUESTS,
)

KV_USAGE = Metric(
    name="vllm:kv_cache_usage_perc",
    kind="gauge",
    help="Share of the KV cache's blocks that live requests use, from 0 to 1.",
)
CACHE_CONFIG = Metric(
    name="vllm:cache_config_info",
    kind="gauge",
    help="Always 1. Its labels say the tokens per block of the KV cache and its number of blocks.",
    place="page",
    info=("block_size", "num_gpu_blocks"),
)

VLLM_METRICS = (
    Metric(
        name="vllm:num_requests_running",
        kind="gauge",
        help="Requests that have a row of the engine.",
        shows=REQUESTS_RUNNING.name,
    ),
    Metric(
        name="vllm:num_requests_waiting",
        kind="gauge",
        help="Requests that wait for a row or for an engine.",
        shows=REQUESTS_WAITING.name,
    ),
    KV_USAGE,
    CACHE_CONFIG,
    Metric(
        name="vllm:num_preemptions_total",
        kind="counter",
        help="Times that a running request gave up its blocks and was recomputed later.",
        shows="charonia_preemptions_total",
    ),
    Metric(
        name="vllm:prefix_cache_queries_total",
        kind="counter",
        help="Prompt tokens looked up in the prefix cache.",
        shows="charonia_prefix_cache_queried_tokens_total",
    ),
    Metric(
        name="vllm:prefix_cache_hits_total",
        kind="counter",
        help="Prompt tokens found in the prefix cache.",
        shows="charonia_prefix_cache_hit_tokens_total",
    ),
    Metric(
        name="vllm:request_success_total",
        kind="counter",
        help="Answered requests by finish reason.",
        label="finished_reason",
        values=("stop", "length"),
        shows="charonia_finished_total",
    ),
    Metric(
        name="vllm:spec_decode_num_drafts_total",
        kind="counter",
        help="Steps of a request in which drafted tokens were verified.",
        shows="charonia_draft_rounds_total",
    ),
    Metric(
        name="vllm:spec_decode_num_draft_tokens_total",
        kind="counter",
        help="Tokens drafted by speculation.",
        shows="charonia_draft_tokens_total",
    ),
    Metric(
        name="vllm:spec_decode_num_accepted_tokens_total",
        kind="counter",
        help="Drafted tokens that were accepted.",
        shows="charonia_accepted_tokens_total",
    ),
    Metric(
        name="vllm:request_queue_time_seconds",
        kind="histogram",
        help="Time from a request's arrival to its first step, or to its end if it had none.",
        buckets=_REQUEST_SECONDS,
        shows="charonia_queue_seconds",
    ),
    Metric(
        name="vllm:prompt_tokens_total",
        kind="counter",
        help="Tokens of prompts.",
        shows="charonia_prompt_tokens_total",
    ),
    Metric(
        name="vllm:generation_tokens_total",
        kind="counter",
        help="Tokens generated for clients.",
        shows="charonia_generation_tokens_total",
    ),
    Metric(
        name="vllm:time_to_first_token_seconds",
        kind="histogram",
        help="Time from a request's arrival to its first token.",
        buckets=_FIRST_TOKEN_SECONDS,
        shows="charonia_time_to_first_token_seconds",
    ),
    Metric(
        name="vllm:inter_token_latency_seconds",
        kind="histogram",
        help="Time per token after a request's first, one observation per token.",
        buckets=_INTER_TOKEN_SECONDS,
        place="page",
        shows="charonia_inter_token_seconds",
    ),
    Metric(
        name="vllm:time_per_output_token_seconds",
        kind="histogram",
        help="The same by the name that vLLM gave up.",
        buckets=_INTER_TOKEN_SECONDS,
        place="page",
        shows="charonia_inter_token_seconds",
    ),
    Metric(
        name="vllm:e2e_request_latency_seconds",
        kind="histogram",
        help="Time from a request's arrival to its end.",
        buckets=_REQUEST_SECONDS,
        shows="charonia_request_seconds",
    ),
    Metric(
        name="vllm:request_prompt_tokens",
        kind="histogram",
        help="Tokens of a request's prompt.",
        buckets=_TOKENS,
        shows="request_prompt_tokens",
    ),
    Metric(
        name="vllm:request_generation_tokens",
        kind="histogram",
        help="Tokens generated for a request.",
        buckets=_TOKENS,
        shows="request_generation_tokens",
    ),
    Metric(
        name="vllm:request_params_n",
        kind="histogram",
        help="Completions requested by a request, which is always one.",
        buckets=_COUNTS,
        shows="request_params_n",
    ),
)
"""Metrics under vLLM's names, with the scheduler's REPORT_CUSTOM_METRICS."""

BY_NAME = {metric.name: metric for metric in (*METRICS, *VLLM_METRICS)}


def labels_of(metric: Metric, labels: Mapping[str, str]) -> dict[str, str]:
    """The labels that all series of a metric have.

    vLLM's dashboards select by the name of the model and the number of its engine, so series under
    vLLM's names have these, too. There is one engine, number 0.

    Args:
        labels: `model`, the name of the scheduler's model, and `version`.
    """
    if not metric.name.startswith("vllm:"):
        return dict(labels)
    return {**labels, "model_name": labels["model"], "engine": "0"}
