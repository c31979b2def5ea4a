"""The table of metrics: name, kind, meaning, labels and buckets of every family.

Owns what Prometheus is told of a family. Must not know its values (`metrics`), nor how a page is
made.

To add a metric: add an entry to `METRICS` and a call that counts it (`Metrics.count` or
`Metrics.observe_request`, or a gauge in `Metrics.show_scheduler`), and run `make interface` for the
table of model_repository/README.md. The page then shows it. What the control plane counts is a
field of `SchedulerStats` (`control/state/stats.py`), which `Metrics.show_scheduler` shows. A
histogram of values per token or step has the place "page", and `Metrics.histograms[name].observe`
takes its values. A gauge without a unit is listed in `tests/metrics/test_metric_table.py`.
Panels are in `docker/grafana/panels.py`, and the gateway's metrics in `gateway/observing.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
"""Ways to answer a request without computing it, as in `cached` of its timing."""

ENDS = ("stop", "length", *KINDS)
"""End of an accepted request: a finish reason, or the kind of its error."""

OPERATIONS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter")
"""Collective operations of ranks."""

UNAVAILABLE = tuple(kind for kind, error in KINDS.items() if issubclass(error, UnavailableError))
"""Kinds of the errors that refuse a valid request."""

OLDEST = ("1", "2", "3", "4", "5")
"""Places of the live requests whose ages are shown, from the oldest on."""

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


@dataclass(frozen=True)
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
            its own name. A counter without a label shows the sum of the `values` of that.
        info: further labels of a gauge that is always 1, and says something by them.
        ours: what of ours answers a metric by another's name, in words; "" if it is `shows`.
    """

    kind: Kind
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    place: Place = "triton"
    shows: str = ""
    info: tuple[str, ...] = ()
    ours: str = ""

    @cached_property
    def bounds(self) -> tuple[str, ...]:
        """The buckets' labels `le`, ascending."""
        return (*(f"{bound:g}" for bound in self.buckets), "+Inf")


_counter = partial(Metric, "counter")
_gauge = partial(Metric, "gauge")
_of_tenants = partial(_counter, label="tenant", values=(OTHERS,))


def _histogram(
    help: str, buckets: tuple[float, ...], *, place: Place = "triton", shows: str = ""
) -> Metric:
    return Metric("histogram", help, buckets=buckets, place=place, shows=shows)


def _shown(name: str) -> Metric:
    """The same as one of ours, for another name."""
    return replace(METRICS[name], shows=name)


