"""Observations of a campaign: every fault, every answer, the server at rest, and their sums.

Owns the data. Must not know how any of it was observed, nor the criteria.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from faults.calls import Answer
from faults.footprint import Footprint
from faults.kinds import KINDS, Kind


@dataclass(frozen=True)
class FaultRecord:
    """One fault and what came of it; times in seconds.

    Attributes:
        number: from 1. kind: its name. victim: what was struck.
        at, until: `time.monotonic` of the fault, and when all lanes had gone on.
        num_engines, num_servers: lost.
        outage: from the fault until what it should break was there again; None if it did not.
        is_answered_right: a poisoned call failed, for the right reason.
        recovery: from the fault until a lane went on that had to wait, ascending.
        pause: the longest in a lane that need not wait, or None if there is none.
        hanging: lanes that did not go on.
    """

    number: int
    kind: str
    victim: str
    at: float
    until: float
    num_engines: int
    num_servers: int
    outage: float | None
    is_answered_right: bool
    recovery: Sequence[float]
    pause: float | None
    hanging: Sequence[int]

    def excuses(self, answer: Answer) -> bool:
        """Return whether a call may have ended with an error because of this fault."""
        if not self.at <= answer.ended_at <= self.until:
            return False
        kind = KINDS[self.kind]
        if self.num_servers:
            return self.num_servers <= kind.max_servers
        return kind.may_fail(answer.entry, answer.num_tokens)


@dataclass(frozen=True)
class Rest:
    """The server when nothing runs.

    Attributes:
        num_faults: that had come by then.
        busy: what must be 0 on the metrics page, by its name.
    """

    num_faults: int
    busy: dict[str, float]
    footprint: Footprint


@dataclass(frozen=True)
class Summary:
    """Recovery after the faults of one kind, in seconds.

    Attributes:
        num_engines, num_servers: that these faults cost in all.
        first, last: of each fault's first and last lane that had to wait.
        pause: of the lanes that had not, each fault's longest; None where all had.
    """

    count: int
    num_engines: int
    num_servers: int
    first: "Spread"
    last: "Spread"
    pause: "Spread | None"


@dataclass(frozen=True)
class Spread:
    """Spread of some values."""

    median: float
    percentile_90: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Describe values, of which there is one at least; the percentile is one of them."""
        ordered = sorted(values)
        rank = -(-9 * len(ordered) // 10)
        return cls(statistics.median(ordered), ordered[rank - 1], ordered[-1])


@dataclass
class Outcome:
    """All of a campaign.

    Attributes:
        answers: of all calls but the poisoned ones.
        hanging: lanes whose last request was not answered in the end.
        rests: before the first fault, and after each part of the campaign.
        left: what there still was after the server's end.
        stopped_by: why the campaign did not come to its end.
        max_pause: that a client which need not wait may have, in seconds; a unary call is one
            pause.
    """

    num_asked: int
    faults: list[FaultRecord] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    hanging: list[int] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    stopped_by: str | None = None
    max_pause: float = 3.0

    def of_kind(self, kind: Kind) -> list[FaultRecord]:
        """The faults of one kind from which at least one lane recovered."""
        return [fault for fault in self.faults if fault.kind == kind.name and fault.recovery]

    def summary(self) -> dict[str, Summary]:
        """Summarize the kinds that occurred, by name."""
        return {
            name: _summary(faults) for name, kind in KINDS.items() if (faults := self.of_kind(kind))
        }

    def excused(self) -> list[Answer]:
        """Answers with an error that a fault excuses."""
        return [
            answer
            for answer in self.answers
            if answer.error is not None and any(fault.excuses(answer) for fault in self.faults)
        ]


def _summary(faults: Sequence[FaultRecord]) -> Summary:
    pauses = [fault.pause for fault in faults if fault.pause is not None]
    return Summary(
        len(faults),
        sum(fault.num_engines for fault in faults),
        sum(fault.num_servers for fault in faults),
        Spread.of([fault.recovery[0] for fault in faults]),
        Spread.of([fault.recovery[-1] for fault in faults]),
        Spread.of(pauses) if pauses else None,
    )
