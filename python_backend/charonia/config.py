"""Configuration of the engine and of the scheduler, checked once, where it is read.

Owns `engine/1/model.json` (vLLM's names where the meaning is the same) and the scheduler's
parameters of its config.pbtxt. Must not know Triton or torch.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from charonia import vllm_args
from charonia.errors import ConfigError, shown

SERVER_PARAMETERS = ("FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH")
"""Parameters in a config.pbtxt that are meant for the inference server, not for us."""
_MAX_INTEGER = 2**31 - 1
_MAX_SECONDS = 365 * 24 * 3600.0
_MAX_THREADS = 256
_MOST_ROWS, _MOST_STEP_TOKENS = 256, 4096  # of those that adapt
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=_MAX_INTEGER)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=_MAX_SECONDS)]
T = TypeVar("T")
Log = Callable[[str], None]
_PORT = re.compile("[0-9]{1,5}")
_MAX_REASON = 200  # characters of a text that is not ours

DEMO_CHECKPOINT = Path(__file__).parent / "demo" / "checkpoints" / "charonia-demo"
DEMO_DRAFT_CHECKPOINT = DEMO_CHECKPOINT.with_name("charonia-demo-draft")

RUNGS = ("speculation", "chunks", "max_tokens", "rejection")
"""What a server can give up under pressure, see `SchedulerArgs.degradation_ladder`."""

_GENERATION_CONFIG_WORDS = ("auto", "none", "vllm")
MAX_SPECULATIVE_TOKENS = 64
_SPECULATIVE_TOKENS = {"draft_model": 5, "ngram": 10, "suffix": 16}


def _no_log(line: str) -> None:
    """Take a log line and do nothing with it."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are guessed ahead, so that one pass of the model can commit several.

    No method changes a request's tokens. Names are vLLM's where the meaning is the same.

    Attributes:
        method: "draft_model", a small model of the same tokenizer guesses; "ngram", what followed
            the last tokens earlier in the same text; "suffix", the same with matches of any
            length, also in earlier responses of the same tenant. None is "draft_model" where a
            `model` is named.
        model: directory of the draft model's checkpoint.
        quantization: of the draft model, whose guesses are verified anyway: "auto" is int8 where
            our CPU kernels compute, else as None; None leaves its weights as the model's are.
        num_speculative_tokens: drafts per request and step at most, 1 to 64; None is 5 for
            "draft_model", 10 for "ngram" and 16 for "suffix".
        prompt_lookup_max, prompt_lookup_min: tokens that must be the same for "ngram", 1 to 32;
            None is 5 and 2, or what makes room for the other.
        adaptive: choose from measured acceptance and step times how many drafts pay, none
            included; False always drafts as many as it can.
        draft_tensor_parallel_size: ranks that the draft model is split among, at most as many as
            the model's `tensor_parallel_size`; None is 1.
        synthetic_acceptance_rate: accept each draft with this probability, whatever it is. For
            benchmarks of the machinery alone: the text is NOT the model's.
    """

    method: Literal["draft_model", "ngram", "suffix"] | None = None
    model: str | None = None
    quantization: Literal["auto", "int8"] | None = "auto"
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_SPECULATIVE_TOKENS)] | None = (
        None
    )
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    adaptive: bool = True
    draft_tensor_parallel_size: PositiveInt | None = None
    synthetic_acceptance_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None

    def __post_init__(self) -> None:
        if self.method is None and self.model is None:
            raise ConfigError(
                "speculative_config names neither a method nor a model; methods are"
                " 'draft_model', 'ngram' and 'suffix'"
            )
        if self.has_draft_model and self.model is None:
            raise ConfigError("speculative_config: method 'draft_model' needs a model")
        if not self.has_draft_model and self.model is not None:
            raise ConfigError(
                f"speculative_config: method {self.method!r} takes no model, but one is named"
            )
        shortest, longest = self.prompt_lookup
        if shortest > longest:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min = {shortest} must be at most"
                f" prompt_lookup_max ({longest})"
            )

    @property
    def has_draft_model(self) -> bool:
        """Whether the engine drafts, with a model of its own."""
        return self.method in (None, "draft_model")

    @property
    def max_drafts(self) -> int:
        """Drafts per request and step at most."""
        return self.num_speculative_tokens or _SPECULATIVE_TOKENS[self.method or "draft_model"]

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """Least and greatest length of an n-gram."""
        longest = self.prompt_lookup_max or max(5, self.prompt_lookup_min or 0)
        return self.prompt_lookup_min or min(2, longest), longest


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's arguments, from `engine/1/model.json` or the Python API.

    Attributes:
        model: directory of a checkpoint in Hugging Face format; the demo model where model.json
            names none.
        tokenizer: directory of its tokenizer; None is `model`.
        dtype: of the weights and the KV cache; "auto" is what the checkpoint says.
        max_model_len: tokens of prompt and output together; None is what the model supports.
        max_num_seqs: rows, i.e. requests that run at once. "auto" has as many as make steps more
            productive, by what steps take, and as the KV cache has room for, 256 at most; where
            the scheduler's `inter_token_target_ms` is a number, no more than keep it.
        max_num_batched_tokens: token budget of one step. "auto" has as many as make steps more
            productive, 4,096 at most. It needs `enable_chunked_prefill`.
        block_size: tokens per KV block.
        gpu_memory_utilization: share of a GPU's memory that weights and KV cache may take.
        num_gpu_blocks_override: KV blocks, whatever the memory; None sizes the cache by memory.
        tensor_parallel_size: ranks that each layer is split among; it must divide the number of
            attention heads. A rank is a process: on a GPU machine one per GPU.
        pipeline_parallel_size: groups of ranks that the layers are split among, for models that
            do not fit otherwise; the engine has the product of both as ranks.
        num_local_ranks: ranks on this machine; None is all of them. The others are started by
            `python -m charonia.parallel.worker` on theirs.
        rendezvous: "HOST:PORT", an address of this machine, or a name of one, at which ranks of
            other machines join; needed where there are any. Not one that stands for all addresses.
        rendezvous_timeout_s: how long to wait for them.
        rank_timeout_s: a rank that nothing was heard of for so many seconds is given up; at least
            2, because it says every half second that it lives, and may be late with that.
        enable_prefix_caching: reuse KV blocks of earlier requests with the same prefix.
        enable_chunked_prefill: let a prompt be computed over several steps.
        speculative_config: how to guess tokens ahead, see `SpeculativeConfig`; None does not.
        generation_config: where defaults of sampling parameters come from: "auto" is the
            checkpoint's generation_config.json, or where it has none its config.json; "none" (or
            vLLM's word "vllm") is nothing; anything else is the directory of such a file.
        kv_cache_dtype: "auto" is that of the weights.
        scheduling_policy: "fcfs", first come first served; "priority", by each request's
            `priority`, see also the scheduler's `priority_aging_s`; or "deadline", the earliest
            `deadline_ms` first, see also `late_requests`.
        async_scheduling: plan a step while the one before it computes, so that the engine need
            not wait for the plan; a request that ends by a token or a text is then computed one
            step too long, whose token nobody sees. A pipeline's stages have other steps to compute
            instead, and drafts wait for the tokens that they follow.
        quantization: "int8" keeps weights as 8-bit integers with a scale per output: half the
            bytes of bfloat16, at a small loss.
        seed: of the requests that bring none, each of which gets one drawn from it in the order in
            which they are admitted; None draws them at random.
        device: "auto" takes a GPU where there is one.
        cpu_kernels: what computes on a CPU: our kernels for an instruction set, or torch's
            operations; "auto" is the best that the processor has.
        cpu_threads: threads of each rank that compute on a CPU; None is one per core that the
            process may use, shared out among the ranks.
        cpu_binding: their cores: "auto" binds them where there is a core for each, "none" does
            not, and a list such as "0-3,8" names them.
    """

    model: str
    tokenizer: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: PositiveInt | None = None
    max_num_seqs: PositiveInt | Literal["auto"] = 64
    max_num_batched_tokens: PositiveInt | Literal["auto"] = 2048
    block_size: Annotated[int, msgspec.Meta(ge=1, le=256)] = 16
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    num_gpu_blocks_override: Annotated[int, msgspec.Meta(ge=2, le=_MAX_INTEGER)] | None = None
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    num_local_ranks: PositiveInt | None = None
    rendezvous: str | None = None
    rendezvous_timeout_s: Seconds = 600.0
    rank_timeout_s: Annotated[float, msgspec.Meta(ge=2, le=_MAX_SECONDS)] = 5.0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    kv_cache_dtype: Literal["auto"] = "auto"
    quantization: Literal["int8"] | None = None
    speculative_config: SpeculativeConfig | None = None
    generation_config: str = "auto"
    scheduling_policy: Literal["fcfs", "priority", "deadline"] = "fcfs"
    async_scheduling: bool = True
    seed: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpu_kernels: Literal[
        "auto", "amx_bf16", "avx512_bf16", "avx512", "avx2", "portable", "torch"
    ] = "auto"
    cpu_threads: PositiveInt | None = None
    cpu_binding: str = "auto"

    def __post_init__(self) -> None:
        draft_model = self.speculative_config.model if self.speculative_config else None
        paths = {"model": self.model, "tokenizer": self.tokenizer, "the draft model": draft_model}
        paths["generation_config"] = self.generation_config
        for name, path in paths.items():
            if path is not None and not _is_path(path):
                raise ConfigError(f"{name} has a character that no path can have")
        draft_ranks = self.draft_ranks
        if draft_ranks > self.tensor_parallel_size:
            raise ConfigError(
                f"draft_tensor_parallel_size = {draft_ranks} must be at most tensor_parallel_size"
                f" ({self.tensor_parallel_size})"
            )
        if self.local_ranks > self.num_ranks:
            raise ConfigError(
                f"num_local_ranks = {self.num_local_ranks}, but tensor_parallel_size times"
                f" pipeline_parallel_size makes {self.num_ranks} ranks in all"
            )
        if self.rendezvous is None and self.local_ranks < self.num_ranks:
            raise ConfigError(
                f"num_local_ranks = {self.num_local_ranks} leaves"
                f" {self.num_ranks - self.local_ranks} to other machines: rendezvous must say at"
                " which address of this one they join, as HOST:PORT"
            )
        if self.rendezvous is not None:
            host, _, port = self.rendezvous.rpartition(":")
            if not host or not _PORT.fullmatch(port) or not 0 < int(port) < 2**16:
                raise ConfigError(f"rendezvous = {shown(self.rendezvous)} is not HOST:PORT")

    @property
    def most_rows(self) -> int:
        """Rows that the engine has, of which a scheduler that adapts may use fewer."""
        return _MOST_ROWS if self.max_num_seqs == "auto" else self.max_num_seqs

    @property
    def most_step_tokens(self) -> int:
        """Tokens that a step may have; a scheduler that adapts may use fewer."""
        tokens = self.max_num_batched_tokens
        return _MOST_STEP_TOKENS if tokens == "auto" else tokens

    @property
    def num_ranks(self) -> int:
        """Processes that the model is split among, on all machines."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_ranks(self) -> int:
        """Those of them on this machine."""
        return self.num_ranks if self.num_local_ranks is None else self.num_local_ranks

    @property
    def draft_ranks(self) -> int:
        """Ranks that the draft model is split among."""
        config = self.speculative_config
        return (config.draft_tensor_parallel_size if config else None) or 1

    @property
    def generation_config_dir(self) -> Path | None:
        """Where the generation_config.json is that sampling takes its defaults from."""
        if self.generation_config == "auto":
            return Path(self.model)
        if self.generation_config in _GENERATION_CONFIG_WORDS:
            return None
        return Path(self.generation_config)

    @property
    def tokenizer_dir(self) -> Path:
        """Where the tokenizer's files are."""
        return Path(self.tokenizer or self.model)

    @classmethod
    def from_dict(cls, values: dict[str, Any], log: Log = _no_log) -> "EngineArgs":
        """Check names and types.

        Args:
            log: takes a line for each argument of vLLM's that has no effect here.

        Raises:
            ConfigError: an unknown key, a wrong type or a value out of range; it is named.
        """
        return _convert(vllm_args.leave_out(values, log), cls, "engine argument")

    @classmethod
    def from_file(cls, path: Path, log: Log = _no_log) -> "EngineArgs":
        """Read `model.json`; relative paths are relative to its directory.

        Where no `model` is named it is the demo model, with its draft model unless
        `speculative_config` is named.

        Args:
            log: as of `from_dict`.

        Raises:
            ConfigError: no such file, not a JSON object, or as `from_dict`.
        """
        try:
            values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except OSError as error:
            raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError, too
            raise ConfigError(f"{path.name} is not a JSON object: {error}") from None
        make_paths_absolute(values, path.parent)
        if "model" not in values:
            log(f"{path.name} names no model: it is the demo model")
        return cls.from_dict(with_demo_model(values), log)


