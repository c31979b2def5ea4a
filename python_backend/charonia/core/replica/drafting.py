"""Speculation as a configuration asks for it.

Owns the choice of drafter and policy. Must not know what they do.
"""

from charonia.config import SpeculativeConfig
from charonia.control import (
    AdaptiveDepth,
    Drafter,
    FixedDepth,
    NgramDrafter,
    Speculation,
    SuffixDrafter,
)


def make_speculation(config: SpeculativeConfig | None) -> Speculation | None:
    """Set up speculation; None where there is to be none."""
    if config is None:
        return None
    drafter: Drafter | None = None
    if config.method == "ngram":
        drafter = NgramDrafter(*config.prompt_lookup)
    elif config.method == "suffix":
        drafter = SuffixDrafter()
    has_draft_model = config.has_draft_model
    return Speculation(
        max_drafts=config.max_drafts,
        policy=AdaptiveDepth(has_draft_model=has_draft_model) if config.adaptive else FixedDepth(),
        drafter=drafter,
    )
