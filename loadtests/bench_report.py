"""The results of a run, and the tables that are made of them.

Owns what the JSON file holds and how medians, ratios and shares of the machine's limit are put
into Markdown. Must not know sides or processes.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from figures import Figures, Ratio, median_figures, ratio
from isolated_runs import IsolatedRuns
from limits import Machine, ModelCost, Work, achieved_gb_s, output_limit, prompt_limit
from medians import CONFIDENCE
from report import markdown_table
from systems_under_test import BASE, INT8, LLAMA_CPP, Q8_0, QUANTIZED, TRITON, VLLM
from thresholds import Verdict, verdict
from workloads import SAMPLED, Round

_OVER_VLLM = {("decode", 1): 1.7, ("decode", 8): 1.5, ("decode", 32): 1.3}
"""Goals of decoding over vLLM, by kind of round and concurrency; 1 for all others."""
_OF_THE_LIMIT = {
    ("decode", 1): 0.85,
    ("decode", 8): 0.75,
    ("decode", 32): 0.65,
    ("prefill", 1): 0.55,
    ("prefill", 8): 0.70,
}
"""Goals of charonia's share of the machine's limit, by kind of round and concurrency."""
_OVER_VLLM_LONG = 1.1
"""Goal of prompts of many tokens over vLLM."""
_OVER_VLLM_TRACES = 1.1
"""Goal of requests of recorded lengths over vLLM, over Triton and in-process."""
_RATIOS: tuple[tuple[str, str, float | None], ...] = (
    (BASE, VLLM, 1.0),
    (BASE, LLAMA_CPP, 1.0),
    (BASE, "transformers", 1.0),
    (TRITON, BASE, None),
    (TRITON, VLLM, 1.0),
    (SAMPLED, BASE, None),
    (INT8, BASE, 1.0),
    (INT8, Q8_0, 1.0),
)
"""Each side that is compared, with what, and what the ratio must reach where that is a claim."""


@dataclass(frozen=True)
class Comparison:
    """One ratio of a round, and what it shows; `bar` and `verdict` are None without a claim."""

    ratio: Ratio
    bar: float | None
    verdict: Verdict | None

    def __str__(self) -> str:
        return f"{self.ratio} {self.verdict} ({self.bar})" if self.verdict else str(self.ratio)


@dataclass
class RoundResult:
    """One round: what was asked, every repetition of every entry, every reading of the limits.

    Attributes:
        orders: in which the entries had their turns, repetition by repetition.
        machine: one reading for each repetition.
    """

    round: Round
    runs: dict[str, list[Figures]] = field(default_factory=dict)
    orders: list[list[str]] = field(default_factory=list)
    machine: list[Machine] = field(default_factory=list)

    def rates(self, label: str) -> list[float]:
        """Tokens per second, repetition by repetition."""
        return [run["tokens_per_second"] for run in self.runs[label]]

    def limits(self, cost: ModelCost) -> list[float]:
        """Tokens per second at most, by each reading; repetition by repetition."""
        limit = prompt_limit if self.round.kind == "prefill" else output_limit
        return [limit(cost, reading, self.work()) for reading in self.machine]

    def shares(self, cost: ModelCost) -> dict[str, Comparison]:
        """Each entry's rate over the limit that was read in the same repetition.

        Quantized entries have none: they read half of what the limit counts.
        """
        if self.round.traffic is not None:
            return {}
        limits, found = self.limits(cost), {}
        for label in self.runs:
            if label in QUANTIZED:
                continue
            is_judged = label == BASE and not self.round.is_long
            kind = self.round.kind, self.round.concurrency
            bar = _OF_THE_LIMIT.get(kind) if is_judged else None
            found[label] = _compare(self.rates(label), limits, bar)
        return found

    def work(self) -> Work:
        """A wave of this round, for the limit; its requests are equally long."""
        assert self.round.prompt_tokens is not None
        assert self.round.new_tokens is not None
        return Work(self.round.concurrency, self.round.prompt_tokens, self.round.new_tokens)

    def comparisons(self) -> dict[str, Comparison]:
        """All that have both their sides in this round."""
        found = {}
        for above, below, bar in _RATIOS:
            if above in self.runs and below in self.runs:
                if below == VLLM:
                    bar = _bar_over_vllm(self.round, above, bar)
                name = f"{above} / {below}"
                found[name] = _compare(self.rates(above), self.rates(below), bar)
        return found


def _compare(over: Sequence[float], under: Sequence[float], bar: float | None) -> Comparison:
    pairs = ratio(over, under)
    return Comparison(pairs, bar, None if bar is None else verdict(pairs.interval, bar))


def _bar_over_vllm(round_: Round, above: str, usual: float | None) -> float | None:
    if round_.kind == "traces":
        return _OVER_VLLM_TRACES
    if above != BASE:
        return usual
    if round_.is_long:
        return _OVER_VLLM_LONG
    return _OVER_VLLM.get((round_.kind, round_.concurrency), usual)


@dataclass
class Report:
    """All of a run.

    Attributes:
        about: date, command, machine, versions, and what was left out.
        cost: of the model, for the limits; None for families other than Llama.
        agreement: by side, how many tokens its greedy completions begin with that are those of the
            reference, on average, out of how many.
        circling: share of charonia's greedy text that goes in circles.
        alone: what was measured before, with nothing else loaded.
        idle: by side, seconds it waited for others and seconds it computed meanwhile.
    """

    about: dict[str, Any]
    cost: ModelCost | None
    rounds: list[RoundResult] = field(default_factory=list)
    agreement: dict[str, Any] = field(default_factory=dict)
    idle: dict[str, Any] = field(default_factory=dict)
    circling: float = 0.0
    alone: IsolatedRuns = field(default_factory=IsolatedRuns)

    def as_json(self) -> dict[str, Any]:
        """Return the parts above and the tables' data, for the file."""
        rounds = []
        for result in self.rounds:
            about = {name: getattr(result.round, name) for name in _ROUND_FIELDS}
            traffic = result.round.traffic
            about["traffic"] = traffic.as_json() if traffic else None
            ratios = {name: asdict(value) for name, value in result.comparisons().items()}
            limits = [asdict(reading) for reading in result.machine]
            shares = result.shares(self.cost) if self.cost else {}
            rounds.append(
                {
                    **about,
                    "orders": result.orders,
                    "runs": result.runs,
                    "ratios": ratios,
                    "limits": limits,
                    "shares": {label: asdict(share) for label, share in shares.items()},
                }
            )
        return {
            "about": self.about,
            "model_cost": asdict(self.cost) if self.cost else None,
            "rounds": rounds,
            "agreement": self.agreement,
            "circling": self.circling,
            "alone": self.alone.as_json(),
            "idle_seconds": self.idle,
        }


