"""Requests taken apart as the scheduler does, with a sealer that the tests know."""

from typing import Any

from charonia.serving.conventions.schema import Call, PromptLimits
from charonia.serving.conventions.schema import parse as parse_call
from charonia.serving.requests.raw_request import RawRequest
from charonia.serving.requests.request_key import Sealer

SEALER = Sealer(bytes(32))
WIDEST = PromptLimits()


def parse(
    raw: RawRequest, relayed_key: str | None = None, *, limits: PromptLimits = WIDEST, **more: Any
) -> Call:
    """Parse as `schema.parse` does."""
    return parse_call(raw, relayed_key, limits=limits, sealer=SEALER, **more)
