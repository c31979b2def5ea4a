"""The threads that compute, and their cores.

Owns the layout. All computation uses charonia's own thread pool. Must not know what is computed.

The pool has a thread for each core that the process may use. The first thread is the one that runs
the steps. It is never bound to a core, because threads and processes that it starts would inherit
that. During a step the threads poll for work without sleeping, so even an operation of a few
microseconds can be parallel. They sleep 0.2 ms after the last operation. Other processes (Triton's
own threads, the scheduler, the client) share the cores as the operating system decides. Work is
claimed in small pieces, so no thread waits for one that lost its core.
"""

import os
from dataclasses import dataclass

from charonia.errors import ConfigError


@dataclass(frozen=True)
class ThreadLayout:
    """The number of threads that compute, and the core of each; without cores they are not bound.

    The first core is left to the first thread.
    """

    num_threads: int
    cores: tuple[int, ...]

    @classmethod
    def of(
        cls, num_threads: int | None, binding: str, local_rank: int = 0, num_local_ranks: int = 1
    ) -> "ThreadLayout":
        """Lay out the threads of one rank, beside those of the other ranks of this machine.

        Args:
            num_threads: None takes one per core that this process may use, split among the ranks.
            binding: "auto" binds each thread to a core if there are as many threads as cores, and
                does not bind otherwise; "none" never binds; a list such as "0-3,8" has one core per
                thread.

        Raises:
            ConfigError: the list is invalid, names a core that the process may not use, or has
                fewer cores than threads.
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
