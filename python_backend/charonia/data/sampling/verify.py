"""Verification of drafts by the target.

Owns comparing drafts with the tokens that the target samples at their positions. Must not know
models, rows or the origin of drafts.

The target samples every position with the noise of that position, and a draft model used the same
noise (Gumbel coupling; Daliri, Musco, Suresh 2024, arXiv 2408.07978). With a total variation TV
between their distributions they agree with a probability of at least (1 - TV) / (1 + TV). A draft
is accepted if it is the token that the target sampled. So the tokens are those that the target
samples without drafts.
"""

from collections.abc import Sequence

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def num_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """The number of drafts before the first one that the target would not have sampled itself.

    Args:
        drafts: k token ids. sampled: k + 1 token ids, at the drafts' positions and the next one.
    """
    pairs = zip(drafts, sampled, strict=False)
    return next((place for place, (d, s) in enumerate(pairs) if d != s), len(drafts))


def num_accepted_synthetically(num_drafts: int, rate: float, seed: int, position: int) -> int:
    """Accept each draft with probability `rate`, whatever it is, up to the first rejection.

    The decision is a function of (seed, position), so a run can be repeated.

    Args:
        position: of the first draft.
    """
    for place in range(num_drafts):
        if _uniform(seed, position + place) >= rate:
            return place
    return num_drafts


def _uniform(seed: int, position: int) -> float:
    """Draw from [0, 1), by SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable ...", sec. 3)."""
    z = (seed * _GOLDEN + (position + 1) * 0xD1B54A32D192ED03) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return float((z ^ (z >> 31)) >> 11) / 2.0**53
