"""Test of counts against a distribution."""

import math
from collections.abc import Sequence


def chi_square_limit(degrees: int) -> float:
    """Upper 1e-4 point of chi-square (Wilson, Hilferty 1931)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 3.719 * math.sqrt(part)) ** 3


def assert_drawn_from(counts: Sequence[int], probabilities: Sequence[float]) -> None:
    """Check counts against probabilities; cells of fewer than five expected are thrown together.

    Raises:
        AssertionError: something impossible was drawn, or chi-square is beyond its limit.
    """
    total = sum(counts)
    cells, rare, rare_expected = [], 0, 0.0
    for count, probability in zip(counts, probabilities, strict=True):
        assert probability > 0 or count == 0, "something impossible was drawn"
        if (expected := probability * total) >= 5:
            cells.append((count, expected))
        else:
            rare, rare_expected = rare + count, rare_expected + expected
    if rare_expected >= 5:
        cells.append((rare, rare_expected))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    if len(cells) > 1:
        assert statistic < chi_square_limit(len(cells) - 1)
