"""The engine's arguments: `engine/1/model.json`, with vLLM's names where the meaning is the same.

Owns their names, ranges and defaults, and the demo model that stands in where none is named. Must
not know what an engine makes of them.
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
_MOST_ROWS, _MOST_STEP_TOKENS = 256, 4096  # of those that adapt
_GENERATION_CONFIG_WORDS = ("auto", "none", "vllm")
_NEEDS = {"eviction_policy": "enable_prefix_caching", "kv_cache_file_space": "kv_cache_path"}
"""Arguments that have no effect without another one. They may stay where that is turned off."""


def _no_log(line: str) -> None:
    """Take a log line and do nothing with it."""


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's arguments, from `engine/1/model.json` or the Python API.

    Attributes:
        model: directory of a checkpoint in Hugging Face format; the demo model where model.json
            names none.
        tokenizer: directory of its tokenizer; None is `model`.
        dtype: of the weights and of what is computed; "auto" is what the checkpoint says.
        max_model_len: tokens of prompt and output together; None is what the model supports.
        max_num_seqs: rows, i.e. requests that run at once. "auto" has as many as make steps more
            productive, by what steps take, and as the KV cache has room for, 256 at most; where
            the scheduler's `inter_token_target_ms` is a number, no more than keep it, if one row
            does.
        max_num_batched_tokens: token budget of one step. "auto" has as many as make steps more
            productive, 4,096 at most. It needs `enable_chunked_prefill`.
        block_size: tokens per KV block.
        gpu_memory_utilization: share of a GPU's memory that weights, the largest step and the KV
            cache may take.
        cpu_memory_utilization: on a CPU, where memory is shared with everything else: the KV
            cache's share of what is available beside the largest step; the ranks of a machine
            share it. Available is what the machine and the control groups of the process leave
            when the engine is loaded. The cache never has more than that, also when memory becomes
            free later; the engine has to be loaded again for that.
        memory_reserve: share of the memory of the machine, or of the control group that limits the
            process, that is to be left for others on a CPU. Where less is left, the KV cache
            shrinks, down to what one request may need. It grows again when there is twice as much;
            up to then it also shrinks while all processes wait for memory. Only the machine of rank
            0 is watched; ranks on other machines follow it, however much memory is free there. 0
            has it stay as it is, as do the next two.
        kv_cache_memory_bytes: of each rank's KV cache, in place of a share of the memory; None
            measures at start what the largest step leaves.
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
        enable_prefix_sharing: of several requests with a long common prefix that is not cached, let
            one compute it, and the others wait for that, no longer than it would take each of them
            alone. It needs `enable_prefix_caching`.
        eviction_policy: which cached blocks are given up first when new ones are needed:
            "adaptive", those that by what was learned of blocks like them bring the fewest hits for
            the time that they are kept; "lru", the least recently used; "lfu", those with the
            fewest hits; "fifo", the oldest; "w_tinylfu", "s3_fifo" or "arc", three ways to keep
            what is asked for again and again from being washed out by what is asked for once.
            Blocks that continue others go first. Without `enable_prefix_caching` it has no effect,
            which the log says.
        kv_events_config: whom to tell what the prefix cache holds, such as a router that sends
            requests to where their prefix is, see `KVEventsConfig`; None tells nobody. It needs
            `enable_prefix_caching`.
        swap_space: GiB of the host's memory, for each rank, that keep blocks of the prefix cache
            which were hit, also when the KV cache has given them up; 0 is none. It needs
            `enable_prefix_caching`, as does the next one.
        kv_cache_path: a directory whose files do the same, and outlive engine, server and machine;
            `~` is the home, None is none. Servers may share it: each uses files of its own.
            Whoever can read them can read what the cache knows of prompts.
        kv_cache_file_space: GiB that such a file may take, one for each rank. Without
            `kv_cache_path` it has no effect, which the log says.
        enable_chunked_prefill: let a prompt be computed over several steps.
        speculative_config: how to guess tokens ahead, see `SpeculativeConfig`; None does not.
        generation_config: where defaults of sampling parameters come from: "auto" is the
            checkpoint's generation_config.json, or where it has none its config.json; "none" (or
            vLLM's word "vllm") is nothing; anything else is the directory of such a file.
        kv_cache_dtype: how keys and values are kept: "auto" is in the weights' dtype; "int8" and
            "fp8" (e4m3) in 8 bits and a scale for each token and head; "int4" in 4 bits and a scale
            for every 32 numbers, for models whose heads have a multiple of that many. "fp8_e4m3"
            is vLLM's word for "fp8".
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
    quantization: Literal["int8"] | None = None
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
        """Whom to tell what the prefix cache holds; None where nobody is told."""
        config = self.kv_events_config
        return config if config is not None and config.is_on else None

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
            log: takes a line for each argument that has no effect: here, if it is vLLM's, or
                without another argument.

        Raises:
            ConfigError: an unknown key, a wrong type or a value out of range; it is named.
        """
        args = convert(vllm_args.leave_out(values, log), cls, "engine argument")
        defaults = cls(model=args.model)
        for name, needed in _NEEDS.items():
            value = getattr(args, name)
            if value != getattr(defaults, name) and not getattr(args, needed):
                log(f"engine argument {name} = {value!r} has no effect without {needed}")
        return args

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


def make_paths_absolute(values: dict[str, Any], base: Path) -> None:
    """Take the paths among an engine's arguments as relative to `base`; `~` is the home.

    Raises:
        ConfigError: there is no such home.
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
