"""The picture of a campaign: how long streams waited, by kind of fault."""

import random
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator, NullFormatter

from faults.campaign_report import Report
from faults.kinds import KINDS
from plot import machine_and_day, make_figure, open_frame, save

_COLORS = ("#1f5fa8", "#e08a2e", "#5a9c57", "#7b5ba6", "#c0392b", "#2b9aa8", "#8a8a3c", "#b05a8c")


def write_plot(report: Report, path: Path) -> None:
    """Two panels, of the first and the last client to go on; a dot is a fault, a box its kind."""
    kinds = [*report.outcome.summary()]
    victims = sorted({fault.victim for fault in report.outcome.faults})
    colors = dict(zip(victims, cycle(_COLORS), strict=False))
    figure = make_figure(11.0, 1.6 + 0.62 * max(len(kinds), 2))
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, title, place in zip(axes, ("first", "last"), (0, -1), strict=True):
        _draw_panel(axis, report, kinds, place, colors)
        axis.set_title(f"until the {title} client went on", fontsize=10)
        axis.set_xlabel("seconds after the fault")
        axis.set_xscale("log")  # a failed step costs a fraction of a second, a lost engine some
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.margins(x=0.08)
        axis.grid(axis="x", which="both", lw=0.4, alpha=0.4)
        open_frame(axis)
    labels = [f"{KINDS[kind].title} ({report.outcome.summary()[kind].count})" for kind in kinds]
    axes[0].set_yticks(range(len(kinds)), labels)
    axes[0].set_ylim(len(kinds) - 0.4, -0.6)
    _add_legend(figure, axes[1])
    about = report.about
    figure.suptitle(
        f"{len(report.outcome.faults)} faults while {about['clients']} clients called, "
        f"tensor_parallel_size {about['tensor_parallel_size']}, "
        f"{machine_and_day(about)}",
        fontsize=11,
    )
    save(figure, path)


def _draw_panel(
    axis: Any, report: Report, kinds: list[str], place: int, colors: dict[str, str]
) -> None:
    jitter = random.Random(0)
    for row, kind in enumerate(kinds):
        faults = [fault for fault in report.outcome.of_kind(KINDS[kind]) if fault.recovery]
        axis.boxplot(
            [fault.recovery[place] for fault in faults],
            positions=[row],
            orientation="horizontal",
            widths=0.6,
            showfliers=False,
            medianprops={"color": "black", "lw": 1.2},
            boxprops={"color": "#888888"},
            whiskerprops={"color": "#888888"},
            capprops={"color": "#888888"},
            manage_ticks=False,
        )
        for fault in faults:
            axis.plot(
                fault.recovery[place],
                row + jitter.uniform(-0.22, 0.22),
                "o",
                ms=4,
                alpha=0.7,
                mew=0,
                color=colors[fault.victim],
                label=fault.victim,
            )


def _add_legend(figure: Any, axis: Any) -> None:
    """One entry per victim."""
    by_label = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    labels = sorted(by_label)
    figure.legend(
        [by_label[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=max(len(labels), 1),
        frameon=False,
        fontsize=9,
    )
