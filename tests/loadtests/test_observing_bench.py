"""The benchmark of what observing costs: its smallest run, on real servers."""

import argparse
from pathlib import Path

from observing_bench import EVERYTHING, METRICS, OFF, SIDES, Case, as_markdown, measure, write_plot
from support.long import long


def test_a_verdict_and_three_decimals_are_told_of_each_ratio() -> None:
    rates = dict.fromkeys(SIDES, 1000.0) | {METRICS: 991.4}
    figures = {name: [{"tokens_per_second": rate}] * 9 for name, rate in rates.items()}
    case = Case(1, figures, dict.fromkeys(SIDES, 10), dict.fromkeys(SIDES, 1))
    table = as_markdown({("demo", 8): case})
    assert "| demo | 8 | metrics read | 0.991 | 0.991 to 0.991 | 0.99 | met |" in table
    assert "| demo | 8 | everything | 1.000 | 1.000 to 1.000 | none |  |" in table
    assert "| 1 of 10 | 1 of 10 |" in table
    ratios = case.as_json()["ratios"]
    assert (ratios[METRICS]["goal"], ratios[METRICS]["verdict"]) == (0.99, "met")
    assert "verdict" not in ratios[EVERYTHING]


@long
def test_the_smallest_run_measures_every_side(tmp_path: Path) -> None:
    options = argparse.Namespace(seed=0, concurrency=[2], repetitions=1, turn_seconds=1.5)
    ((count, case),) = measure("demo", options)
    assert [len(case.rates(name)) for name in SIDES] == [1] * len(SIDES)
    assert case.reads[EVERYTHING]
    assert not case.reads[OFF]
    assert not any(case.failed_reads.values())
    write_plot({("demo", count): case}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size
