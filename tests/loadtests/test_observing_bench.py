"""The benchmark of what observing costs: its smallest run, on real servers."""

from pathlib import Path

import pytest

import observed_side
from observing_bench import (
    EVERYTHING,
    METRICS,
    OFF,
    OTHER,
    SIDES,
    Case,
    as_markdown,
    measure,
    read_options,
    write_plot,
)
from support.long import long

CHECKOUT = Path(__file__).parents[2]
ALL = (OFF, *SIDES, OTHER)


def test_a_verdict_and_three_decimals_are_told_of_each_ratio() -> None:
    rates = dict.fromkeys(ALL, 1000.0) | {METRICS: 991.4}
    figures = {name: [{"tokens_per_second": rate}] * 9 for name, rate in rates.items()}
    case = Case(1, figures, dict.fromkeys(ALL, 10), dict.fromkeys(ALL, 1))
    table = as_markdown({("demo", 8): case})
    assert "| demo | 8 | metrics read | 0.991 | 0.991 to 0.991 | 0.99 | met |" in table
    assert "| demo | 8 | everything | 1.000 | 1.000 to 1.000 | none |  |" in table
    assert "| 1 of 10 | 1 of 10 |" in table
    ratios = case.as_json()["ratios"]
    assert (ratios[METRICS]["goal"], ratios[METRICS]["verdict"]) == (0.99, "met")
    assert "verdict" not in ratios[EVERYTHING]


def test_only_the_sides_that_are_asked_for_take_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_options([]).sides == [OFF, *SIDES]
    assert read_options(["--sides", METRICS]).sides == [OFF, METRICS]
    assert read_options(["--sides", "--source", str(CHECKOUT)]).sides == [OFF, OTHER]
    with pytest.raises(SystemExit):
        read_options(["--source", str(CHECKOUT / "tests")])
    assert "is no checkout of charonia" in capsys.readouterr().err


@long
def test_the_smallest_run_measures_every_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A turn that is shorter than it was to be must not end before the first read.
    monkeypatch.setattr(observed_side, "READ_EVERY_S", 0.1)
    arguments = "--concurrency 2 --repetitions 1 --turn-seconds 1.5 --source"
    options = read_options([*arguments.split(), str(CHECKOUT)])
    ((count, case),) = measure("demo", options)
    assert [len(case.rates(name)) for name in ALL] == [1] * len(ALL)
    assert case.reads[EVERYTHING]
    assert not case.reads[OFF]
    assert not any(case.failed_reads.values())
    write_plot({("demo", count): case}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size
