"""Content of the dashboards: panels, and the queries behind them.

Owns titles, queries and units. Must not know Grafana; `dashboards.py` makes its JSON of these.

In a query `@` stands for the selector of the chosen servers and models, and `@{…}` adds labels:
`rate(charonia_finished_total@{reason="stop"}[5m])`. `$__rate_interval` is Grafana's.
"""

from dataclasses import dataclass
from typing import Literal

RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """A panel.

    Attributes:
        queries: each with its legend; labels in it as `{{model}}`.
        unit: Grafana's name of it. help: what to make of the panel.
        kind: a line over time, stacked areas, the last value alone, or the legends alone.
    """

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    help: str = ""
    kind: Literal["lines", "areas", "value", "names"] = "lines"


@dataclass(frozen=True)
class Row:
    """Panels below one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """A dashboard.

    Attributes:
        name: of its file, and in its address.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    job: Literal["charonia", "charonia-gateway"] = "charonia"


def one(query: str, legend: str = "{{model}}") -> tuple[tuple[str, str], ...]:
    """A panel's only query."""
    return ((query, legend),)


def quantiles(histogram: str, by: str = "model") -> tuple[tuple[str, str], ...]:
    """Median, 95th and 99th percentile of a histogram."""
    return tuple(
        (
            f"histogram_quantile({share}, sum by ({by}, le) (rate({histogram}_bucket@{RATE})))",
            f"p{100 * share:g} {{{{{by}}}}}",
        )
        for share in (0.5, 0.95, 0.99)
    )


def rates(counter: str, by: str) -> tuple[tuple[str, str], ...]:
    """Rates of a counter by a label."""
    return one(f"sum by ({by}) (rate({counter}@{RATE}))", f"{{{{{by}}}}}")


def shares(counter: str, by: str) -> tuple[tuple[str, str], ...]:
    """Seconds per second by a label, on average over the servers; `counter` has its `@`."""
    return one(f"avg by ({by}) (rate({counter}{RATE}))", f"{{{{{by}}}}}")


def ratio(part: str, whole: str, by: str = "model") -> tuple[tuple[str, str], ...]:
    """The rate of a counter over that of another one."""
    return one(
        f"sum by ({by}) (rate({part}@{RATE})) / sum by ({by}) (rate({whole}@{RATE}))",
        f"{{{{{by}}}}}",
    )


TOKENS = Panel(
    "Generated tokens",
    one(f"sum by (model) (rate(charonia_generation_tokens_total@{RATE}))"),
    "cps",
)
REQUESTS = Panel(
    "Requests",
    (
        ("sum by (model) (charonia_requests_running@)", "running {{model}}"),
        ("sum by (model) (charonia_requests_waiting@)", "waiting {{model}}"),
    ),
    help="Running ones have a row of the engine. A queue that does not shrink needs more servers.",
)
FIRST_TOKEN = Panel("Time to first token", quantiles("charonia_time_to_first_token_seconds"), "s")
BETWEEN_TOKENS = Panel("Time between tokens", quantiles("charonia_inter_token_seconds"), "s")
KV_BLOCKS = Panel(
    "KV cache",
    one('sum by (state) (charonia_kv_blocks@{state=~"used|cached|free|aside"})', "{{state}}"),
    help="Cached blocks hold prefixes, and are free for use.",
    kind="areas",
)
HIT_RATE = Panel(
    "Prefix cache hits",
    ratio("charonia_prefix_cache_hit_tokens_total", "charonia_prefix_cache_queried_tokens_total"),
    "percentunit",
    "Share of the prompts' tokens that need not be computed.",
)
OLDEST = Panel(
    "Oldest request",
    one("max by (model) (charonia_oldest_request_seconds@)"),
    "s",
    "Age of the oldest of the requests that were admitted first. If it rises as fast as time goes,"
    " one is stuck.",
)
STATE = Panel(
    "State of the engine",
    one("sum by (state) (charonia_engine_state@)", "{{state}}"),
    help="Steps run while it is serving. An operator has ordered what is reloading.",
    kind="areas",
)
FAILURES = Panel(
    "Failures of the engine",
    rates("charonia_engine_failures_total", "kind"),
    "cps",
)
REFUSED = Panel("Refused requests", rates("charonia_rejections_total", "reason"), "reqps")
FINISHED = Panel("Finished requests", rates("charonia_finished_total", "reason"), "reqps")

