"""Memory that is not given, for real: the limit of a process' address space."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def limited_memory(spare: int) -> Iterator[None]:
    """Limit the memory of this process meanwhile, to `spare` bytes more of the operating system.

    For a process of a test's own: whatever else runs in it is refused memory as well.
    """
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
