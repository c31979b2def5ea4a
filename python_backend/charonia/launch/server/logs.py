"""Reads the log of tritonserver.

Owns which of its lines a person sees without `--verbose`, and how the reason of a failed start is
found in it. Must not know processes.
"""

import re
from collections.abc import Iterable

_LINE = re.compile(r"^(?P<severity>[IWEF])\d{4} \S+ \d+ (?P<source>[^:\]]+):\d+\] ?(?P<text>.*)$")
_OURS = re.compile(r"^\[[^\]\s]+\] ")
_UNCAUGHT = re.compile(r"^  what\(\):  (?P<reason>.+)$")
_LOAD_FAILURE = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*)")

# What a server says on a machine without a GPU, whatever it serves, and the tables of its start.
_NOISE = (
    "CUDA driver version is insufficient for CUDA runtime version",
    "no pinned memory pool",
    "CudaDriverHelper has not been initialized",
    "DCGM unable to start",
    "Failed to initialize NVML",
    "Signal (15) received.",
    # A failed start, which the launcher explains in one line (`failure_reason`).
    "Failed to create instance: TritonModelException",
    "failed to load '",
    "which has no loaded version",
    "error: creating server",
)
_EXCEPTION = re.compile(
    r"^(?:Internal: )?(?:TritonModelException: )?(?P<text>.*?)(?:\\n\\nAt:.*)?$"
)


def is_interesting(line: str) -> bool:
    """Whether a line is a warning, an error, or said by a Python model (they are ours)."""
    if _OURS.match(line):
        return True  # whatever Triton's words it repeats
    if any(noise in line for noise in _NOISE) or not line or line.startswith(("+-", "| ")):
        return False
    match = _LINE.match(line)
    return match is None or match["severity"] != "I" or match["source"].endswith(".py")


def failure_reason(lines: Iterable[str]) -> str | None:
    """The first reason that the log gives for a failed start, in one line, if it gives any."""
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
    """What the C++ library says of an exception that nobody took; empty where it says nothing."""
    return next((found["reason"] for line in lines if (found := _UNCAUGHT.match(line))), "")