METRICS = {
    "charonia_scheduler_up": _gauge(
        "Whether the scheduler has answered this scrape. If 0, its own histograms are missing, "
        "and the rest may be out of date.",
        place="page",
    ),
    "charonia_requests_running": _gauge("Requests that have a row of the engine."),
    "charonia_requests_waiting": _gauge("Requests that wait for a row or for an engine."),
    "charonia_oldest_request_seconds": _gauge(
        "Ages of the five live requests that were admitted first, the oldest first; 0 for none.",
        "place",
        OLDEST,
    ),
    "charonia_queue_seconds": _histogram(
        "Time from a request's arrival to its first step, or to its end if it had none.",
        _REQUEST_SECONDS,
    ),
    "charonia_time_to_first_token_seconds": _histogram(
        "Time from a request's arrival to its first token.", _FIRST_TOKEN_SECONDS
    ),
    "charonia_inter_token_seconds": _histogram(
        "Time per token after a request's first, one observation per token.",
        _INTER_TOKEN_SECONDS,
        place="page",
    ),
    "charonia_request_seconds": _histogram(
        "Time from a request's arrival to its end.", _REQUEST_SECONDS
    ),
    "charonia_prompt_tokens_total": _counter(
        "Prompt tokens that were computed or found in the prefix cache.",
        "source",
        ("computed", "cached"),
    ),
    "charonia_generation_tokens_total": _counter("Tokens generated for clients."),
    "charonia_finished_total": _counter(
        "Finished requests by finish reason or kind of error.", "reason", ENDS
    ),
    "charonia_rejections_total": _counter(
        "Requests refused before they were queued.", "reason", ("invalid", *UNAVAILABLE)
    ),
    "charonia_cancellations_total": _counter("Requests whose client cancelled them or went away."),
    "charonia_degradation_level": _gauge(
        "Number of levels of the degradation ladder in effect, 0 without pressure."
    ),
    "charonia_capped_requests_total": _counter(
        "Low-priority requests whose max_tokens was lowered under pressure."
    ),
    "charonia_preemptions_total": _counter(
        "Times that a running request gave up its blocks and was recomputed later."
    ),
    "charonia_kv_event_batches_dropped_total": _counter(
        "Batches of KV events dropped because they came faster than they were sent."
    ),
    "charonia_kv_blocks_evicted_total": _counter("Blocks of the KV cache evicted for new content."),
    "charonia_kv_blocks_saved_total": _counter("Blocks saved to lower tiers, once for each tier."),
    "charonia_kv_blocks_loaded_total": _counter("Blocks loaded from lower tiers."),
    "charonia_kv_loads_failed_total": _counter(
        "Blocks that were lost or damaged in a lower tier, and were computed instead."
    ),
    "charonia_kv_tier_blocks": _gauge(
        "Blocks in the tiers below the KV cache.", "tier", ("host", "file")
    ),
    "charonia_prefix_waits_total": _counter(
        "Requests that waited for a prefix that another one was computing."
    ),
    "charonia_prefix_cache_queried_tokens_total": _counter(
        "Prompt tokens looked up in the prefix cache."
    ),
    "charonia_prefix_cache_hit_tokens_total": _counter("Prompt tokens found in the prefix cache."),
    "charonia_answer_cache_hits_total": _counter(
        "Requests answered by an earlier equal one (exact), an equal one that was running "
        "(joined), or an earlier similar one (semantic).",
        "kind",
        CACHED,
    ),
    "charonia_answer_cache_misses_total": _counter(
        "Requests that were looked up in the answer cache and computed."
    ),
    "charonia_answer_cache_evicted_total": _counter(
        "Answers evicted from the answer cache, for lack of bytes or because of their age.",
        "why",
        ("bytes", "age"),
    ),
    "charonia_answer_cache_answers": _gauge("Answers in the answer cache."),
    "charonia_answer_cache_bytes": _gauge("Bytes of the answers in the answer cache."),
    "charonia_kv_blocks": _gauge(
        "Blocks of the KV cache by state. Blocks of live requests are used; for blocks set "
        "aside there is no memory at the moment.",
        "state",
        ("total", "used", "cached", "free", "aside"),
    ),
    "charonia_kv_retained_blocks": _gauge(
        "Blocks of the KV cache, used or cached, that are evicted after all others because of "
        "`cache_priority`."
    ),
    "charonia_step_seconds": _histogram(
        "Time that the engine computed in a step.", _STEP_SECONDS, place="page"
    ),
    "charonia_plan_seconds": _histogram(
        "Time that the scheduler took to plan a step.", _PLAN_SECONDS, place="page"
    ),
    "charonia_step_phase_seconds_total": _counter(
        "Time of steps beside planning and computing, by phase.", "phase", PHASES
    ),
    "charonia_draft_tokens_total": _counter("Tokens drafted by speculation."),
    "charonia_accepted_tokens_total": _counter("Drafted tokens that were accepted."),
    "charonia_draft_rounds_total": _counter(
        "Steps of a request in which drafted tokens were verified."
    ),
    "charonia_drafted_at_position_total": _counter(
        "Drafted tokens by their place in a run of drafts, from 0.", "position"
    ),
    "charonia_accepted_at_position_total": _counter(
        "Accepted tokens by their place in a run of drafts, from 0.", "position"
    ),
    "charonia_draft_depth": _gauge("Drafted tokens per decoding request in the last step."),
    "charonia_max_rows": _gauge(
        "Maximum of concurrent requests, as set or as chosen by max_num_seqs auto."
    ),
    "charonia_max_step_tokens": _gauge(
        "Maximum tokens of a step, as set or as chosen by max_num_batched_tokens auto."
    ),
    "charonia_engine_memory_bytes": _gauge(
        "The first rank's memory at its start: in use with weights, for the largest step (0 is "
        "not measured), for the KV cache, and left.",
        "part",
        ("weights", "step", "kv_cache", "left"),
    ),
    "charonia_engine_up": _gauge("Whether there is an engine that can run steps."),
    "charonia_engine_state": _gauge(
        "Whether this is the engine's present state.", "state", ENGINE_STATES
    ),
    "charonia_engine_restarts_total": _counter("Engines that replaced a lost one."),
    "charonia_engine_reloads_total": _counter(
        "Engines that replaced another one by an operator's order."
    ),
    "charonia_engine_failures_total": _counter("Failures of the engine by kind.", "kind", FAILURES),
    "charonia_recovery_seconds": _histogram(
        "Time from noticing the loss of an engine until requests ran again.", _REQUEST_SECONDS
    ),
    "charonia_requests_recomputed_total": _counter(
        "Live requests that continued on another engine."
    ),
    "charonia_requests_quarantined_total": _counter(
        "Requests that failed alone because they stop the engine each time they run."
    ),
    "charonia_collective_calls_total": _counter(
        "Collective operations of the engine's first rank, by operation.", "operation", OPERATIONS
    ),
    "charonia_collective_bytes_total": _counter(
        "Bytes that the engine's first rank gave to collective operations, by operation.",
        "operation",
        OPERATIONS,
    ),
    "charonia_collective_seconds_total": _counter(
        "Time that the engine's first rank spent in collective operations, waiting included.",
        "operation",
        OPERATIONS,
    ),
    "charonia_tenant_requests_running": _gauge(
        "Requests of a tenant that have had a step.", "tenant", (OTHERS,)
    ),
    "charonia_tenant_requests_waiting": _gauge(
        "Requests of a tenant that wait for their first step.", "tenant", (OTHERS,)
    ),
    "charonia_tenant_requests_total": _of_tenants("Finished requests of a tenant."),
    "charonia_tenant_rejections_total": _of_tenants(
        "Requests of a tenant refused before they were queued, without invalid ones."
    ),
    "charonia_tenant_prompt_tokens_total": _of_tenants(
        "Prompt tokens of a tenant's answered requests."
    ),
    "charonia_tenant_generation_tokens_total": _of_tenants(
        "Tokens generated for a tenant, including samples that best_of leaves out. What is "
        "computed for several requests counts once."
    ),
    "charonia_ttft_target_met_total": _of_tenants(
        "Requests whose first token came within the tenant's target."
    ),
    "charonia_ttft_target_missed_total": _of_tenants(
        "Requests whose first token came later than the tenant's target, or never. Refused ones "
        "count, unless the client or its tenant is the cause."
    ),
    "charonia_inter_token_target_met_total": _of_tenants(
        "Requests whose mean time between tokens met the tenant's target."
    ),
    "charonia_inter_token_target_missed_total": _of_tenants(
        "Requests whose mean time between tokens missed the tenant's target."
    ),
    "charonia_deadline_met_total": _of_tenants(
        "Requests with a deadline that were answered in time."
    ),
    "charonia_deadline_missed_total": _of_tenants(
        "Requests with a deadline that were not answered in time. Refused ones count, unless "
        "the client or its tenant is the cause."
    ),
    "nv_trt_llm_kv_cache_block_metrics": _gauge(
        "Blocks of the KV cache, tokens per block, and the share in use, by TensorRT-LLM's words.",
        "kv_cache_block_type",
        ("max", "free", "used", "tokens_per", "fraction"),
    ),
    "nv_trt_llm_request_metrics": _gauge(
        "Requests by TensorRT-LLM's words: active ones run or wait, scheduled ones have a row.",
        "request_type",
        ("active", "scheduled", "waiting", "max"),
    ),
}
"""Metrics by name."""

