"""The record of a campaign: JSON, tables in Markdown.

Owns what the file holds and how it is shown. Must not know how anything was observed.
"""

from dataclasses import asdict, dataclass
from typing import Any

from faults.outcome import Outcome, Spread, Summary
from faults.strikes import KINDS, Kind
from report import markdown_table


@dataclass(frozen=True)
class Report:
    """A campaign; `about` has date, command, machine, versions and settings."""

    about: dict[str, Any]
    outcome: Outcome

    @property
    def holds(self) -> bool:
        """Whether all verdicts are good."""
        return all(verdict.holds for verdict in self.outcome.verdicts())

    def as_json(self) -> dict[str, Any]:
        """For the file. Of the answers only those that are wrong are kept."""
        outcome = self.outcome
        return {
            "about": self.about,
            "verdicts": [asdict(verdict) for verdict in outcome.verdicts()],
            "summary": {kind: asdict(each) for kind, each in outcome.summary().items()},
            "faults": [asdict(fault) for fault in outcome.faults],
            "requests": {
                "answered": len(outcome.answers),
                "tokens": sum(answer.num_tokens for answer in outcome.answers),
                "outlived_restarts": sum(answer.restarts for answer in outcome.answers),
                "wrong": [
                    asdict(answer)
                    for answer in outcome.answers
                    if answer.error is not None or not answer.equals
                ],
            },
            "before": outcome.before and asdict(outcome.before),
            "after": outcome.after and asdict(outcome.after),
            "idle": outcome.idle,
            "left": outcome.left,
        }


def as_markdown(report: Report) -> str:
    """Verdicts, recovery by kind, and what the server held."""
    outcome = report.outcome
    verdicts = [
        [verdict.what, "yes" if verdict.holds else "NO", verdict.found]
        for verdict in outcome.verdicts()
    ]
    parts = [
        markdown_table(["what must hold", "holds", "found"], verdicts),
        "Seconds from the fault until the first and the last stream went on:",
        markdown_table(
            ["fault", "count", *(f"{each}: median, p90, max" for each in ("first", "last"))],
            [_summary_line(kind, each) for kind, each in outcome.summary().items()],
        ),
    ]
    if outcome.before is not None and outcome.after is not None:
        parts.append(_footprint_table(outcome))
    return "\n\n".join(parts)


def _summary_line(kind: Kind, summary: Summary) -> list[str]:
    return [KINDS[kind], str(summary.count), _spread(summary.first), _spread(summary.last)]


def _spread(spread: Spread) -> str:
    return f"{spread.median:.2f}, {spread.percentile_90:.2f}, {spread.max:.2f}"


def _footprint_table(outcome: Outcome) -> str:
    before, after = outcome.before, outcome.after
    assert before is not None
    assert after is not None
    rows = [
        ("processes", sum(before.processes.values()), sum(after.processes.values())),
        ("/dev/shm, MiB", _mib(before.shm_bytes), _mib(after.shm_bytes)),
        (
            "scheduler's memory, MiB",
            _mib(before.scheduler_rss_bytes),
            _mib(after.scheduler_rss_bytes),
        ),
        ("scheduler's open files", before.scheduler_fds, after.scheduler_fds),
        ("scheduler's threads", before.scheduler_threads, after.scheduler_threads),
    ]
    return markdown_table(["at rest", "before", "after"], [list(map(str, row)) for row in rows])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"
