"""Reads the log of tritonserver.

Owns the choice of lines that are shown without `--verbose`, and finding the reason of a failed
start. Must not know processes.
"""

import re
from collections.abc import Iterable

_LINE = re.compile(r"^(?P<severity>[IWEF])\d{4} \S+ \d+ (?P<source>[^:\]]+):\d+\] ?(?P<text>.*)$")
_OURS = re.compile(r"^\[[^\]\s]+\] ")
_UNCAUGHT = re.compile(r"^  what\(\):  (?P<reason>.+)$")
_LOAD_FAILURE = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*)")

# Lines that every server logs on a machine without a GPU, and the tables of its start.
_NOISE = (
    "CUDA driver version is insufficient for CUDA runtime version",
    "no pinned memory pool",
    "CudaDriverHelper has not been initialized",
    "DCGM unable to start",
    "Failed to initialize NVML",
    "Signal (15) received.",
    # Of a failed start, which the launcher explains in one line (`failure_reason`).
    "Failed to create instance: TritonModelException",
    "failed to load '",
    "which has no loaded version",
    "error: creating server",
)
_EXCEPTION = re.compile(
    r"^(?:Internal: )?(?:TritonModelException: )?(?P<text>.*?)(?:\\n\\nAt:.*)?$"
)


def is_interesting(line: str) -> bool:
    """Whether a line is a warning, an error, or logged by a Python model (these are ours)."""
    if _OURS.match(line):
        return True  # even if it quotes Triton
    if any(noise in line for noise in _NOISE) or not line or line.startswith(("+-", "| ")):
        return False
    match = _LINE.match(line)
    return match is None or match["severity"] != "I" or match["source"].endswith(".py")


def failure_reason(lines: Iterable[str]) -> str | None:
    """The first reason in the log for a failed start, in one line; None if there is none."""
    first_error = None
    for line in lines:
        if failure := _LOAD_FAILURE.search(line):
            reason = _EXCEPTION.sub(r"\g<text>", failure["reason"].strip().rstrip('"'))
            return f"model {failure['model']!r} cannot be loaded: {reason}"
        match = _LINE.match(line)
        if match and match["severity"] in "EF" and is_interesting(line):
            first_error = first_error or match["text"].strip('"')
    return first_error


def crash_reason(lines: Iterable[str]) -> str:
    """The C++ library's message about an uncaught exception; empty if there is none."""
    return next((found["reason"] for line in lines if (found := _UNCAUGHT.match(line))), "")
