"""What the benchmark of K and V in fewer bits says of its figures."""

import math

import pytest

from kv_bench import Format, report

BASE = Format(128.0, [-1.0, -2.0, -3.0, -2.0], [1, 2, 3, 4], [10.0] * 6)


def found(int8: Format) -> dict[str, Format]:
    return {"bfloat16": BASE, "int8": int8}


def test_what_is_lost_is_judged_by_the_bars_of_the_format() -> None:
    same = Format(66.0, BASE.logprobs, BASE.best, [15.0] * 6)
    text = report(found(same))
    assert "| int8 | 66 (1.94) | +0.000 % (at most 0.1 %: met) |" in text
    assert "| 100.00 % (at least 99.5 %: met) |" in text
    worse = Format(66.0, [-1.0, -2.0, -3.1, -2.0], [1, 2, 3, 5], [15.0] * 6)
    assert worse.change_of_perplexity(BASE) == pytest.approx(100 * (math.exp(0.025) - 1))
    text = report(found(worse))
    assert "+2.532 % (at most 0.1 %: missed)" in text
    assert "75.00 % (at least 99.5 %: missed)" in text


def test_a_gain_is_that_of_neighbours_and_is_met_by_the_lower_end_of_its_interval() -> None:
    drifting = Format(66.0, BASE.logprobs, BASE.best, [14.0, 15.0, 16.0, 14.5, 15.0, 15.5])
    assert "| 15.0 | 1.50 (1.40 to 1.60), at least 1.4: met |" in report(found(drifting))
    drifting.rates[0] = 13.9
    assert "1.50 (1.39 to 1.60), at least 1.4: not shown |" in report(found(drifting))
