"""charonia: serve large language models from an ordinary NVIDIA Triton model repository."""

from typing import TYPE_CHECKING, Any

from charonia.protocol import CacheRange, SamplingParams
from charonia.version import VERSION

if TYPE_CHECKING:
    from charonia.llm import LLM

__all__ = ["LLM", "CacheRange", "SamplingParams"]
__version__ = VERSION


def __getattr__(name: str) -> Any:
    """Import `LLM` on first use: it brings torch, which the scheduler's process must not load."""
    if name == "LLM":
        from charonia.llm import LLM

        return LLM
    raise AttributeError(f"module 'charonia' has no attribute {name!r}")
