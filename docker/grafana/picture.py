"""Draws a dashboard as Grafana would: `python docker/grafana/picture.py overview out.png`.

Owns how panels are drawn. The queries are those of the dashboard's file, asked of a Prometheus.
"""

import argparse
import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import FuncFormatter

FOLDER = Path(__file__).parent / "dashboards"
VARIABLES = {"$instance": ".*", "$model": ".*"}
COLUMNS = 24
"""Of Grafana's grid."""
INCH = 0.6
"""Of one column's width, and of a row's height."""
NUM_POINTS = 240
UNITS = {
    "s": " s",
    "cps": "/s",
    "reqps": "/s",
    "percentunit": " %",
    "bytes": " B",
    "binBps": " B/s",
}


class Source:
    """A Prometheus, and the time that is drawn.

    Args:
        url: of Prometheus. seconds: until now.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self._http = httpx.Client(base_url=url, timeout=30.0)
        self._end = time.time()
        self._seconds = seconds
        self._step = max(seconds / NUM_POINTS, 1.0)

    def series(self, expr: str) -> list[tuple[dict[str, str], list[float], list[float]]]:
        """The series of an expression: labels, seconds from the beginning, values."""
        for name, value in VARIABLES.items():
            expr = expr.replace(name, value)
        expr = expr.replace("$__rate_interval", f"{max(4 * self._step, 10):.0f}s")
        start = self._end - self._seconds
        reply = self._http.get(
            "/api/v1/query_range",
            params={"query": expr, "start": start, "end": self._end, "step": self._step},
        )
        reply.raise_for_status()
        found = []
        for one in reply.json()["data"]["result"]:
            points = [(float(at) - start, float(value)) for at, value in one["values"]]
            found.append((one["metric"], [at for at, _ in points], [value for _, value in points]))
        return found


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


def legend_of(template: str, labels: dict[str, str]) -> str:
    """A legend with its labels filled in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template)


def draw_value(axes: Axes, panel: dict[str, Any], source: Source) -> None:
    """Draw the last value of a panel, and its course below."""
    axes.set_axis_off()
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    (target,) = panel["targets"]
    found = source.series(target["expr"])
    values = found[0][2] if found else [math.nan]
    text = short(values[-1], unit)
    axes.text(0.5, 0.45, text, ha="center", va="center", fontsize=17, transform=axes.transAxes)


def draw_lines(axes: Axes, panel: dict[str, Any], source: Source) -> None:
    """Draw a panel's series over time."""
    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults.get("unit", "short")
    stacks = defaults["custom"].get("stacking", {}).get("mode") == "normal"
    lines = [
        (legend_of(target["legendFormat"], labels), times, values)
        for target in panel["targets"]
        for labels, times, values in source.series(target["expr"])
    ]
    lines = [line for line in lines if any(map(math.isfinite, line[2]))]
    if stacks and lines:
        times = max((line[1] for line in lines), key=len)
        layers = [
            [dict(zip(own, values, strict=True)).get(at, 0.0) for at in times]
            for _, own, values in lines
        ]
        axes.stackplot(times, layers, labels=[line[0] for line in lines], alpha=0.7, linewidth=0)
    else:
        for legend, times, values in lines:
            axes.plot(times, values, label=legend, linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value, unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25, linewidth=0.5)
    if 0 < len(lines) <= 12:
        axes.legend(fontsize=6.5, frameon=False, ncols=2, loc="upper left")


def draw(name: str, source: Source, path: Path) -> None:
    """Draw a dashboard to a PNG."""
    dashboard = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(COLUMNS * INCH, height * INCH * 0.62), layout="constrained")
    grid = GridSpec(height, COLUMNS, figure=figure)
    for panel in panels:
        place = panel["gridPos"]
        rows = slice(place["y"], place["y"] + place["h"])
        axes = figure.add_subplot(grid[rows, place["x"] : place["x"] + place["w"]])
        axes.set_title(panel["title"], fontsize=9, loc="left")
        (draw_value if panel["type"] == "stat" else draw_lines)(axes, panel, source)
    figure.suptitle(dashboard["title"], fontsize=12)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Draw what the command line says."""
    parser = argparse.ArgumentParser(description="draw a dashboard with what a Prometheus has")
    parser.add_argument("name", choices=sorted(path.stem for path in FOLDER.glob("*.json")))
    parser.add_argument("path", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:9090", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=5.0, help="default: %(default)g")
    options = parser.parse_args()
    draw(options.name, Source(options.url, 60 * options.minutes), options.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
