"""The W3C trace context of a request.

Owns the form of `traceparent`: https://www.w3.org/TR/trace-context/#traceparent-header.
"""

import re
from typing import NamedTuple

TRACEPARENT = "traceparent"
"""The header's name; over gRPC it is a key of the metadata."""

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[ -~]*)?", re.ASCII)
_SAMPLED = 1


class TraceContext(NamedTuple):
    """The place of a request in a trace.

    Attributes:
        trace_id: 128 bits. span_id: 64 bits, of the span that the request belongs to.
        is_sampled: whether that span is recorded.
    """

    trace_id: int
    span_id: int
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        """Header of version 00, without additions of the client."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"

    @property
    def hex_trace_id(self) -> str:
        """The trace id as others show it: 32 hexadecimal digits."""
        return f"{self.trace_id:032x}"


def parse_traceparent(text: str | None) -> TraceContext | None:
    """Parse a `traceparent`; None if there is none, or if it is not valid.

    A later version than 00 may have more fields, which are ignored.
    """
    found = None if text is None else _FORM.fullmatch(text.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))


def trace_id_of(text: str | None) -> str | None:
    """The trace id of a `traceparent`, as `hex_trace_id`; None if it has none that is valid."""
    context = parse_traceparent(text)
    return None if context is None else context.hex_trace_id
