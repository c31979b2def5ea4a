"""The record of a campaign: JSON, tables in Markdown.

Owns what the file holds and how it is shown. Must not know how anything was observed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from faults.kinds import KINDS
from faults.outcome import Outcome, Spread, Summary
from faults.verdicts import verdicts
from report import markdown_table


@dataclass(frozen=True)
class Report:
    """A campaign; `about` has date, command, machine, versions and settings."""

    about: dict[str, Any]
    outcome: Outcome

    @property
    def holds(self) -> bool:
        """True if all verdicts are good."""
        return all(verdict.holds for verdict in verdicts(self.outcome))

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file, see `reduced`."""
        outcome = self.outcome
        excused = {id(answer) for answer in outcome.excused()}
        whole = {
            "about": self.about,
            "verdicts": [asdict(verdict) for verdict in verdicts(outcome)],
            "summary": {name: asdict(each) for name, each in outcome.summary().items()},
            "faults": [
                asdict(fault) | {"num_waited": len(fault.recovery)} for fault in outcome.faults
            ],
            "requests": {
                "answered": len(outcome.answers),
                "tokens": sum(answer.num_tokens for answer in outcome.answers),
                "outlived_restarts": sum(answer.restarts for answer in outcome.answers),
                "failed": [
                    asdict(answer) | {"is_excused": id(answer) in excused}
                    for answer in outcome.answers
                    if answer.error is not None or not answer.equals
                ],
            },
            "rests": [asdict(rest) for rest in outcome.rests],
            "hanging": outcome.hanging,
            "left": outcome.left,
        }
        return reduced(whole)


_FAULT_FIELDS = (
    *("number", "kind", "victim", "num_engines", "num_servers", "outage", "pause"),
    *("at", "until", "num_waited"),  # which older records lack
)


def reduced(record: dict[str, Any]) -> dict[str, Any]:
    """A campaign's record without the samples that neither tables nor pictures are made of.

    Kept of a fault is what `_FAULT_FIELDS` names, of its `recovery` the first and the last client
    (`num_waited` is the number of all), and `hanging` where a request hung. Kept of the failed
    requests is each that counts against the server: that no fault excuses, or that had wrong
    tokens. The others are counted, by way in and error, as "excused".

    Args:
        record: as `Report.as_json` collects it; one that is reduced already stays as it is.
    """
    faults = [
        {name: fault[name] for name in _FAULT_FIELDS if name in fault}
        | {"recovery": _ends(fault["recovery"])}
        | ({"hanging": fault["hanging"]} if fault.get("hanging") else {})
        for fault in record["faults"]
    ]
    requests = dict(record["requests"])
    counts: Counter[tuple[str, str]] = Counter()
    for one in requests.get("excused", []):
        counts[one["entry"], one["error"]] += one["count"]
    kept = []
    for one in requests["failed"]:
        if one["is_excused"] and one["equals"]:
            counts[one["entry"], one["error"]] += 1
        else:
            kept.append(one)
    requests["failed"] = kept
    requests["excused"] = [
        {"entry": entry, "error": error, "count": count}
        for (entry, error), count in counts.most_common()
    ]
    return record | {"faults": faults, "requests": requests}


def _ends(values: Sequence[float]) -> list[float]:
    """The first and the last, where there are more."""
    return list(values) if len(values) < 3 else [values[0], values[-1]]


def as_markdown(report: Report) -> str:
    """Verdicts, recovery by kind, and what the server held."""
    outcome = report.outcome
    rows = [
        [verdict.what, "yes" if verdict.holds else "NO", verdict.found]
        for verdict in verdicts(outcome)
    ]
    parts = [
        markdown_table(["what must hold", "holds", "found"], rows),
        "Seconds from the fault until the first and the last client that had to wait got tokens"
        " again, and the longest pause of those that had not to wait:",
        markdown_table(
            [
                "fault",
                "count",
                "engines lost",
                "servers restarted",
                *(f"{each}: median, p90, max" for each in ("first", "last", "pause")),
            ],
            [_summary_line(name, each) for name, each in outcome.summary().items()],
        ),
    ]
    if outcome.rests:
        parts += ["At rest:", _rests_table(outcome)]
    return "\n\n".join(parts)


def _summary_line(name: str, summary: Summary) -> list[str]:
    spreads = map(_spread, (summary.first, summary.last, summary.pause))
    counts = map(str, (summary.count, summary.num_engines, summary.num_servers))
    return [KINDS[name].title, *counts, *spreads]


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.median:.2f}, {spread.percentile_90:.2f}, {spread.max:.2f}"


def _rests_table(outcome: Outcome) -> str:
    """Tabulate the server's resources at each rest."""
    footprints = [rest.footprint for rest in outcome.rests]
    rows: list[list[object]] = [
        ["processes", *(len(each.processes) for each in footprints)],
        ["/dev/shm, MiB", *(_mib(each.shm_bytes) for each in footprints)],
    ]
    for role in footprints[0].rss_bytes:
        held = (_mib(each.rss_bytes.get(role, 0)) for each in footprints)
        rows.append([f"{role}: resident, MiB", *held])
    titles = ["after so many faults", *(str(rest.num_faults) for rest in outcome.rests)]
    return markdown_table(titles, [list(map(str, row)) for row in rows])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"
