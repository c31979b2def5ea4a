"""Requests as the control plane sees them, for tests that care for their tokens alone."""

from collections.abc import Sequence
from typing import Any

from charonia.control import Request
from charonia.protocol import RowSampling


def make_request(token_ids: Sequence[int], key: str, **values: Any) -> Request:
    """A request whose tokens so far are its prompt; `values` are other fields of it."""
    return Request(
        key=key,
        token_ids=list(token_ids),
        num_prompt=len(token_ids),
        sampling=RowSampling(seed=1),
        max_tokens=100,
        stop_ids=frozenset(),
        arrived_at=0.0,
        **values,
    )
