"""Our numbers under the names of vLLM and TensorRT-LLM, so that others' tools read them.

Owns how they are made of ours. Must not know how they are exported.
"""

from collections.abc import Mapping

from charonia.metrics.metric_table import BY_NAME, Kind
from charonia.metrics.metrics import Series


def shown_again(kind: Kind, values: Mapping[Series, float]) -> dict[Series, float]:
    """Return the values of all counters, or gauges, that show others: see `Metric.shows`."""
    found: dict[Series, float] = {}
    for name, metric in BY_NAME.items():
        if metric.kind == kind and metric.shows:
            if metric.label:
                for label in metric.values:
                    found[name, label] = values.get((metric.shows, label), 0.0)
            else:
                labels = BY_NAME[metric.shows].values or ("",)
                found[name, ""] = sum(values.get((metric.shows, label), 0.0) for label in labels)
    return found


def gauges_of_others(gauges: Mapping[Series, float], block_size: int) -> dict[Series, float]:
    """Return the gauges of others that are more than one of ours by another name.

    Args:
        gauges: ours. block_size: tokens per KV block.
    """
    running, waiting, rows = (
        gauges.get((f"charonia_{name}", ""), 0.0)
        for name in ("requests_running", "requests_waiting", "max_rows")
    )
    total, aside, used = (
        gauges.get(("charonia_kv_blocks", state), 0.0) for state in ("total", "aside", "used")
    )
    usable = total - aside
    share = used / usable if usable else 0.0
    return {
        ("nv_trt_llm_kv_cache_block_metrics", "max"): usable,
        ("nv_trt_llm_kv_cache_block_metrics", "used"): used,
        ("nv_trt_llm_kv_cache_block_metrics", "free"): usable - used,
        ("nv_trt_llm_kv_cache_block_metrics", "tokens_per"): float(block_size),
        ("nv_trt_llm_kv_cache_block_metrics", "fraction"): share,
        ("nv_trt_llm_request_metrics", "active"): running + waiting,
        ("nv_trt_llm_request_metrics", "scheduled"): running,
        ("nv_trt_llm_request_metrics", "waiting"): waiting,
        ("nv_trt_llm_request_metrics", "max"): rows,
        ("vllm:kv_cache_usage_perc", ""): share,
    }


def cache_config_of_vllm(gauges: Mapping[Series, float], block_size: int) -> dict[str, str]:
    """Return the labels of `vllm:cache_config_info`, which describe the KV cache."""
    num_blocks = int(gauges.get(("charonia_kv_blocks", "total"), 0.0))
    return {"block_size": f"{block_size}", "num_gpu_blocks": f"{num_blocks}"}