DASHBOARDS = (
    Dashboard(
        "overview",
        "charonia: overview",
        (
            Row(
                "Now",
                (
                    Panel(
                        "Engine",
                        one("count by (state) (charonia_engine_state@ == 1)", "{{state}}"),
                        kind="names",
                    ),
                    Panel(
                        "Tokens per second",
                        one(f"sum(rate(charonia_generation_tokens_total@{RATE}))", ""),
                        "cps",
                        kind="value",
                    ),
                    Panel("Running", one("sum(charonia_requests_running@)", ""), kind="value"),
                    Panel("Waiting", one("sum(charonia_requests_waiting@)", ""), kind="value"),
                    Panel(
                        "KV cache in use",
                        one(
                            'sum(charonia_kv_blocks@{state="used"})'
                            ' / (sum(charonia_kv_blocks@{state="total"})'
                            ' - sum(charonia_kv_blocks@{state="aside"}))',
                            "",
                        ),
                        "percentunit",
                        kind="value",
                    ),
                    Panel(
                        "Restarts of the engine",
                        one("sum(charonia_engine_restarts_total@)", ""),
                        kind="value",
                    ),
                ),
            ),
            Row("Traffic", (TOKENS, REQUESTS, FINISHED, REFUSED)),
            Row(
                "Latency",
                (
                    FIRST_TOKEN,
                    BETWEEN_TOKENS,
                    Panel("Whole requests", quantiles("charonia_request_seconds"), "s"),
                    Panel("In the queue", quantiles("charonia_queue_seconds"), "s"),
                ),
            ),
            Row("Cache and faults", (KV_BLOCKS, HIT_RATE, FAILURES, OLDEST)),
        ),
    ),
    Dashboard(
        "scheduling",
        "charonia: scheduling and tenants",
        (
            Row(
                "The queue",
                (
                    REQUESTS,
                    Panel("In the queue", quantiles("charonia_queue_seconds"), "s"),
                    Panel(
                        "Preemptions",
                        one(f"sum by (model) (rate(charonia_preemptions_total@{RATE}))"),
                        "cps",
                        "Requests that gave up their blocks and are computed again.",
                    ),
                    Panel(
                        "Degradation",
                        one("max by (model) (charonia_degradation_level@)"),
                        help="Levels of the degradation ladder in effect.",
                    ),
                ),
            ),
            Row(
                "Steps",
                (
                    Panel("Planning a step", quantiles("charonia_plan_seconds"), "s"),
                    Panel("Computing a step", quantiles("charonia_step_seconds"), "s"),
                    Panel(
                        "Rows and tokens of a step, at most",
                        (
                            ("max by (model) (charonia_max_rows@)", "rows {{model}}"),
                            ("max by (model) (charonia_max_step_tokens@)", "tokens {{model}}"),
                        ),
                    ),
                ),
            ),
            Row(
                "Tenants",
                (
                    Panel(
                        "Running",
                        one("sum by (tenant) (charonia_tenant_requests_running@)", "{{tenant}}"),
                        kind="areas",
                    ),
                    Panel(
                        "Waiting",
                        one("sum by (tenant) (charonia_tenant_requests_waiting@)", "{{tenant}}"),
                        kind="areas",
                    ),
                    Panel(
                        "Generated tokens",
                        rates("charonia_tenant_generation_tokens_total", "tenant"),
                        "cps",
                        kind="areas",
                    ),
                    Panel(
                        "Prompt tokens",
                        rates("charonia_tenant_prompt_tokens_total", "tenant"),
                        "cps",
                        kind="areas",
                    ),
                    Panel(
                        "Finished requests",
                        rates("charonia_tenant_requests_total", "tenant"),
                        "reqps",
                    ),
                    Panel(
                        "Refused requests",
                        rates("charonia_tenant_rejections_total", "tenant"),
                        "reqps",
                    ),
                    *(
                        Panel(
                            title,
                            one(
                                f"sum by (tenant) (rate(charonia_{name}_met_total@{RATE}))"
                                f" / (sum by (tenant) (rate(charonia_{name}_met_total@{RATE}))"
                                f" + sum by (tenant) (rate(charonia_{name}_missed_total@{RATE})))",
                                "{{tenant}}",
                            ),
                            "percentunit",
                        )
                        for title, name in (
                            ("Deadlines met", "deadline"),
                            ("Targets for the first token met", "ttft_target"),
                            ("Targets between tokens met", "inter_token_target"),
                        )
                    ),
                ),
            ),
        ),
    ),
    Dashboard(
        "cache",
        "charonia: cache",
        (
            Row(
                "The KV cache",
                (
                    KV_BLOCKS,
                    HIT_RATE,
                    Panel(
                        "Prompt tokens",
                        rates("charonia_prompt_tokens_total", "source"),
                        "cps",
                        kind="areas",
                    ),
                    Panel(
                        "Evicted blocks",
                        one(f"sum by (model) (rate(charonia_kv_blocks_evicted_total@{RATE}))"),
                        "cps",
                    ),
                    Panel(
                        "Retained blocks",
                        one("sum by (model) (charonia_kv_retained_blocks@)"),
                        help="Evicted after all others, by cache_priority.",
                    ),
                    Panel(
                        "Requests that waited for a prefix",
                        one(f"sum by (model) (rate(charonia_prefix_waits_total@{RATE}))"),
                        "reqps",
                    ),
                ),
            ),
            Row(
                "Slower tiers",
                (
                    Panel(
                        "Blocks",
                        one("sum by (tier) (charonia_kv_tier_blocks@)", "{{tier}}"),
                        kind="areas",
                    ),
                    Panel(
                        "Saved and loaded blocks",
                        tuple(
                            (f"sum(rate(charonia_kv_blocks_{name}_total@{RATE}))", name)
                            for name in ("saved", "loaded")
                        ),
                        "cps",
                    ),
                    Panel(
                        "Lost or damaged blocks",
                        one(f"sum by (model) (rate(charonia_kv_loads_failed_total@{RATE}))"),
                        "cps",
                    ),
                ),
            ),
            Row(
                "Cached answers",
                (
                    Panel(
                        "Requests",
                        (
                            *rates("charonia_answer_cache_hits_total", "kind"),
                            (f"sum(rate(charonia_answer_cache_misses_total@{RATE}))", "computed"),
                        ),
                        "reqps",
                        kind="areas",
                    ),
                    Panel("Answers", one("sum by (model) (charonia_answer_cache_answers@)")),
                    Panel("Bytes", one("sum by (model) (charonia_answer_cache_bytes@)"), "bytes"),
                    Panel(
                        "Evicted answers",
                        rates("charonia_answer_cache_evicted_total", "why"),
                        "cps",
                    ),
                ),
            ),
        ),
    ),
    Dashboard(
        "speculation",
        "charonia: speculation",
        (
            Row(
                "Drafts",
                (
                    Panel(
                        "Accepted drafts",
                        ratio("charonia_accepted_tokens_total", "charonia_draft_tokens_total"),
                        "percentunit",
                    ),
                    Panel(
                        "Tokens per verification",
                        one(
                            f"1 + sum by (model) (rate(charonia_accepted_tokens_total@{RATE}))"
                            f" / sum by (model) (rate(charonia_draft_rounds_total@{RATE}))"
                        ),
                        help="Accepted drafts and the token after them. 1 is what no speculation "
                        "gives.",
                    ),
                    Panel("Depth", one("max by (model) (charonia_draft_depth@)")),
                    Panel(
                        "Accepted by position",
                        ratio(
                            "charonia_accepted_at_position_total",
                            "charonia_drafted_at_position_total",
                            by="position",
                        ),
                        "percentunit",
                    ),
                    Panel(
                        "Time for drafting and verifying",
                        shares(
                            'charonia_step_phase_seconds_total@{phase=~"draft|verify"}', "phase"
                        ),
                        "percentunit",
                        "Share of the time, on average over the servers.",
                        kind="areas",
                    ),
                ),
            ),
        ),
    ),
    Dashboard(
        "engine",
        "charonia: engine and ranks",
        (
            Row(
                "Steps",
                (
                    STATE,
                    Panel("Computing a step", quantiles("charonia_step_seconds"), "s"),
                    Panel("Planning a step", quantiles("charonia_plan_seconds"), "s"),
                    Panel(
                        "Phases of steps",
                        shares("charonia_step_phase_seconds_total@", "phase"),
                        "percentunit",
                        "Share of the time, on average over the servers. A high `transit` means "
                        "that the engine's answers wait.",
                        kind="areas",
                    ),
                    Panel(
                        "Memory",
                        one("sum by (part) (charonia_engine_memory_bytes@)", "{{part}}"),
                        "bytes",
                        kind="areas",
                    ),
                ),
            ),
            Row(
                "Collective operations of the first rank",
                (
                    Panel("Calls", rates("charonia_collective_calls_total", "operation"), "cps"),
                    Panel("Bytes", rates("charonia_collective_bytes_total", "operation"), "binBps"),
                    Panel(
                        "Time",
                        shares("charonia_collective_seconds_total@", "operation"),
                        "percentunit",
                        "Share of the time, on average over the servers, waiting included.",
                    ),
                ),
            ),
        ),
    ),
    Dashboard(
        "faults",
        "charonia: faults",
        (
            Row(
                "Whether it runs",
                (
                    Panel(
                        "Up",
                        (
                            ("min by (model) (charonia_scheduler_up@)", "scheduler {{model}}"),
                            ("min by (model) (charonia_engine_up@)", "engine {{model}}"),
                        ),
                    ),
                    STATE,
                    FAILURES,
                    Panel(
                        "Replaced engines",
                        (
                            ("sum by (model) (charonia_engine_restarts_total@)", "lost {{model}}"),
                            (
                                "sum by (model) (charonia_engine_reloads_total@)",
                                "reloaded {{model}}",
                            ),
                        ),
                    ),
                    Panel("Recovery", quantiles("charonia_recovery_seconds"), "s"),
                ),
            ),
            Row(
                "What it did to requests",
                (
                    Panel(
                        "Requests",
                        tuple(
                            (f"sum(rate(charonia_{name}_total@{RATE}))", legend)
                            for name, legend in (
                                ("requests_recomputed", "went on with another engine"),
                                ("requests_quarantined", "quarantined"),
                                ("cancellations", "cancelled by their clients"),
                                ("capped_requests", "capped under pressure"),
                            )
                        ),
                        "reqps",
                    ),
                    REFUSED,
                    FINISHED,
                    Panel(
                        "Dropped batches of KV events",
                        one(
                            f"sum by (model) (rate(charonia_kv_event_batches_dropped_total@{RATE}))"
                        ),
                        "cps",
                    ),
                ),
            ),
        ),
    ),
    Dashboard(
        "gateway",
        "charonia: gateway",
        (
            Row(
                "What clients see",
                (
                    Panel("Requests", rates("charonia_gateway_requests_total", "status"), "reqps"),
                    Panel(
                        "In flight",
                        one(
                            "sum by (instance) (charonia_gateway_requests_in_flight@)",
                            "{{instance}}",
                        ),
                    ),
                    Panel(
                        "Time to first token",
                        quantiles("charonia_gateway_time_to_first_token_seconds", "instance"),
                        "s",
                    ),
                    Panel(
                        "Time between tokens",
                        quantiles("charonia_gateway_inter_token_seconds", "instance"),
                        "s",
                    ),
                    Panel(
                        "Whole requests",
                        quantiles("charonia_gateway_request_seconds", "route"),
                        "s",
                    ),
                    Panel(
                        "Tokens",
                        tuple(
                            (f"sum(rate(charonia_gateway_{name}_tokens_total@{RATE}))", name)
                            for name in ("prompt", "completion")
                        ),
                        "cps",
                    ),
                    Panel(
                        "Entries of batches",
                        rates("charonia_gateway_batch_entries_total", "status"),
                        "reqps",
                        help="By the status that each would have alone.",
                    ),
                ),
            ),
            Row(
                "Its servers",
                (
                    Panel(
                        "Requests at each server",
                        one("sum by (server) (charonia_gateway_server_requests@)", "{{server}}"),
                        kind="areas",
                    ),
                    Panel(
                        "Resting after failures",
                        one("max by (server) (charonia_gateway_server_resting@)", "{{server}}"),
                    ),
                    Panel(
                        "Requests that moved on",
                        rates("charonia_gateway_retries_total", "server"),
                        "reqps",
                    ),
                    Panel(
                        "Asked of the fallback model",
                        rates("charonia_gateway_fallbacks_total", "instance"),
                        "reqps",
                    ),
                    Panel(
                        "Tasks",
                        one("sum by (instance) (charonia_gateway_tasks@)", "{{instance}}"),
                        help="A few, and some per request. They should fall with the requests.",
                    ),
                ),
            ),
        ),
        job="charonia-gateway",
    ),
)
