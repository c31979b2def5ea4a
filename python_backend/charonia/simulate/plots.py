"""One picture of several runs: time to first token, queue length, and what each class got.

Owns the drawing. Must not know how the numbers were made.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from charonia.errors import ConfigError
from charonia.simulate.report import RunReport
from charonia.simulate.simulator import Outcome

_MAX_BARS = 8
_MAX_POINTS = 2000


def write_plot(
    title: str, reports: Sequence[RunReport], outcomes: Sequence[Outcome], path: Path
) -> None:
    """Draw runs side by side.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'charonia[plots]'") from None
    figure = Figure(figsize=(12, 8), layout="constrained")
    (first, waiting), (gaps, classes) = figure.subplots(2, 2)
    figure.suptitle(title)
    for one, outcome in zip(reports, outcomes, strict=True):
        _distribution(first, one.name, outcome)
        at = [sample.at for sample in outcome.samples]
        waiting.plot(at, [sample.num_waiting for sample in outcome.samples], label=one.name)
    first.set(xlabel="time to first token, s", ylabel="share of requests", xscale="log")
    waiting.set(xlabel="time, s", ylabel="waiting requests")
    first.legend()
    _bars(gaps, reports, "inter_token", 1000, "time between tokens, p99, ms")
    _bars(classes, reports, "ttft", 1, "time to first token, p99, s")
    if any(one.overall.ttft.p99 for one in reports):
        classes.set_yscale("log")
    figure.savefig(path, dpi=110)


def _distribution(axis, name: str, outcome: Outcome) -> None:  # type: ignore[no-untyped-def]
    times = sorted(
        one.first_token_at - one.arrived_at
        for one in outcome.served
        if one.first_token_at is not None
    )
    shares = np.linspace(0, len(times) / max(1, len(outcome.served)), len(times))
    step = max(1, len(times) // _MAX_POINTS)
    axis.plot(times[::step], shares[::step], label=name)


def _bars(axis, reports: Sequence[RunReport], what: str, factor: float, label: str) -> None:  # type: ignore[no-untyped-def]
    """Draw a group of bars per class, with a bar per run."""
    parts = [part.name for part in reports[0].classes[: _MAX_BARS + 1]]
    width = 0.8 / len(reports)
    for number, one in enumerate(reports):
        found = {part.name: getattr(part, what).p99 for part in one.classes}
        heights = [factor * (found.get(name) or 0.0) for name in parts]
        places = np.arange(len(parts)) + width * number - 0.4 + width / 2
        axis.bar(places, heights, width, label=one.name)
    axis.set_xticks(range(len(parts)), parts, rotation=20)
    axis.set_ylabel(label)
