"""The results of a run, and the tables that are made of them.

Owns what the JSON file holds. Must not know sides or processes.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from report import markdown_table
from speculation.trials import Round
from speculation.verdicts import Judgement, judge, sum_at_positions
from text_repetition import circling_share


@dataclass
class EntryResult:
    """Result of one entry of a round.

    Attributes:
        rates: output tokens per second, repetition by repetition.
        outputs: tokens of every request. num_chunks: in which they came; in-process and at
            concurrency 1 a chunk is what one step committed.
        timings: a server's measurements of each request; empty in-process.
    """

    rates: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    num_chunks: int = 0
    timings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens_per_chunk(self) -> float:
        """Mean number of tokens per chunk."""
        return sum(map(len, self.outputs)) / self.num_chunks

    def acceptance(self) -> list[float]:
        """Return the share of accepted drafts at each position, of those that were made there."""
        timings = [timing for timing in self.timings if "drafted_at_position" in timing]
        drafted = sum_at_positions([timing["drafted_at_position"] for timing in timings])
        accepted = sum_at_positions([timing["accepted_at_position"] for timing in timings])
        return [a / d for a, d in zip(accepted, drafted, strict=True)]


@dataclass
class RoundResult:
    """One round, and what its entries did.

    Attributes:
        orders: in which they had their turns, repetition by repetition.
    """

    round: Round
    entries: dict[str, EntryResult]
    orders: list[list[str]] = field(default_factory=list)

    @property
    def contender(self) -> EntryResult:
        """Result of the entry that is judged."""
        return self.entries[self.round.contender]

    @property
    def rates(self) -> dict[str, list[float]]:
        """Rates by label."""
        return {label: entry.rates for label, entry in self.entries.items()}

    def circling(self) -> dict[str, float]:
        """Return the share of the text that goes in circles, by label."""
        return {label: circling_share(entry.outputs) for label, entry in self.entries.items()}

    def judgement(self) -> Judgement:
        """The contender against the best of the others; whose text circles most decides."""
        circling = max(self.circling().values())
        return judge(self.rates, self.round.contender, self.round.bar, circling)

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        names = ("case", "what", "concurrency", "new_tokens", "sampling", "num_warm_ups")
        return {
            **{name: getattr(self.round, name) for name in names},
            "orders": self.orders,
            "tokens_per_second": self.rates,
            "tokens_per_chunk": {
                label: entry.tokens_per_chunk for label, entry in self.entries.items()
            },
            "acceptance_by_position": self.contender.acceptance(),
            "circling": self.circling(),
            "bar": self.round.bar,
            "judgement": asdict(self.judgement()),
        }


@dataclass
class Report:
    """All of a run; `about` has date, command, machine and versions."""

    about: dict[str, Any]
    rounds: list[RoundResult] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {"about": self.about, "rounds": [result.as_json() for result in self.rounds]}

    def of_case(self, case: str) -> list[RoundResult]:
        """The rounds of one case."""
        return [result for result in self.rounds if result.round.case == case]


def as_markdown(report: Report) -> str:
    """All tables: the verdicts, then the rates of each case, then how drafts fared."""
    parts = ["Output tokens/s, medians, and ratios of pairs:", _verdict_table(report.rounds)]
    if sweep := report.of_case("sweep"):
        parts += ["Sweep, output tokens/s, medians:", _rate_table(sweep)]
    if any(result.contender.timings for result in report.rounds):
        parts += ["Accepted of the drafts made at each position:", _acceptance_table(report.rounds)]
    return "\n\n".join(parts)


def _verdict_table(results: Sequence[RoundResult]) -> str:
    head = ["case", "what", "at once", "contender", "tok/s", "against", "tok/s"]
    head += ["ratio: median (its interval)", "confidence", "bar", "verdict"]
    head += ["tokens per chunk", "in circles"]
    return markdown_table(head, [_verdict_line(result) for result in results])


def _verdict_line(result: RoundResult) -> list[str]:
    found = result.judgement()
    interval = found.ratio.interval
    return [
        result.round.case,
        result.round.what,
        str(result.round.concurrency),
        found.contender,
        f"{statistics.median(result.rates[found.contender]):.1f}",
        found.rival,
        f"{statistics.median(result.rates[found.rival]):.1f}",
        str(found.ratio),
        f"{100 * interval.confidence:.0f} %" if interval else "",
        f"{result.round.bar:.2f}",
        found.verdict,
        f"{result.contender.tokens_per_chunk:.2f}",
        f"{100 * max(result.circling().values()):.0f} %",
    ]


def _rate_table(results: Sequence[RoundResult]) -> str:
    labels = list(dict.fromkeys(label for result in results for label in result.entries))
    lines = []
    for result in results:
        medians = {label: statistics.median(rates) for label, rates in result.rates.items()}
        best = max(medians.values())
        cells = [
            f"**{medians[label]:.1f}**" if medians[label] == best else f"{medians[label]:.1f}"
            for label in labels
        ]
        lines.append([result.round.what, str(result.round.concurrency), *cells])
    return markdown_table(["model", "at once", *labels], lines)


def _acceptance_table(results: Sequence[RoundResult]) -> str:
    lines = []
    for result in results:
        if result.contender.timings:
            shares = " ".join(f"{share:.2f}" for share in result.contender.acceptance())
            lines.append([result.round.case, result.round.what, result.round.contender, shares])
    return markdown_table(["case", "what", "contender", "share at position 1, 2, ..."], lines)