def with_demo_model(values: dict[str, Any]) -> dict[str, Any]:
    """An engine's arguments; where they name no model it is the demo pair."""
    if "model" in values:
        return values
    draft = {"speculative_config": {"model": str(DEMO_DRAFT_CHECKPOINT)}}
    return draft | values | {"model": str(DEMO_CHECKPOINT)}


def _is_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def make_paths_absolute(values: dict[str, Any], base: Path) -> None:
    """Take the paths among an engine's arguments as relative to `base`; `~` is the home.

    Raises:
        ConfigError: there is no such home.
    """
    speculative = values.get("speculative_config")
    for holder in (values, speculative if isinstance(speculative, dict) else {}):
        for name in ("model", "tokenizer", "generation_config"):
            text = holder.get(name)
            is_word = name == "generation_config" and text in _GENERATION_CONFIG_WORDS
            if isinstance(text, str) and not is_word:
                try:
                    path = Path(text).expanduser()
                except RuntimeError as error:
                    raise ConfigError(f"{name} begins with ~: {error}") from None
                holder[name] = os.path.normpath(base / path)


class SchedulerArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scheduler's parameters, from its config.pbtxt.

    Attributes:
        engine_model: name of the Triton model that is the engine.
        max_queue_size: waiting requests before new ones are refused.
        max_queue_tokens: prompt tokens of the requests that wait for their first step, before new
            ones are refused; None for any number.
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
            at once, "demote" puts it behind all others, and it ends at its deadline.
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
            others were lately. The names are TensorRT-LLM's, where it has them.
        fair_share: tenants get equal shares of the engine, or as their weights say, whatever each
            asks for, and the scheduling policy holds among the requests of each; see
            `control.policies.fair`.
        tenants_file: a JSON file of the tenants' weights and limits, which is read again when it
            changes. A relative path is relative to the scheduler's directory. None has all tenants
            alike, without limits of their own.
        tenant_header: a header whose value is a request's tenant, set by whatever stands in front
            of the server; a `tenant` that the request names must be the same then. The server must
            forward it (`--http-header-forward-pattern`, `--grpc-header-forward-pattern`). None
            has requests say themselves whose they are.
        record_dir: a directory into which requests and steps are recorded, for `charonia simulate`:
            when a request came, how long it was, what became of it, and keyed hashes of its blocks
            of 64 tokens, but no text and no token. A relative path is relative to the scheduler's
            directory. None records nothing.
        record_max_bytes: of such a record; then it ends.
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
    priority_aging_s: Annotated[float, msgspec.Meta(ge=0, le=_MAX_SECONDS)] = 60.0
    late_requests: Literal["reject", "demote"] = "reject"
    inter_token_target_ms: (
        Annotated[float, msgspec.Meta(gt=0, le=1000 * _MAX_SECONDS)] | Literal["auto"] | None
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

    @property
    def degradation_rungs(self) -> tuple[str, ...]:
        """What is given up under pressure, in this order."""
        return tuple(rung.strip() for rung in self.degradation_ladder.split(","))

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
        return _convert(values, cls, "scheduler parameter", strict=False)


def _convert(values: dict[str, Any], cls: type[T], what: str, *, strict: bool = True) -> T:
    accepted = [field.encode_name for field in msgspec.structs.fields(cls)]  # type: ignore[arg-type]
    for name in values:
        if name not in accepted:
            raise ConfigError(f"unknown {what} {shown(name)}; accepted are {', '.join(accepted)}")
    try:
        return msgspec.convert(values, cls, strict=strict)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: {_shortened(str(error))}") from None


def _shortened(text: str) -> str:
    """msgspec's text, which has the value or the name as it came; what matters ends it."""
    return (
        text
        if len(text) <= _MAX_REASON
        else f"{text[: _MAX_REASON // 2]}…{text[-_MAX_REASON // 2 :]}"
    )
