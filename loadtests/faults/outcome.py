"""What was seen of a campaign: every fault, every answer, the server before and after.

Owns the data and what the verdicts are. Must not know how any of it was observed.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from faults.footprint import Footprint
from faults.lanes import Answer
from faults.strikes import KINDS, MAX_DEATHS, Kind
from support.live_stream import WRONG_ANSWER

MAX_SHM_BYTES_PER_DEATH = 2 * 2**20
"""Triton leaves about 1 MiB of shared memory behind for each model process that dies."""

MAX_MORE_FDS = 8
MAX_MORE_THREADS = 4
"""Of the scheduler at rest: what need not be a leak, however many faults there were."""


@dataclass(frozen=True)
class FaultRecord:
    """One fault and what came of it; times in seconds.

    Attributes:
        number: from 1.
        victim: which of the engine's processes; None by a poisoned request.
        at: since the first fault could come. pause: between recovery and the next fault.
        num_live: lanes that had a request under way.
        num_deaths: engines lost. has_struck: it did what it should.
        is_answered_right: a poisoned request failed, for the right reason.
        recovery: from the fault until a lane went on, ascending; one for each that did.
        hanging: lanes that did not.
        shm_bytes, scheduler_rss_bytes: after it.
    """

    number: int
    kind: Kind
    victim: int | None
    at: float
    pause: float
    num_live: int
    num_deaths: int
    has_struck: bool
    is_answered_right: bool
    recovery: Sequence[float]
    hanging: Sequence[int]
    shm_bytes: int
    scheduler_rss_bytes: int


@dataclass(frozen=True)
class Summary:
    """Recovery after the faults of one kind, in seconds: of each fault's first and last lane."""

    count: int
    first: "Spread"
    last: "Spread"


