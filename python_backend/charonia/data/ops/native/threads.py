"""Which threads compute, and on which cores.

Owns the layout: one pool computes, no other. Must not know what is computed.

The pool has a thread for each core that the process may use; the first is whoever runs the steps,
and is never bound: what it starts, threads and processes, would be bound with it. While a step
runs they look for work without sleeping, so that an operation of a few microseconds can be shared
out; 0.2 ms after the last one they sleep. Everything else (Triton's own threads, the scheduler, the
client) takes turns with them as the operating system sees fit: work is claimed in small pieces, and
nobody waits for a thread that has none.
"""

import os
from dataclasses import dataclass

from charonia.errors import ConfigError


@dataclass(frozen=True)
class ThreadLayout:
    """How many threads compute, and the core of each; no cores leaves them unbound.

    The first core is the one that is left to the first thread.
    """

    num_threads: int
    cores: tuple[int, ...]

    @classmethod
    def of(
        cls, num_threads: int | None, binding: str, local_rank: int = 0, num_local_ranks: int = 1
    ) -> "ThreadLayout":
        """Lay the threads of one rank out, beside those of the others on this machine.

        Args:
            num_threads: None is one per core that this process may use, shared out among the ranks.
            binding: "auto" binds each thread to a core where there is one for each, and leaves
                them to the operating system where there are fewer threads than cores, or more;
                "none" never binds; else a list of cores such as "0-3,8", one per thread.

        Raises:
            ConfigError: the list makes no sense, names a core that the process may not use, or
                has fewer cores than there are threads.
        """
        allowed = sorted(os.sched_getaffinity(0))
        cores = allowed if binding in ("auto", "none") else _parse(binding, allowed)
        count = num_threads or max(len(cores) // num_local_ranks, 1)
        num_all = count * num_local_ranks
        if cores is not allowed and num_all > len(cores):
            ranks = f" for each of {num_local_ranks} ranks" if num_local_ranks > 1 else ""
            raise ConfigError(
                f"cpu_threads = {count}{ranks}, but cpu_binding = {binding!r} names {len(cores)}"
                " cores; there must be one for each thread"
            )
        if binding == "none" or (binding == "auto" and num_all != len(allowed)):
            return cls(count, ())
        return cls(count, tuple(cores[local_rank * count : (local_rank + 1) * count]))

    def __str__(self) -> str:
        threads = f"{self.num_threads} thread" + "s" * (self.num_threads != 1)
        if not self.cores:
            return f"{threads}, not bound"
        return f"{threads} on core{'s' * (len(self.cores) != 1)} {', '.join(map(str, self.cores))}"


def _parse(binding: str, allowed: list[int]) -> list[int]:
    cores: list[int] = []
    for part in binding.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(
                f"cpu_binding = {binding!r}; accepted are 'auto', 'none' and cores such as '0-3,8'"
            )
        cores += range(int(first), int(last or first) + 1)
    if unknown := [core for core in cores if core not in allowed]:
        raise ConfigError(
            f"cpu_binding = {binding!r} names core {unknown[0]}, which this process may not use;"
            f" it may use {', '.join(map(str, allowed))}"
        )
    if not cores or len(set(cores)) != len(cores):
        raise ConfigError(f"cpu_binding = {binding!r} must name some cores, each of them once")
    return cores
