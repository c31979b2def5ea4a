"""How much more each process of a server holds at rest than before the faults.

Owns the comparison and its bounds. Must not know what else must hold of a campaign.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from faults.footprint import ProcessFootprint
from faults.outcome import Rest

MAX_FDS = 8
MAX_THREADS = 4
"""What need not be a leak, however many faults there were."""

MAX_BYTES = 16 * 2**20
MAX_BYTES_PER_FAULT = 64 * 2**10
"""Resident memory. Measured over 30 faults: tritonserver took 2.4 MiB more in the first ten, then
33 KiB per fault with all the calls between two of them, the scheduler 0.5 MiB and 27 KiB. What is
per fault applies to processes that lived through them."""


@dataclass(frozen=True)
class Growth:
    """Of one process: what it has more than itself before some faults, or than its predecessor.

    Attributes:
        num_faults: that it lived through; 0 if it took another's place.
        num_fds: 0 if it did: it was started with what tritonserver had open at that moment.
    """

    role: str
    num_faults: int
    rss_bytes: int
    num_fds: int
    num_threads: int

    @property
    def max_rss_bytes(self) -> int:
        """How much more it may hold."""
        return MAX_BYTES + MAX_BYTES_PER_FAULT * self.num_faults


def growths(rests: Sequence[Rest]) -> list[Growth]:
    """From each rest to the next, of all processes of a role that was there at first."""
    return [
        growth for before, after in pairwise(rests) for growth in _between(before, after, rests[0])
    ]


def _between(before: Rest, after: Rest, first: Rest) -> Iterator[Growth]:
    same = {(each.pid, each.created): each for each in before.footprint.processes}
    # The largest of its role, where there are several.
    largest = {
        each.role: each
        for each in sorted(first.footprint.processes, key=lambda each: each.rss_bytes)
    }
    for process in after.footprint.processes:
        earlier = same.get((process.pid, process.created))
        if earlier is not None:
            num_fds = process.num_fds - earlier.num_fds
            yield _growth(process, earlier, after.num_faults - before.num_faults, num_fds)
        elif process.role in largest:
            yield _growth(process, largest[process.role], num_faults=0, num_fds=0)


def _growth(
    now: ProcessFootprint, before: ProcessFootprint, num_faults: int, num_fds: int
) -> Growth:
    return Growth(
        now.role,
        num_faults,
        now.rss_bytes - before.rss_bytes,
        num_fds,
        now.num_threads - before.num_threads,
    )
