"""Cases of a test that are long by nature: `make test` leaves those to `make test-long`.

Owns the mark and the choice among many equal cases. Must not know what they are cases of.
"""

from collections.abc import Iterable
from typing import Any

import pytest

long = pytest.mark.long


def one_in(step: int, cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """All cases, as `parametrize` takes them; the first of every `step` is short, the rest long.

    Of a product, take a step that has no divisor in common with how many values any parameter has:
    so the short ones have every value, if there are enough of them.
    """
    return [
        pytest.param(*case, marks=[long] if place % step else [])
        for place, case in enumerate(cases)
    ]
