"""The picture of a run: every ratio beside its bar, and the sweep over depths."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plot import machine_and_day, make_figure, open_frame, save
from speculation.speculation_report import Report, RoundResult

_COLORS = {
    "met": "#1f5fa8",
    "not shown": "#e08a2e",
    "missed": "#c0392b",
    "counts nowhere": "#b8b8b8",
}


def write_plot(report: Report, path: Path) -> None:
    """One panel of ratios, and one for each model of the sweep."""
    sweep = report.of_case("sweep")
    models = list(dict.fromkeys(result.round.what for result in sweep))
    height = max(4.2, 0.32 * len(report.rounds) + 1.4)
    figure = make_figure(7.0 + 4.6 * len(models), height)
    widths = [1.5, *[1.0] * len(models)]
    axes = figure.subplots(1, 1 + len(models), width_ratios=widths, squeeze=False)
    _draw_ratios(axes[0][0], report.rounds)
    for axis, model in zip(axes[0][1:], models, strict=True):
        _draw_sweep(axis, model, [result for result in sweep if result.round.what == model])
    figure.suptitle(f"speculation, {machine_and_day(report.about)}", fontsize=11)
    save(figure, path)


def _draw_ratios(axis: Any, results: Sequence[RoundResult]) -> None:
    """A dot is the median of the pairs, its line the interval of the median; "|" is the bar."""
    names = []
    for place, result in enumerate(results):
        found, round_ = result.judgement(), result.round
        color = _COLORS[found.verdict]
        if interval := found.ratio.interval:
            axis.hlines(place, interval.low, interval.high, color, lw=2)
        axis.plot(found.ratio.median, place, "o", color=color, ms=5)
        axis.plot(round_.bar, place, "|", color="black", ms=12)
        names.append(
            f"{round_.case}: {round_.what}, {round_.concurrency} at once,"
            f" {found.contender} / {found.rival}"
        )
    axis.axvline(1.0, color="black", lw=0.6, ls="dashed")
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    handles = [axis.plot([], [], color=color, label=name)[0] for name, color in _COLORS.items()]
    # With a place that is named matplotlib does not warn when finding it takes long.
    axis.legend(handles=handles, loc="best", frameon=False, fontsize=7)
    axis.set_title("ratio of output tokens/s; | is the bar", fontsize=10)
    open_frame(axis)


def _draw_sweep(axis: Any, model: str, results: Sequence[RoundResult]) -> None:
    """Rates over depth 0's; the adaptive one has no depth and is a dashed line."""
    for index, result in enumerate(results):
        medians = {label: statistics.median(rates) for label, rates in result.rates.items()}
        base = medians["depth 0"]
        adaptive = medians.pop(result.round.contender) / base
        depths = [int(label.removeprefix("depth ")) for label in medians]
        color = f"C{index}"
        label = f"{result.round.concurrency} at once"
        axis.plot(
            depths, [rate / base for rate in medians.values()], "o-", color=color, label=label
        )
        axis.axhline(adaptive, color=color, ls="dashed", lw=1)
    axis.set_title(f"{model}: rate over depth 0's\n(dashed: adaptive)", fontsize=10)
    axis.set_xlabel("drafts per step")
    axis.legend(loc="best", frameon=False, fontsize=8)
    open_frame(axis)