_ROUND_FIELDS = ("kind", "concurrency", "num_waves", "prompt_tokens", "new_tokens")


def as_markdown(report: Report) -> str:
    """All tables."""
    decode = [result for result in report.rounds if result.round.kind == "decode"]
    prefill = [result for result in report.rounds if result.round.kind == "prefill"]
    traces = [result for result in report.rounds if result.round.kind == "traces"]
    output = decode + traces
    parts = []
    if traces:
        parts += ["Recorded requests, as many at once as the rounds say:", _traffic_table(traces)]
    if output:
        parts += ["Output tokens/s, medians:", _rate_table(output)]
        parts += ["Latency in milliseconds, medians:", _latency_table(output)]
    if prefill:
        parts += ["Prompt tokens/s, medians:", _rate_table(prefill)]
    if any(result.comparisons() for result in report.rounds):
        parts += [
            "Ratios pair by pair: median (its interval, with at least "
            f"{100 * CONFIDENCE:.0f} %), and whether the interval reaches the bar behind it:",
            _ratio_table(report.rounds),
        ]
    if report.alone.controls and decode:
        parts += [
            "Output tokens/s, medians: alone on the machine / in turns:",
            _control_table(report),
        ]
    if report.alone.probes:
        parts += ["Ways to run vLLM alone on the machine, tokens/s; the first is taken:"]
        parts += [_way_table(report.alone)]
    if report.cost:
        if limited := decode + prefill:
            parts += [
                "Share of what the machine could do at most, pair by pair with the limits of the "
                "same repetition: median (its interval), and whether it reaches the bar behind it:",
            ]
            parts += [_limit_table(limited, report.cost)]
        if traces:
            parts += ["Recorded requests have no such limit: their answers end at different steps."]
        alone = [one for one in decode if one.round.concurrency == 1 < one.round.new_tokens]
        if alone:
            parts += ["Decoding alone, one sequence:", _bandwidth_table(alone[0], report.cost)]
    parts += [_machine_line(report), _agreement_line(report), _idle_line(report)]
    parts += [f"Left out: {name}: {why}" for name, why in report.about["left_out"].items()]
    return "\n\n".join(part for part in parts if part)


def _labels(results: Sequence[RoundResult]) -> list[str]:
    return list(dict.fromkeys(label for result in results for label in result.runs))


def _heads(results: Sequence[RoundResult]) -> list[str]:
    return [f"{result.round.kind} {result.round.size}" for result in results]


def _rate_table(results: Sequence[RoundResult]) -> str:
    def cell(result: RoundResult, label: str) -> str:
        if label not in result.runs:
            return ""
        rates = result.rates(label)
        return f"{statistics.median(rates):.1f} ({min(rates):.0f} to {max(rates):.0f})"

    rows = [[label, *(cell(result, label) for result in results)] for label in _labels(results)]
    return markdown_table(["side", *_heads(results)], rows)


def _latency_table(results: Sequence[RoundResult]) -> str:
    names = ("ttft_ms_p50", "ttft_ms_p99", "inter_token_ms_p50", "inter_token_ms_p95")
    rows = []
    for result, round_head in zip(results, _heads(results), strict=True):
        for label, runs in result.runs.items():
            medians = median_figures(runs)
            cells = [f"{medians[name]:.1f}" if name in medians else "" for name in names]
            rows.append([round_head, label, *cells])
    head = ["round", "side", "TTFT p50", "TTFT p99", "inter-token p50", "inter-token p95"]
    return markdown_table(head, rows)