@dataclass(frozen=True)
class Spread:
    """Of some values."""

    median: float
    percentile_90: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Describe at least one value; the percentile is the nearest that occurs."""
        ordered = sorted(values)
        rank = -(-9 * len(ordered) // 10)
        return cls(statistics.median(ordered), ordered[rank - 1], ordered[-1])


@dataclass(frozen=True)
class Verdict:
    """One thing that must hold."""

    what: str
    holds: bool
    found: str


@dataclass
class Outcome:
    """All of a campaign.

    Attributes:
        num_asked: faults that were asked for; of every kind where there are as many as kinds.
        answers: of all requests but the poisoned ones.
        hanging: lanes whose last request was not answered in the end.
        idle: what must be 0 on the metrics page when all is over.
        before, after: of the server at rest. left: what there still was after its end.
        stopped_by: why the campaign did not come to its end.
    """

    num_asked: int
    faults: list[FaultRecord] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    hanging: list[int] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=dict)
    before: Footprint | None = None
    after: Footprint | None = None
    left: list[str] = field(default_factory=list)
    stopped_by: str | None = None

    def of_kind(self, kind: Kind) -> list[FaultRecord]:
        """The faults of one kind from which at least one lane recovered."""
        return [fault for fault in self.faults if fault.kind == kind and fault.recovery]

    def summary(self) -> dict[Kind, Summary]:
        """By kind, of those that occurred."""
        return {
            kind: Summary(
                len(faults),
                Spread.of([fault.recovery[0] for fault in faults]),
                Spread.of([fault.recovery[-1] for fault in faults]),
            )
            for kind in KINDS
            if (faults := self.of_kind(kind))
        }

    @property
    def num_deaths(self) -> int:
        """Engines lost."""
        return sum(fault.num_deaths for fault in self.faults)

    def verdicts(self) -> list[Verdict]:
        """All that must hold, in the order of the report."""
        return [
            self._complete(),
            self._costs(),
            *self._answer_verdicts(),
            *self._footprint_verdicts(),
        ]

    def _complete(self) -> Verdict:
        num_struck = sum(fault.has_struck for fault in self.faults)
        found = f"{num_struck} of {self.num_asked}"
        if self.stopped_by is not None:
            found += f"; stopped: {self.stopped_by}"
        return Verdict("every fault struck", num_struck == self.num_asked, found)

    def _costs(self) -> Verdict:
        dear = [
            f"fault {fault.number}: {fault.num_deaths}"
            for fault in self.faults
            if fault.num_deaths > MAX_DEATHS[fault.kind]
        ]
        found = _found(dear, len(self.faults), "faults")
        return Verdict("no fault cost more engines than it must", not dear, found)

    def _answer_verdicts(self) -> list[Verdict]:
        errors = [answer.error for answer in self.answers if answer.error is not None]
        wrong = [error for error in errors if error.startswith(WRONG_ANSWER)]
        lost = [error for error in errors if not error.startswith(WRONG_ANSWER)]
        hanging = {lane for fault in self.faults for lane in fault.hanging} | {*self.hanging}
        whole = [answer for answer in self.answers if answer.error is None]
        unequal = [answer for answer in whole if not answer.equals]
        poisoned = [fault for fault in self.faults if fault.kind == "poison"]
        survived = [fault for fault in poisoned if not fault.is_answered_right]
        outlived = sum(answer.restarts for answer in self.answers)
        num = len(self.answers)
        return [
            Verdict("no request lost", bool(num) and not lost, _found(lost, num, "requests")),
            Verdict("no request answered twice", not wrong, _found(wrong, num, "requests")),
            Verdict("no stream hung", not hanging, _found(sorted(hanging), num, "requests")),
            Verdict(
                "every stream equal to its undisturbed run",
                bool(whole) and not unequal,
                _found([f"lane {answer.lane}" for answer in unequal], len(whole), "streams")
                + f"; they outlived {outlived} restarts in all",
            ),
            Verdict(
                "poisoned requests failed, and alone",
                not survived and (bool(poisoned) or self.num_asked < len(KINDS)),
                _found([f"fault {fault.number}" for fault in survived], len(poisoned), "of them"),
            ),
        ]

    def _footprint_verdicts(self) -> list[Verdict]:
        busy = [f"{name} = {value:g}" for name, value in self.idle.items() if value]
        checks = [
            Verdict("no leaked block, nothing running", bool(self.idle) and not busy, _list(busy)),
            Verdict("nothing left after the server's end", not self.left, _list(self.left)),
        ]
        if self.before is None or self.after is None:
            return [*checks, Verdict("no leaked process", False, "not observed")]
        before, after = self.before, self.after
        grown = after.shm_bytes - before.shm_bytes
        num = max(self.num_deaths, 1)
        return [
            *checks,
            Verdict(
                "no leaked process",
                before.processes == after.processes,
                f"{sum(before.processes.values())} before, {sum(after.processes.values())} after",
            ),
            Verdict(
                "no leaked shared memory but what Triton leaves",
                grown <= MAX_SHM_BYTES_PER_DEATH * num,
                f"{grown / 2**20:.1f} MiB more after {self.num_deaths} deaths,"
                f" {grown / 2**20 / num:.2f} each",
            ),
            _growth("open file", before.scheduler_fds, after.scheduler_fds, MAX_MORE_FDS),
            _growth("thread", before.scheduler_threads, after.scheduler_threads, MAX_MORE_THREADS),
        ]


def _growth(what: str, before: int, after: int, most: int) -> Verdict:
    return Verdict(
        f"no leaked {what} of the scheduler",
        after - before <= most,
        f"{before} before, {after} after; {most} more are allowed",
    )


def _found(bad: Sequence[object], total: int, what: str) -> str:
    return f"{len(bad)} of {total} {what}" + (f": {_list(bad)}" if bad else "")


def _list(values: Sequence[object], most: int = 3) -> str:
    """The first few values, each once."""
    shown = list(dict.fromkeys(map(str, values)))
    text = "; ".join(shown[:most]) or "nothing"
    return text + (f"; and {len(shown) - most} more" if len(shown) > most else "")
