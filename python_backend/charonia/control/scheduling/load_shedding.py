"""Load shedding: reduced work of steps while the server is overloaded.

Owns the settings. Knows nothing about when they apply.
"""

from typing import NamedTuple


class LoadShedding(NamedTuple):
    """Reductions of steps' work under load.

    Attributes:
        speculates: whether tokens are drafted.
        prompt_share: share of the prompt tokens that a step computes beside rows that generate.
    """

    speculates: bool = True
    prompt_share: float = 1.0


NO_SHEDDING = LoadShedding()
