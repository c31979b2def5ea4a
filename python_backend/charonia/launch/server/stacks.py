"""The maximum size of the stacks of tritonserver's threads.

Owns that size, and detecting why this machine does not allow it. Must not know processes.

Older tritonservers put a structure for each chunk of a body, and a call frame for each bracket, on
a thread's stack. With the usual 8 MiB, one POST of 200,000 brackets or of a million chunks ended
server 2.51.0 with SIGSEGV. With 4 GiB it survives both, and a hundred times as many brackets or
four times as many chunks. Newer releases have fixed this, see docker/README.md.

A stack is virtual memory: only touched pages cost memory. The limit is left unchanged where virtual
memory is scarce: on a machine that does not overcommit (vm.overcommit_memory=2), and with a limit
of the address space (RLIMIT_AS). 200 GiB of the latter were not enough: tritonserver has some 240
threads, and aborted. Linux also refuses to map a stack that is larger than memory and swap, unless
vm.overcommit_memory=1. A cgroup's limit does not matter, because it counts touched pages.
"""

import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from charonia.events import event, warning_event

STACK_BYTES = 2**32
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_ALWAYS, _NEVER = 1, 2


@dataclass(frozen=True)
class StackLimit:
    """The soft limit (RLIMIT_STACK) of tritonserver.

    Attributes:
        num_bytes: the limit; None leaves it unchanged.
        obstacle: why it is not `STACK_BYTES`; empty if it is.
    """

    num_bytes: int | None
    obstacle: str = ""

    def describe(self) -> str:
        """A line for the log."""
        if not self.obstacle:
            return event("thread_stacks", bytes=STACK_BYTES)
        found = "unchanged" if self.num_bytes is None else self.num_bytes
        reason = f"{self.obstacle}; a hostile HTTP request may end a tritonserver before 26.05"
        return warning_event("thread_stacks_small", bytes=found, reason=reason)


def stack_limit(overcommit: Path = _OVERCOMMIT, total_bytes: int | None = None) -> StackLimit:
    """The stack limit that this machine and the limits of this process allow.

    Args:
        overcommit: the file of vm.overcommit_memory. total_bytes: memory and swap; None reads them.
    """
    mode = _read_number(overcommit)
    if mode == _NEVER:
        return StackLimit(None, "vm.overcommit_memory is 2")
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return StackLimit(None, "the address space is limited (ulimit -v)")
    limit = StackLimit(STACK_BYTES)
    total = _memory_and_swap() if total_bytes is None else total_bytes
    if mode != _ALWAYS and total <= STACK_BYTES:
        has = (
            f"the machine has {total} bytes of memory and swap (and vm.overcommit_memory is not 1)"
        )
        limit = StackLimit(total // 2, has)
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    if hard != resource.RLIM_INFINITY and hard < (limit.num_bytes or 0):
        return StackLimit(hard, f"the hard limit of the stack is {hard} bytes (ulimit -Hs)")
    return limit


def _memory_and_swap() -> int:
    return int(psutil.virtual_memory().total + psutil.swap_memory().total)


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
