"""Gauges under the names of vLLM and TensorRT-LLM, made of ours, so that others' tools read them.

Owns which of our gauges answers which of theirs. Must not know how they are exported. Counters and
histograms need no more than `Metric.shows`.
"""

from collections.abc import Iterator, Mapping

from charonia.metrics.metric_table import (
    CACHE_CONFIG,
    KV_BLOCKS,
    KV_USAGE,
    MAX_ROWS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    TRITON_BLOCKS,
    TRITON_REQUESTS,
    Metric,
)
from charonia.metrics.metrics import Series

Gauge = tuple[Metric, str, float]
"""A metric, the value of its label, and its own value."""


def gauges_of_triton(gauges: Mapping[Series, float], block_size: int) -> Iterator[Gauge]:
    """Yield the gauges that TensorRT-LLM's backend has.

    Args:
        gauges: ours. block_size: tokens per KV block.
    """
    usable, used = _blocks(gauges)
    for label, blocks in (("max", usable), ("used", used), ("free", usable - used)):
        yield TRITON_BLOCKS, label, blocks
    yield TRITON_BLOCKS, "tokens_per", float(block_size)
    yield TRITON_BLOCKS, "fraction", used / usable if usable else 0.0
    running, waiting = _of(gauges, REQUESTS_RUNNING), _of(gauges, REQUESTS_WAITING)
    yield TRITON_REQUESTS, "active", running + waiting
    yield TRITON_REQUESTS, "scheduled", running
    yield TRITON_REQUESTS, "waiting", waiting
    yield TRITON_REQUESTS, "max", _of(gauges, MAX_ROWS)


def gauges_of_vllm(gauges: Mapping[Series, float]) -> Iterator[Gauge]:
    """Yield the gauges of vLLM that are not one of ours by another name."""
    usable, used = _blocks(gauges)
    yield KV_USAGE, "", used / usable if usable else 0.0


def infos_of_vllm(gauges: Mapping[Series, float], block_size: int) -> dict[str, dict[str, str]]:
    """Return the labels of vLLM's metrics that say something by their labels, by name."""
    num_blocks = int(gauges.get((KV_BLOCKS.name, "total"), 0.0))
    values = (str(block_size), str(num_blocks))
    return {CACHE_CONFIG.name: dict(zip(CACHE_CONFIG.info, values, strict=True))}


def _blocks(gauges: Mapping[Series, float]) -> tuple[float, float]:
    """The blocks that can be used at the moment, and those in use."""
    total, aside, used = (
        gauges.get((KV_BLOCKS.name, state), 0.0) for state in ("total", "aside", "used")
    )
    return total - aside, used


def _of(gauges: Mapping[Series, float], metric: Metric) -> float:
    return gauges.get((metric.name, ""), 0.0)
