"""Configuration of the engine and of the scheduler, checked once, where it is read.

Knows nothing about Triton or torch.
"""

from charonia.config.engine_args import (
    DEMO_CHECKPOINT,
    DEMO_DRAFT_CHECKPOINT,
    EngineArgs,
    SchedulingPolicy,
    make_paths_absolute,
    with_demo_model,
)
from charonia.config.kv_events_config import KVEventsConfig
from charonia.config.scheduler_args import MIN_ANSWER_BYTES, PATH_PARAMETERS, SchedulerArgs
from charonia.config.speculative_config import SpeculativeConfig
from charonia.config.values import PositiveInt, Quantization, convert

__all__ = [
    "DEMO_CHECKPOINT",
    "DEMO_DRAFT_CHECKPOINT",
    "MIN_ANSWER_BYTES",
    "PATH_PARAMETERS",
    "EngineArgs",
    "KVEventsConfig",
    "PositiveInt",
    "Quantization",
    "SchedulerArgs",
    "SchedulingPolicy",
    "SpeculativeConfig",
    "convert",
    "make_paths_absolute",
    "with_demo_model",
]
