"""What steps do without while more is asked of the server than it can do.

Owns the words for it. Must not know when that is.
"""

from typing import NamedTuple


class LoadShedding(NamedTuple):
    """How steps are made lighter for those who wait, or for those whose tokens come.

    Attributes:
        speculates: whether tokens are guessed ahead.
        prompt_share: of the tokens of prompts that a step computes beside rows that generate.
    """

    speculates: bool = True
    prompt_share: float = 1.0


NO_SHEDDING = LoadShedding()