def _traffic_table(results: Sequence[RoundResult]) -> str:
    head = ["trace", "requests", "left out", "prompt tokens, mean", "new tokens, mean"]
    rows = []
    for result in results:
        assert result.round.traffic is not None
        about = result.round.traffic.as_json()
        left_out = f"{about['share_left_out']:.1%} (more than {about['most_tokens']:,} tokens)"
        means = [f"{about[name]:,.0f}" for name in ("mean_prompt_tokens", "mean_new_tokens")]
        rows.append([about["name"], f"{about['num_requests']:,}", left_out, *means])
    return markdown_table(head, rows)


def _ratio_table(results: Sequence[RoundResult]) -> str:
    by_round = [result.comparisons() for result in results]
    names = list(dict.fromkeys(name for found in by_round for name in found))
    rows = [[name, *(str(found.get(name, "")) for found in by_round)] for name in names]
    return markdown_table(["ratio", *_heads(results)], rows)


def _control_table(report: Report) -> str:
    """The rates of each side that was measured alone, too."""
    decode = [result for result in report.rounds if result.round.kind == "decode"]

    def cell(result: RoundResult, label: str) -> str:
        rates = report.alone.controls[label][result.round.name]
        turns = f"{statistics.median(result.rates(label)):.1f}" if label in result.runs else ""
        return f"{statistics.median(rates):.1f} / {turns}"

    rows = [[name, *(cell(result, name) for result in decode)] for name in report.alone.controls]
    return markdown_table(["side", *_heads(decode)], rows)


def _way_table(alone: IsolatedRuns) -> str:
    names = list(dict.fromkeys(name for each in alone.probes for name in each.rates))
    rows = []
    for each in alone.probes:
        medians = [
            f"{statistics.median(each.rates[name]):.1f}" if name in each.rates else ""
            for name in names
        ]
        failed = f"{each.variant.name} (failed: {each.failure})"
        rows.append([each.variant.name if each.failure is None else failed, *medians])
    return markdown_table(["way", *names], rows)


def limit_of(result: RoundResult, cost: ModelCost) -> float:
    """Tokens per second that the machine allows, the median of all readings."""
    return statistics.median(result.limits(cost))


def _limit_table(results: Sequence[RoundResult], cost: ModelCost) -> str:
    shares = [result.shares(cost) for result in results]
    labels = dict.fromkeys(label for found in shares for label in found)
    rows = [
        ["limit, tok/s", *(f"{limit_of(result, cost):.0f}" for result in results)],
        *([label, *(str(found.get(label, "")) for found in shares)] for label in labels),
    ]
    return markdown_table(["side", *_heads(results)], rows)


def _bandwidth_table(result: RoundResult, cost: ModelCost) -> str:
    read = statistics.median(reading.read_gb_s for reading in result.machine)
    rows = []
    for label, runs in result.runs.items():
        rate = median_figures(runs)["decode_tokens_per_second"]
        if label in QUANTIZED:
            rows.append([label, f"{rate:.1f}", "", ""])
            continue
        achieved = achieved_gb_s(cost, rate, result.work())
        rows.append([label, f"{rate:.1f}", f"{achieved:.1f}", f"{achieved / read:.2f}"])
    return markdown_table(["side", "tok/s", "GB/s read", f"of {read:.1f} GB/s"], rows)


def _machine_line(report: Report) -> str:
    readings = [reading for result in report.rounds for reading in result.machine]
    if not readings:
        return ""

    def spread(values: list[float], unit: str) -> str:
        middle = statistics.median(values)
        return f"{middle:.1f} {unit} ({min(values):.1f} to {max(values):.1f})"

    return (
        f"The machine, {len(readings)} readings in this run, median (min to max): read "
        f"{spread([reading.read_gb_s for reading in readings], 'GB/s')}, bf16 GEMM "
        f"{spread([reading.gemm_gflop_s for reading in readings], 'GFLOP/s')}."
    )


def _agreement_line(report: Report) -> str:
    if not report.agreement:
        return ""
    reference, shares = report.agreement["reference"], report.agreement["mean_common_prefix"]
    listed = ", ".join(f"{label} {mean:.1f}" for label, mean in shares.items())
    total = report.agreement["new_tokens"]
    return (
        f"Greedy tokens until the first that is not that of {reference}, on average, of {total}: "
        f"{listed}. {100 * report.circling:.0f} % of it goes in circles, which gains"
        " nobody anything: no side guesses tokens."
    )


def _idle_line(report: Report) -> str:
    listed = ", ".join(
        f"{name} {100 * times['computed'] / times['waited']:.1f} %"
        for name, times in report.idle.items()
        if times["waited"]
    )
    return f"CPU used by sides that waited for their turn, of one core: {listed}." if listed else ""
