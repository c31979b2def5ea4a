"""The threshold that a measured ratio must reach (its bar), and whether it was shown to.

One rule for gains and for "no loss" alike. Pure; must not know what was measured.
"""

from typing import Literal

from medians import Interval

Verdict = Literal["met", "missed", "not shown", "counts nowhere"]


def verdict(interval: Interval | None, bar: float) -> Verdict:
    """Compare the interval of a ratio's median with the least that it must be.

    Returns:
        "met" where the interval's lower end reaches the bar, "missed" where its upper end does not,
        and "not shown" in between, or where there are too few values for an interval.
    """
    if interval is None:
        return "not shown"
    if interval.low >= bar:
        return "met"
    return "missed" if interval.high < bar else "not shown"
