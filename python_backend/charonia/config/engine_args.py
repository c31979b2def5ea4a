"""The engine's arguments: `engine/1/model.json`, with vLLM's names where the meaning is the same.

Owns their names, ranges and defaults, and the demo model, which is the default model. Knows nothing
about what an engine does with them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from charonia import vllm_args
from charonia.config.kv_events_config import KVEventsConfig
from charonia.config.speculative_config import SpeculativeConfig
from charonia.config.values import (
    MAX_INTEGER,
    MAX_SECONDS,
    PositiveInt,
    Quantization,
    Seconds,
    convert,
    is_address,
    is_path,
)
from charonia.errors import ConfigError, shown

DEMO_CHECKPOINT = Path(__file__).parents[1] / "demo" / "checkpoints" / "charonia-demo"
DEMO_DRAFT_CHECKPOINT = DEMO_CHECKPOINT.with_name("charonia-demo-draft")

SchedulingPolicy = Literal["fcfs", "priority", "deadline"]
"""The default comes first."""
Log = Callable[[str], None]
_MAX_BYTES = 2**53
_MAX_GIB = 2.0**20
_MOST_ROWS, _MOST_STEP_TOKENS = 256, 4096  # with "auto"
_GENERATION_CONFIG_WORDS = ("auto", "none", "vllm")
_NEEDS = {"eviction_policy": "enable_prefix_caching", "kv_cache_file_space": "kv_cache_path"}
"""Arguments that have no effect without another one. They are accepted while that is off."""


def _no_log(line: str) -> None:
    """Take a log line and do nothing with it."""


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's arguments, from `engine/1/model.json` or the Python API.

    Attributes:
        model: directory of a checkpoint in Hugging Face format. A model.json that names none gets
            the demo model.
        tokenizer: directory of its tokenizer; None is `model`.
        dtype: number format of the weights and of the computation; "auto" is the checkpoint's.
        max_model_len: tokens of prompt and output together; None is what the model supports.
        max_num_seqs: rows, i.e. requests that run at once. "auto" chooses their number from
            measured step times and the room in the KV cache: as many as still raise throughput, at
            most 256. If the scheduler's `inter_token_target_ms` is a number that one row can keep,
            "auto" keeps it, too.
        max_num_batched_tokens: token budget of one step. "auto" chooses it from measured step
            times: as many tokens as still raise throughput, at most 4,096. It needs
            `enable_chunked_prefill`.
        block_size: tokens per KV block.
        gpu_memory_utilization: share of a GPU's memory that weights, the largest step and the KV
            cache may take.
        cpu_memory_utilization: on a CPU, the KV cache's share of the memory that is available
            beside the largest step. The ranks of a machine share it. Available is what the machine
            and the control groups of the process leave when the engine is loaded. The cache never
            grows beyond that, even if memory becomes free later, until the engine is loaded again.
        memory_reserve: share of memory to leave for other processes on a CPU; of the machine's
            memory, or of the limit of the process's control group. If less is left, the KV cache
            shrinks, down to what one request may need. It grows again once twice as much is left.
            Until then it also shrinks while all processes wait for memory. Only rank 0's machine is
            watched; ranks on other machines follow it. 0 keeps the cache's size fixed, and so does
            either of the next two arguments.
        kv_cache_memory_bytes: size of each rank's KV cache, in place of a share of the memory; None
            measures at start what the largest step leaves.
        num_gpu_blocks_override: number of KV blocks; None sizes the cache by memory.
        tensor_parallel_size: ranks that each layer is split among; it must divide the number of
            attention heads. A rank is a process: on a GPU machine one per GPU.
        pipeline_parallel_size: groups of ranks that the layers are split among, for models that
            do not fit otherwise. The number of ranks is the product of both sizes.
        num_local_ranks: ranks on this machine; None is all of them. Start the others on their
            machines with `python -m charonia.parallel.worker`.
        rendezvous: "HOST:PORT" at which ranks of other machines join; required if there are any.
            HOST is an address or a name of this machine, but not the wildcard address.
        rendezvous_timeout_s: how long to wait for them.
        rank_timeout_s: heartbeat timeout of a rank, in seconds; at least 2. A rank sends a
            heartbeat every half second, and may be late with it.
        enable_prefix_caching: reuse KV blocks of earlier requests with the same prefix.
        enable_prefix_sharing: if several requests have a long common prefix that is not cached, one
            of them computes it and the others wait, but no longer than each would need to compute
            it alone. It needs `enable_prefix_caching`.
        eviction_policy: which cached blocks are evicted first. "adaptive": those with the fewest
            expected hits for the time that they stay, learned from blocks like them; "lru": the
            least recently used; "lfu": those with the fewest hits; "fifo": the oldest; "w_tinylfu",
            "s3_fifo" and "arc": three ways to keep blocks that are used again and again while many
            others are used once. Blocks that continue others are evicted before them. Without
            `enable_prefix_caching` it has no effect, and the log says so.
        kv_events_config: publish what the prefix cache holds, e.g. to a router that sends requests
            to where their prefix is; see `KVEventsConfig`. None publishes nothing. It needs
            `enable_prefix_caching`.
        swap_space: GiB of host memory, for each rank, for blocks of the prefix cache that were hit.
            They stay there when the KV cache evicts them; 0 turns it off. It needs
            `enable_prefix_caching`, as does the next argument.
        kv_cache_path: directory of files that do the same and outlive engine, server and machine.
            `~` is the home directory; None turns it off. Servers may share the directory: each uses
            files of its own. Anybody who can read these files can read what is cached of prompts.
        kv_cache_file_space: GiB that such a file may take; each rank has one. Without
            `kv_cache_path` it has no effect, and the log says so.
        enable_chunked_prefill: let a prompt be computed over several steps.
        speculative_config: how tokens are drafted, see `SpeculativeConfig`; None turns drafts off.
        generation_config: where defaults of sampling parameters come from. "auto": the checkpoint's
            generation_config.json, or its config.json if it has none; "none", or vLLM's word
            "vllm": nowhere; anything else: the directory of such a file.
        kv_cache_dtype: number format of keys and values. "auto": that of the weights; "int8" and
            "fp8" (e4m3): 8 bits, with a scale for each token and head; "int4": 4 bits, with a scale
            for every 32 numbers, for models whose head size is a multiple of 32. "fp8_e4m3" is
            vLLM's word for "fp8".
        scheduling_policy: "fcfs", first come first served; "priority", by each request's
            `priority`, see also the scheduler's `priority_aging_s`; or "deadline", the earliest
            `deadline_ms` first, see also `late_requests`.
        async_scheduling: plan a step while the one before it computes, so that the engine does not
            wait for the plan. A request that ends by a token or a text is then computed for one
            step too many, and that step's token is dropped. Pipelines overlap different steps
            instead, and steps with drafts wait for the tokens before them.
        quantization: "int8" keeps weights as 8-bit integers with a scale per output: half the
            bytes of bfloat16, at a small loss. "w8a8" also rounds each token's
            activations to 8 bits, in groups of up to 1,024 numbers with a scale each. Our CPU
            kernels are faster with it, and more is lost.
        seed: seed of the requests that bring none: each draws its own from it, in the order of
            admission. None draws them at random.
        device: "auto" takes a GPU if there is one.
        cpu_kernels: what computes on a CPU: our kernels for an instruction set, or torch's
            operations; "auto" is the best that the processor has.
        cpu_threads: threads of each rank that compute on a CPU; None is one per core that the
            process may use, divided among the ranks.
        cpu_binding: which cores these threads are bound to. "auto" binds them if there is a core
            for each; "none" does not bind them; a list such as "0-3,8" names the cores.
    """

    model: str
    tokenizer: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: PositiveInt | None = None
    max_num_seqs: PositiveInt | Literal["auto"] = 64
    max_num_batched_tokens: PositiveInt | Literal["auto"] = 2048
    block_size: Annotated[int, msgspec.Meta(ge=1, le=256)] = 16
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    cpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.25
    memory_reserve: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05
    kv_cache_memory_bytes: Annotated[int, msgspec.Meta(ge=1, le=_MAX_BYTES)] | None = None
    num_gpu_blocks_override: Annotated[int, msgspec.Meta(ge=2, le=MAX_INTEGER)] | None = None
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    num_local_ranks: PositiveInt | None = None
    rendezvous: str | None = None
    rendezvous_timeout_s: Seconds = 600.0
    rank_timeout_s: Annotated[float, msgspec.Meta(ge=2, le=MAX_SECONDS)] = 5.0
    enable_prefix_caching: bool = True
    enable_prefix_sharing: bool = True
    eviction_policy: Literal["adaptive", "lru", "lfu", "fifo", "w_tinylfu", "s3_fifo", "arc"] = (
        "adaptive"
    )
    kv_events_config: KVEventsConfig | None = None
    swap_space: Annotated[float, msgspec.Meta(ge=0, le=_MAX_GIB)] = 0.0
    kv_cache_path: str | None = None
    kv_cache_file_space: Annotated[float, msgspec.Meta(gt=0, le=_MAX_GIB)] = 4.0
    enable_chunked_prefill: bool = True
    kv_cache_dtype: Literal["auto", "int8", "fp8", "fp8_e4m3", "int4"] = "auto"
    quantization: Quantization | None = None
    speculative_config: SpeculativeConfig | None = None
    generation_config: str = "auto"
    scheduling_policy: SchedulingPolicy = "fcfs"
    async_scheduling: bool = True
    seed: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpu_kernels: Literal[
        "auto", "amx_bf16", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable", "torch"
    ] = "auto"
    cpu_threads: PositiveInt | None = None
    cpu_binding: str = "auto"

    def __post_init__(self) -> None:
        draft_model = self.speculative_config.model if self.speculative_config else None
        paths = {"model": self.model, "tokenizer": self.tokenizer, "the draft model": draft_model}
        paths["generation_config"] = self.generation_config
        paths["kv_cache_path"] = self.kv_cache_path
        for name, path in paths.items():
            if path is not None and not is_path(path):
                raise ConfigError(f"{name} has a character that no path can have")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ConfigError(
                f"seed must be from -2**63 to 2**64 - 1, or null, but is {shown(self.seed)}"
            )
        self._check_tiers()
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config tells what the prefix cache holds, but enable_prefix_caching ="
                " False has none"
            )
        if self.max_num_batched_tokens == "auto" and not self.enable_chunked_prefill:
            raise ConfigError(
                "max_num_batched_tokens = 'auto' has no effect with enable_chunked_prefill ="
                " False, where each prompt is computed in one step; accepted is a number"
            )
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
        if self.rendezvous is not None and not is_address(self.rendezvous):
            raise ConfigError(f"rendezvous = {shown(self.rendezvous)} is not HOST:PORT")

    def _check_tiers(self) -> None:
        if self.kv_cache_path == "":
            raise ConfigError("kv_cache_path = '' names no directory; null is none")
        if (self.swap_space or self.kv_cache_path is not None) and not self.enable_prefix_caching:
            raise ConfigError(
                "swap_space and kv_cache_path keep what the prefix cache holds, but"
                " enable_prefix_caching = False has none"
            )

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Settings of the events of the prefix cache; None if they are not published."""
        config = self.kv_events_config
        return config if config is not None and config.is_on else None

    @property
    def most_rows(self) -> int:
        """Rows that the engine has; with "auto" the scheduler may use fewer."""
        return _MOST_ROWS if self.max_num_seqs == "auto" else self.max_num_seqs

    @property
    def most_step_tokens(self) -> int:
        """Tokens that a step may have; with "auto" the scheduler may use fewer."""
        tokens = self.max_num_batched_tokens
        return _MOST_STEP_TOKENS if tokens == "auto" else tokens

    @property
    def num_ranks(self) -> int:
        """Processes that the model is split among, on all machines."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_ranks(self) -> int:
        """Ranks on this machine."""
        return self.num_ranks if self.num_local_ranks is None else self.num_local_ranks

    @property
    def draft_ranks(self) -> int:
        """Ranks that the draft model is split among."""
        config = self.speculative_config
        return (config.draft_tensor_parallel_size if config else None) or 1

    @property
    def generation_config_dir(self) -> Path | None:
        """Directory of the generation_config.json that has the defaults of sampling parameters."""
        if self.generation_config == "auto":
            return Path(self.model)
        if self.generation_config in _GENERATION_CONFIG_WORDS:
            return None
        return Path(self.generation_config)

    @property
    def tokenizer_dir(self) -> Path:
        """Directory of the tokenizer's files."""
        return Path(self.tokenizer or self.model)

    @classmethod
    def from_dict(cls, values: dict[str, Any], log: Log = _no_log) -> "EngineArgs":
        """Check names and types.

        Args:
            log: takes a line for each argument without effect: one of vLLM's that has none here,
                or one that needs another argument.

        Raises:
            ConfigError: an unknown key, a wrong type or a value out of range; it is named.
        """
        args = convert(vllm_args.leave_out(values, log), cls, "engine argument")
        defaults = cls(model=args.model)
        for name, needed in _NEEDS.items():
            value = getattr(args, name)
            if value != getattr(defaults, name) and not getattr(args, needed):
                log(f"warning: engine argument {name} = {value!r} has no effect without {needed}")
        return args

    @classmethod
    def from_file(cls, path: Path, log: Log = _no_log) -> "EngineArgs":
        """Read `model.json`; relative paths are relative to its directory.

        Without a `model` it is the demo model, with its draft model unless `speculative_config` is
        given.

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
    """Return an engine's arguments; without a model, add the demo model and its draft model."""
    if "model" in values:
        return values
    draft = {"speculative_config": {"model": str(DEMO_DRAFT_CHECKPOINT)}}
    return draft | values | {"model": str(DEMO_CHECKPOINT)}


def make_paths_absolute(values: dict[str, Any], base: Path) -> None:
    """Make the paths among an engine's arguments absolute: relative to `base`, `~` is the home.

    Raises:
        ConfigError: there is no such home directory.
    """
    speculative = values.get("speculative_config")
    for holder in (values, speculative if isinstance(speculative, dict) else {}):
        for name in ("model", "tokenizer", "generation_config", "kv_cache_path"):
            text = holder.get(name)
            is_word = name == "generation_config" and text in _GENERATION_CONFIG_WORDS
            is_refused = name == "kv_cache_path" and not text
            if isinstance(text, str) and not is_word and not is_refused:
                try:
                    path = Path(text).expanduser()
                except RuntimeError as error:
                    raise ConfigError(f"{name} begins with ~: {error}") from None
                holder[name] = os.path.normpath(base / path)
