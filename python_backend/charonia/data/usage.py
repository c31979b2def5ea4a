"""The memory of a device that this process uses: now, and at the peak of some work.

Owns reading and resetting the counters of the kernel and of torch. Must not know what the memory is
used for, or how much is left (`memory`).
"""

import contextlib
import re
import resource
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # man 5 proc: resets the peak resident set size to the current one


def used_bytes(device: torch.device) -> int:
    """The memory of this process: on a CPU its resident set, on a GPU torch's allocations."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def transient_bytes(work: Callable[[], None], device: torch.device) -> int:
    """Run some work; return its peak memory beyond what stays allocated afterwards.

    Memory that stays allocated (a library's workspace, buffers that are kept) is not counted,
    because it already reduces the device's available memory. If the kernel does not allow resetting
    the peak, that of the whole process so far is used, which is at least as high.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    with contextlib.suppress(OSError):
        _RESET.write_text(_RESET_PEAK, encoding="ascii")
    work()
    return max(_peak_resident() - used_bytes(device), 0)


def _peak_resident() -> int:
    """The largest resident set since the peak was reset, in bytes."""
    with contextlib.suppress(OSError):
        if line := re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text("ascii"), re.MULTILINE):
            return int(line[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
