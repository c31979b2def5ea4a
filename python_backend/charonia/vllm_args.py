"""vLLM's engine arguments that have no effect here, so that a model.json of its backend works.

Owns their names, and the values at which they have no effect. Any other value asks for something
that is not supported, and is refused. Knows nothing about arguments with an effect, which are in
`EngineArgs`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from charonia.checkpoint_files import is_one_of
from charonia.errors import ConfigError, shown

_ANY: tuple[Any, ...] | None = None

BY_REASON: Mapping[str, Mapping[str, tuple[Any, ...] | None]] = {
    "steps are neither compiled nor captured by vLLM's means": {
        "compilation_config": _ANY,
        "cuda_graph_sizes": _ANY,
        "disable_cascade_attn": _ANY,
        "disable_custom_all_reduce": _ANY,
        "enforce_eager": _ANY,
        "max_context_len_to_capture": _ANY,
        "max_seq_len_to_capture": _ANY,
    },
    "metrics and the log are Triton's": {
        "disable_log_stats": _ANY,
        "collect_detailed_traces": (),
        "otlp_traces_endpoint": (),
    },
    "what the log says of requests is a setting of the server (--log-level, --log-prompts)": {
        "disable_log_requests": _ANY,
        "enable_log_requests": _ANY,
        "max_log_len": _ANY,
    },
    "a checkpoint is a directory of safetensors files, and no code in it is ever run": {
        "code_revision": (),
        "config_format": ("auto", "hf"),
        "download_dir": _ANY,
        "hf_overrides": ({},),
        "hf_token": _ANY,
        "ignore_patterns": _ANY,
        "load_format": ("auto", "safetensors"),
        "max_parallel_loading_workers": _ANY,
        "model_impl": ("auto", "vllm"),
        "revision": (),
        "safetensors_load_strategy": _ANY,
        "skip_tokenizer_init": (False,),
        "tokenizer_mode": ("auto", "fast", "hf"),
        "tokenizer_revision": (),
        "trust_remote_code": (False,),
        "use_tqdm_on_load": _ANY,
    },
    "there are no adapters": {
        "enable_lora": (False,),
        "enable_lora_bias": (False,),
        "fully_sharded_loras": (False,),
        "lora_dtype": _ANY,
        "lora_extra_vocab_size": _ANY,
        "max_cpu_loras": _ANY,
        "max_lora_rank": _ANY,
        "max_loras": _ANY,
    },
    "a preempted request is computed anew, and no weights are offloaded": {
        "cpu_offload_gb": (0,),
        "kv_transfer_config": (),
        "preemption_mode": ("recompute",),
    },
    "how the engine runs its steps and its ranks is its own": {
        "data_parallel_size": (1,),
        "disable_async_output_proc": _ANY,
        "distributed_executor_backend": ("mp", "uni"),
        "enable_expert_parallel": (False,),
        "max_logprobs": (20,),
        "max_long_partial_prefills": (1,),
        "max_num_partial_prefills": (1,),
        "num_scheduler_steps": _ANY,
        "ray_workers_use_nsight": (False,),
        "scheduler_delay_factor": (0,),
        "use_v2_block_manager": _ANY,
        "worker_use_ray": (False,),
    },
    "text is all that it takes and generates": {
        "convert": ("auto", "none"),
        "disable_mm_preprocessor_cache": _ANY,
        "enable_prompt_embeds": (False,),
        "limit_mm_per_prompt": _ANY,
        "mm_processor_kwargs": (),
        "runner": ("auto", "generate"),
        "task": ("auto", "generate"),
    },
}
"""Arguments by the reason why they have no effect, each with the values at which it has none.

null is always accepted; None stands for any value.
"""

_ACCEPTED = {name: accepted for names in BY_REASON.values() for name, accepted in names.items()}
_SECRETS = ("hf_token",)
_WHY = {name: why for why, names in BY_REASON.items() for name in names}


def leave_out(values: Mapping[str, Any], log: Callable[[str], None]) -> dict[str, Any]:
    """The engine arguments without those of vLLM that have no effect here.

    Args:
        log: takes a line for each argument that is left out.

    Raises:
        ConfigError: one of them has a value that would have an effect; the text names it. null
            never has an effect.
    """
    for name, value in values.items():
        if name not in _ACCEPTED:
            continue
        accepted = _ACCEPTED[name]
        if accepted is not None and not is_one_of(value, (*accepted, None)):
            choices = " or ".join(map(shown, (*accepted, None)))
            raise ConfigError(
                f"engine argument {name} = {shown(value)} is not supported: {_WHY[name]};"
                f" accepted is {choices}"
            )
        text = name if name in _SECRETS else f"{name} = {shown(value)}"
        log(f"engine argument {text} has no effect: {_WHY[name]}")
    return {name: value for name, value in values.items() if name not in _ACCEPTED}
