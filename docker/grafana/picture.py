"""Draws a dashboard, nearly as Grafana would: `python docker/grafana/picture.py overview out.png`.

Owns how panels are drawn. The queries are those of the dashboard's file, asked of a Prometheus.
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

FOLDER = Path(__file__).parent / "dashboards"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
VARIABLES = {"$instance": ".*", "$model": ".*"}
NUM_POINTS = 240
UNITS = {
    "s": " s",
    "cps": "/s",
    "reqps": "/s",
    "percentunit": " %",
    "bytes": " B",
    "binBps": " B/s",
}
MAX_NAMES = 9
"""Most names in a legend; there is no room for more."""

# In inches. Grafana's grid has 24 columns.
COLUMNS, COLUMN, ROW, TITLE = 24, 0.56, 0.3, 0.4
GAP = 0.04
LEFT, RIGHT, TOP, BOTTOM = 0.58, 0.15, 0.3, 0.65
DPI = 90


@dataclass(frozen=True)
class Line:
    """A series: its name, seconds from the beginning, values."""

    name: str
    times: list[float]
    values: list[float]


class Source:
    """A Prometheus, and the time that is drawn.

    Args:
        url: of Prometheus. seconds: until now.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self.seconds = seconds
        self._http = httpx.Client(base_url=url, timeout=30.0)
        self._end = time.time()
        self._step = max(seconds / NUM_POINTS, 1.0)

    def lines(self, panel: Mapping[str, Any]) -> list[Line]:
        """The series of a panel that have a value."""
        return [
            line
            for target in panel["targets"]
            for line in self._series(target["expr"], target["legendFormat"])
            if any(map(math.isfinite, line.values))
        ]

    def _series(self, expr: str, legend: str) -> list[Line]:
        for name, value in VARIABLES.items():
            expr = expr.replace(name, value)
        expr = expr.replace("$__rate_interval", f"{max(4 * self._step, 10):.0f}s")
        start = self._end - self.seconds
        reply = self._http.get(
            "/api/v1/query_range",
            params={"query": expr, "start": start, "end": self._end, "step": self._step},
        )
        reply.raise_for_status()
        found = []
        for one in reply.json()["data"]["result"]:
            name = legend_of(legend, one["metric"])
            times = [float(at) - start for at, _ in one["values"]]
            found.append(Line(name, times, [float(value) for _, value in one["values"]]))
        return found

    def is_last(self, line: Line) -> bool:
        """Return whether a series goes on to the end."""
        return line.times[-1] > self.seconds - 2 * self._step


def legend_of(template: str, labels: Mapping[str, str]) -> str:
    """A legend with its labels filled in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template)


def short(value: float, unit: str) -> str:
    """A value as Grafana writes it, nearly."""
    if not math.isfinite(value):
        return "-"
    if unit == "s" and 0 < abs(value) < 1:
        return f"{1000 * value:.3g} ms"
    if unit == "percentunit":
        value *= 100
    for bound, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            scale = 1e3 if letter == "k" else bound
            return f"{value / scale:.3g}{letter}{UNITS.get(unit, '')}"
    return f"{value:.4g}{UNITS.get(unit, '')}"


def clock(seconds: float) -> str:
    """A time as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def draw_value(axes: Axes, panel: Mapping[str, Any], source: Source) -> None:
    """Draw the last values of a panel, or the names of the series that have one."""
    axes.set_axis_off()
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    lines = [line for line in source.lines(panel) if source.is_last(line)]
    if panel["options"]["textMode"] == "name":
        shown = [line.name for line in lines]
    else:
        shown = [short(line.values[-1], unit) for line in lines]
    text = ", ".join(shown) or "No data"
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=17, transform=axes.transAxes)


def draw_lines(axes: Axes, panel: Mapping[str, Any], source: Source) -> None:
    """Draw a panel's series over time."""
    defaults = panel["fieldConfig"]["defaults"]
    lines = source.lines(panel)
    if not lines:
        axes.text(0.5, 0.5, "No data", ha="center", va="center", transform=axes.transAxes)
    elif defaults["custom"].get("stacking", {}).get("mode") == "normal":
        times = sorted({at for line in lines for at in line.times})
        values = [dict(zip(line.times, line.values, strict=True)) for line in lines]
        layers = [[one.get(at, 0.0) for at in times] for one in values]
        names = [line.name if any(line.values) else f"_{line.name}" for line in lines]
        axes.stackplot(times, layers, labels=names, alpha=0.7, linewidth=0)
    else:
        for line in lines:
            name = line.name if any(line.values) else f"_{line.name}"  # one with _ has no legend
            axes.plot(line.times, line.values, label=name, linewidth=1.2)
    axes.set_xlim(0, source.seconds)
    is_empty = not any(value for line in lines for value in line.values)
    axes.set_ylim(0, 1 if is_empty else 1.03 * axes.get_ylim()[1])
    unit = defaults.get("unit", "short")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value, unit)))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 3, 6, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: clock(value)))
    axes.tick_params(labelsize=7, length=2, color="#999999")
    axes.grid(alpha=0.25, linewidth=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(
        handles[:MAX_NAMES],
        names[:MAX_NAMES],
        loc="upper left",
        bbox_to_anchor=(0.0, -0.12),
        ncols=3,
        fontsize=6.5,
        frameon=False,
        borderaxespad=0.2,
        columnspacing=1.0,
        handlelength=1.2,
    )


def draw(name: str, source: Source, path: Path) -> None:
    """Draw a dashboard to a PNG.

    Raises:
        httpx.HTTPError: Prometheus does not answer.
    """
    dashboard = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    num_rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    width, height = COLUMNS * COLUMN, num_rows * ROW + TITLE
    figure = Figure(figsize=(width, height), facecolor="#f4f5f5")
    figure.text(GAP / width, 1 - 0.5 * TITLE / height, dashboard["title"], va="center", fontsize=13)
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        left, across = place["x"] * COLUMN + GAP, place["w"] * COLUMN - 2 * GAP
        high = place["h"] * ROW - 2 * GAP
        below = height - TITLE - (place["y"] + place["h"]) * ROW + GAP

        def within(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
            return x / width, y / height, w / width, h / height

        x, y, w, h = within(left, below, across, high)
        if panel["type"] == "row":
            figure.text(x, y, panel["title"], va="bottom", fontsize=9.5, weight="bold")
            continue
        frame = {"facecolor": "white", "edgecolor": "#d8d9da", "linewidth": 0.8, "zorder": -1}
        figure.add_artist(Rectangle((x, y), w, h, transform=figure.transFigure, **frame))
        figure.text(x + 0.08 / width, y + h - 0.06 / height, panel["title"], va="top", fontsize=8.5)
        if panel["type"] == "stat":
            draw_value(figure.add_axes(within(left, below, across, high - 0.2)), panel, source)
        else:
            inner = within(left + LEFT, below + BOTTOM, across - LEFT - RIGHT, high - TOP - BOTTOM)
            draw_lines(figure.add_axes(inner), panel, source)
    figure.savefig(path, dpi=DPI)


def main() -> int:
    """Draw what the command line says."""
    parser = argparse.ArgumentParser(description="draw a dashboard with what a Prometheus has")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:9090", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=5.0, help="default: %(default)g")
    options = parser.parse_args()
    draw(options.name, Source(options.url, 60 * options.minutes), options.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
