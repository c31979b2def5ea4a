"""Common parts of all pictures: figures that no window shows, their head, bars of ratios.

Must not know what was measured.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import Ratio

DPI = 120


def make_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write it as PNG."""
    figure.savefig(path, dpi=DPI)


def machine_and_day(about: Mapping[str, Any]) -> str:
    """Cores and date of a run, for the figure's head.

    Args:
        about: see `record.circumstances`.
    """
    return f"{about['machine'].get('CPU(s)', '?')} cores, {about['date'][:10]}"


def open_frame(axis: Axes) -> None:
    """Leave out the frame's upper and right side."""
    axis.spines[["top", "right"]].set_visible(False)


def draw_ratios(
    axis: Axes, places: Sequence[float], ratios: Sequence[Ratio], width: float, label: str
) -> None:
    """Bars of medians, with whiskers from the lowest to the highest of all pairs."""
    below = [one.median - one.lowest for one in ratios]
    above = [one.highest - one.median for one in ratios]
    medians = [one.median for one in ratios]
    axis.bar(places, medians, width, yerr=[below, above], label=label, capsize=3)
