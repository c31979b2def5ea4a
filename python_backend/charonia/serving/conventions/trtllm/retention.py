"""KV cache retention: TensorRT-LLM's ranges as `cache_priority`.

Owns the meaning of these inputs. TensorRT-LLM's ranges are of the prompt only; generated tokens
have a priority of their own.
"""

from typing import Any

import numpy as np

from charonia.errors import InvalidRequestError
from charonia.protocol import MAX_CACHE_RANGES
from charonia.serving.conventions.trtllm.rows import Row

_NONE = -1
"""Value for no end, or no time."""
_STARTS = "retention_token_range_starts"
_ENDS = "retention_token_range_ends"
_PRIORITIES = "retention_token_range_priorities"
_DURATIONS = "retention_token_range_durations_ms"


def retention_of(row: Row, num_prompt: int) -> dict[str, Any]:
    """The sampling parameters of a request's retention; empty without any.

    Raises:
        InvalidRequestError: the inputs have different lengths, or too many values.
    """
    starts = _values(row, _STARTS)
    columns = [starts]
    for name in (_ENDS, _PRIORITIES, _DURATIONS):
        values = _values(row, name)
        if name == _DURATIONS and name not in row.tensors:
            values = [_NONE] * len(starts)
        if len(values) != len(starts):
            raise InvalidRequestError(
                f"{name} must be as many as {_STARTS}, but are {len(values)} for {len(starts)}"
            )
        columns.append(values)
    ranges = [
        _range(start, num_prompt if end == _NONE else min(end, num_prompt), priority, duration_ms)
        for start, end, priority, duration_ms in zip(*columns, strict=True)
        if start < num_prompt
    ]
    priority = row.one("retention_decode_priority")
    if priority is not None:
        duration_ms = row.one("retention_decode_duration_ms", _NONE)
        ranges.append(_range(num_prompt, None, priority, duration_ms))
    return {"cache_priority": ranges} if ranges else {}


def _values(row: Row, name: str) -> list[int]:
    values = row.tensors.get(name, np.array([], dtype=np.int32)).ravel()
    if len(values) >= MAX_CACHE_RANGES:  # one may be added for what is generated
        raise InvalidRequestError(
            f"{name} must have at most {MAX_CACHE_RANGES - 1} values, but has {len(values)}"
        )
    found: list[int] = values.tolist()
    return found


def _range(start: int, end: int | None, priority: int, duration_ms: int) -> dict[str, Any]:
    ttl_s = None if duration_ms == _NONE else duration_ms / 1000
    return {"start": start, "end": end, "priority": priority, "ttl_s": ttl_s}