VLLM_METRICS = {
    "vllm:num_requests_running": _shown("charonia_requests_running"),
    "vllm:num_requests_waiting": _shown("charonia_requests_waiting"),
    "vllm:kv_cache_usage_perc": _gauge(
        "Share of the KV cache's blocks that live requests use, from 0 to 1.",
        ours="`charonia_kv_blocks`: used / (total − aside)",  # noqa: RUF001
    ),
    "vllm:cache_config_info": _gauge(
        "Always 1. Its labels say the tokens per block of the KV cache and its number of blocks.",
        place="page",
        info=("block_size", "num_gpu_blocks"),
        ours='`charonia_kv_blocks{state="total"}` is `num_gpu_blocks`',
    ),
    "vllm:num_preemptions_total": _shown("charonia_preemptions_total"),
    "vllm:prefix_cache_queries_total": _shown("charonia_prefix_cache_queried_tokens_total"),
    "vllm:prefix_cache_hits_total": _shown("charonia_prefix_cache_hit_tokens_total"),
    "vllm:request_success_total": _counter(
        "Answered requests by finish reason.",
        "finished_reason",
        ("stop", "length"),
        shows="charonia_finished_total",
    ),
    "vllm:spec_decode_num_drafts_total": _shown("charonia_draft_rounds_total"),
    "vllm:spec_decode_num_draft_tokens_total": _shown("charonia_draft_tokens_total"),
    "vllm:spec_decode_num_accepted_tokens_total": _shown("charonia_accepted_tokens_total"),
    "vllm:request_queue_time_seconds": _shown("charonia_queue_seconds"),
    "vllm:prompt_tokens_total": _counter(
        "Tokens of prompts.", shows="charonia_prompt_tokens_total"
    ),
    "vllm:generation_tokens_total": _shown("charonia_generation_tokens_total"),
    "vllm:time_to_first_token_seconds": _shown("charonia_time_to_first_token_seconds"),
    "vllm:inter_token_latency_seconds": _shown("charonia_inter_token_seconds"),
    "vllm:time_per_output_token_seconds": _histogram(
        "The same by the name that vLLM gave up.",
        _INTER_TOKEN_SECONDS,
        place="page",
        shows="charonia_inter_token_seconds",
    ),
    "vllm:e2e_request_latency_seconds": _shown("charonia_request_seconds"),
    "vllm:request_prompt_tokens": _histogram(
        "Tokens of a request's prompt.", _TOKENS, shows="request_prompt_tokens"
    ),
    "vllm:request_generation_tokens": _histogram(
        "Tokens generated for a request.", _TOKENS, shows="request_generation_tokens"
    ),
    "vllm:request_params_n": _histogram(
        "Completions that a request asked for.", _COUNTS, shows="request_params_n"
    ),
}
"""Metrics by vLLM's names, with the scheduler's REPORT_CUSTOM_METRICS."""

BY_NAME = METRICS | VLLM_METRICS


def labels_of(name: str, labels: Mapping[str, str]) -> dict[str, str]:
    """The labels that all series of a metric have.

    vLLM's dashboards select by the name of the model and the number of its engine, so series under
    vLLM's names have these, too. There is one engine, number 0.

    Args:
        labels: `model`, the name of the scheduler's model, and `version`.
    """
    if name not in VLLM_METRICS:
        return dict(labels)
    return {**labels, "model_name": labels["model"], "engine": "0"}
