"""One stop or load, what was found wrong with it, and the sum of many.

Owns what counts as clean, and the record. Must not know how anything was done or observed.
"""

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from report import markdown_table

# What tritonserver, the C library, a Python process or the launcher says of a bad end. A server
# that is told to end logs signal 15 itself.
BAD_ENDS = (
    "Signal (6)",
    "Signal (11)",
    "malloc",
    "free():",
    "corrupted",
    "double free",
    "terminate called",
    "core dumped",
    "Traceback",
    "tritonserver ended",
    "tritonserver was ended",
    "tritonserver did not end",
)
LOST_ENGINE = ("engine_died", "engine_load_failed", "scheduler_error")


@dataclass(frozen=True)
class Trial:
    """A stop or a load.

    Attributes:
        kind: what was done, and while what.
        seconds: until the command had ended, or the model was loaded.
        findings: what was wrong, each in one line; none of a clean one.
    """

    kind: str
    seconds: float
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Holding:
    """Resources that tritonserver holds at one moment."""

    rss_bytes: int
    num_fds: int
    num_threads: int


@dataclass(frozen=True)
class Report:
    """A run; `about` has date, command, machine and versions.

    Attributes:
        trials: in their order. num_ordered: how many there should have been.
        before, after: of the server whose models were loaded; None where none were.
    """

    about: dict[str, Any]
    trials: list[Trial]
    num_ordered: int
    before: Holding | None = None
    after: Holding | None = None

    @property
    def holds(self) -> bool:
        """True if all were done, and clean."""
        return len(self.trials) == self.num_ordered and not any(t.findings for t in self.trials)

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "about": self.about,
            "holds": self.holds,
            "ordered": self.num_ordered,
            "trials": [asdict(trial) for trial in self.trials],
            "before": self.before and asdict(self.before),
            "after": self.after and asdict(self.after),
        }


def bad_lines(log: Iterable[str], *, is_ending: bool) -> list[str]:
    """Lines that tell of a bad end; where the server was told to end, of a lost engine, too."""
    words = (*BAD_ENDS, *LOST_ENGINE) if is_ending else BAD_ENDS
    return [line for line in log if any(word in line for word in words)]


def as_markdown(report: Report) -> str:
    """A line per kind, what was wrong, and what the server held."""
    kinds = dict.fromkeys(trial.kind for trial in report.trials)
    rows = [_row(kind, [t for t in report.trials if t.kind == kind]) for kind in kinds]
    parts = [markdown_table(["what", "count", "clean", "seconds: median, max"], rows)]
    parts += [
        f"{trial.kind}: {finding}" for trial in report.trials for finding in trial.findings[:3]
    ]
    if report.before is not None and report.after is not None:
        before, after = (_holding(each) for each in (report.before, report.after))
        parts.append(f"tritonserver held {before} before the first load, {after} after the last")
    parts.append(f"{len(report.trials)} of {report.num_ordered} done")
    return "\n\n".join(parts)


def _row(kind: str, trials: list[Trial]) -> list[str]:
    seconds = [trial.seconds for trial in trials]
    clean = sum(not trial.findings for trial in trials)
    spread = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}"
    return [kind, str(len(trials)), str(clean), spread]


def _holding(holding: Holding) -> str:
    mib = holding.rss_bytes / 2**20
    return f"{mib:.0f} MiB, {holding.num_fds} open files and {holding.num_threads} threads"
