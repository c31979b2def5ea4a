"""Growth of each process of a server at rest, compared with before the faults.

Owns the comparison and its bounds. Must not know the other criteria of a campaign.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from faults.kinds import KINDS
from faults.outcome import FaultRecord, Rest

MAX_FDS = 8
MAX_THREADS = 4
"""Growth that need not be a leak, for any number of faults."""

MAX_BYTES = 16 * 2**20
MAX_BYTES_PER_FAULT = 64 * 2**10
"""Growth of resident memory that need not be a leak. Measured over 30 faults: tritonserver took 2.4
MiB more in the first ten, then 33 KiB per fault with all the calls between two of them, the
scheduler 0.5 MiB and 27 KiB. The part per fault applies to processes that lived through them."""

SERVER = "tritonserver"
KEPT_FDS, KEPT_THREADS, KEPT_BYTES = 1, 35, 2 * 2**20
"""Resources that tritonserver 2.51.0 has for each process of a model. If a process is lost while it
has requests, it keeps them until its own end, for the model's sake that these requests still name:
20 processes left 20 open files, 700 threads and 30 MiB. Their model goes with all its processes."""


@dataclass(frozen=True)
class Growth:
    """Growth of one process since some faults before, or compared with its predecessor.

    Attributes:
        num_faults: faults that it lived through; 0 if it took another's place.
        num_kept: lost processes of which it may keep something.
        num_fds: 0 if it did: it was started with the files that tritonserver had open then.
    """

    role: str
    num_faults: int
    num_kept: int
    rss_bytes: int
    num_fds: int
    num_threads: int

    @property
    def max_rss_bytes(self) -> int:
        """Limit of its growth in resident memory."""
        return MAX_BYTES + MAX_BYTES_PER_FAULT * self.num_faults + KEPT_BYTES * self.num_kept

    @property
    def max_fds(self) -> int:
        """Limit of its growth in open files."""
        return MAX_FDS + KEPT_FDS * self.num_kept

    @property
    def max_threads(self) -> int:
        """Limit of its growth in threads."""
        return MAX_THREADS + KEPT_THREADS * self.num_kept


def growths(rests: Sequence[Rest], faults: Sequence[FaultRecord] = ()) -> list[Growth]:
    """Compare each rest with the next, for all processes of a role that the first one has."""
    return [
        growth
        for before, after in pairwise(rests)
        for growth in _between(before, after, rests[0], _num_kept(before, after, faults))
    ]


def _num_kept(before: Rest, after: Rest, faults: Sequence[FaultRecord]) -> int:
    between = range(before.num_faults + 1, after.num_faults + 1)
    return sum(KINDS[fault.kind].num_kept for fault in faults if fault.number in between)


def _between(before: Rest, after: Rest, first: Rest, num_kept: int) -> Iterator[Growth]:
    same = {(each.pid, each.created): each for each in before.footprint.processes}
    # The largest of its role, where there are several.
    largest = {
        each.role: each
        for each in sorted(first.footprint.processes, key=lambda each: each.rss_bytes)
    }
    for process in after.footprint.processes:
        earlier = same.get((process.pid, process.created))
        if earlier is not None:
            yield Growth(
                role=process.role,
                num_faults=after.num_faults - before.num_faults,
                num_kept=num_kept if process.role == SERVER else 0,
                rss_bytes=process.rss_bytes - earlier.rss_bytes,
                num_fds=process.num_fds - earlier.num_fds,
                num_threads=process.num_threads - earlier.num_threads,
            )
        elif process.role in largest:
            predecessor = largest[process.role]
            yield Growth(
                role=process.role,
                num_faults=0,
                num_kept=0,
                rss_bytes=process.rss_bytes - predecessor.rss_bytes,
                num_fds=0,
                num_threads=process.num_threads - predecessor.num_threads,
            )
