"""Numbers of calls of a method, for tests of costs on any machine."""

from collections import Counter
from typing import Any

import pytest


def count_calls(patch: pytest.MonkeyPatch, owner: type, name: str) -> Counter[str]:
    """Count the calls of a method from now on, by its name."""
    method, calls = getattr(owner, name), Counter[str]()

    def counted(*args: Any) -> Any:
        calls[name] += 1
        return method(*args)

    patch.setattr(owner, name, counted)
    return calls
