"""Which drafts are worth making: the search behind `AdaptiveDepth`, whose docstring has the theory.

Owns the drafts by worth and the choice among them. Pure; must not know requests, or how costs and
acceptance are learned.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import NamedTuple

LEVELS = 20
"""Acceptance is rounded to multiples of 1 / LEVELS: a level is from 0 to LEVELS."""
_LEAST_WORTH = 0.02  # tokens, of a draft that is considered


class Drafts(NamedTuple):
    """Drafts that are equal: one more token for some rows.

    Attributes:
        worth: tokens that each of them commits on average.
        num_rows: that have the acceptance `level` and room for a draft at `position`, from 1.
    """

    worth: float
    num_rows: int
    position: int
    level: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A prefix of the drafts by worth, and what is predicted of it."""

    limit: int
    num_drafts: int
    goodput: float


@cache
def _worths(level: int, room: int) -> list[float]:
    """Of the drafts at positions 1, 2, ... up to the last one that is worth anything."""
    rate = level / LEVELS
    return [worth for position in range(room) if (worth := rate ** (position + 1)) >= _LEAST_WORTH]


def by_worth(levels: list[int], most: Sequence[int]) -> list[Drafts]:
    """The drafts that there is room for, the best first."""
    num_rows: Counter[tuple[float, int, int]] = Counter()
    for (level, room), count in Counter(zip(levels, most, strict=True)).items():
        for position, worth in enumerate(_worths(level, room), 1):
            num_rows[worth, position, level] += count
    drafts = [Drafts(worth, count, *place) for (worth, *place), count in num_rows.items()]
    return sorted(drafts, key=lambda each: (-each.worth, each.position))


def least_worth(drafts: list[Drafts], choice: Choice) -> float:
    """Worth of the last drafts that the choice takes; infinite where it takes none."""
    left, worth = choice.num_drafts, inf
    for each in drafts:
        if left > 0 and each.position <= choice.limit:
            left -= each.num_rows
            worth = each.worth
    return worth


@cache
def depths_within(limit: int, worth: float) -> list[int]:
    """For each level, how many drafts up to the limit are worth that much."""
    return [sum(each >= worth for each in _worths(level, limit)) for level in range(LEVELS + 1)]


def shorten(depths: list[int], num_drafts: int) -> None:
    """Take so many drafts from the deepest rows, in place; among equal rows, from the last ones."""
    deepest = max(depths, default=0)
    while num_drafts > 0:
        for row in reversed(range(len(depths))):
            if depths[row] == deepest and num_drafts > 0:
                depths[row] -= 1
                num_drafts -= 1
        deepest -= 1


def limits_of_depth(deepest: int) -> Iterable[int]:
    """Limits of depth to try, wider apart where one pass more matters less."""
    limit, following = 1, 2
    while limit < deepest:
        yield limit
        limit, following = following, limit + following
    yield deepest


def best_prefix(
    drafts: list[Drafts],
    limit: int,
    num_tokens: int,
    num_rows: int,
    first_tokens: float,
    lines: list[tuple[int, float, float]],
    per_pass: list[float],
    best: Choice,
) -> Choice:
    """The prefix of the drafts by worth with the most goodput, or `best` if that has more.

    For a row's first draft its draft model computes `first_tokens`, for each further one a token.

    Between two bends of the cost, seconds and tokens grow linearly and goodput is monotone:
    to look at the bends, and at the ends of drafts worth the same, is to look at all.
    """
    goodput, best_size = best.goodput, 0
    size, committed = num_tokens, float(num_rows)
    num_passes, num_draft_tokens = 0, 0.0
    pending = iter(lines)
    end, intercept, slope = next(pending)
    for worth, left, position, _ in drafts:
        if position > limit:
            continue
        if position > num_passes:
            num_passes = position
        while left:
            num_new = left if left < end - size else end - size
            left -= num_new
            size += num_new
            committed += worth * num_new
            num_draft_tokens += num_new * (first_tokens if position == 1 else 1.0)
            per_pass_now = per_pass[int(num_draft_tokens / num_passes + 0.5)]
            seconds = intercept + slope * size + num_passes * per_pass_now
            if committed > goodput * seconds:
                goodput, best_size = committed / seconds, size
            if size == end:
                end, intercept, slope = next(pending)
    return Choice(limit, best_size - num_tokens, goodput) if best_size else best


def give_out(
    drafts: list[Drafts], choice: Choice, levels: list[int], most: Sequence[int]
) -> list[int]:
    """Depths of the rows; among equal rows, the first get what does not suffice for all."""
    left = choice.num_drafts
    depth_of = dict.fromkeys(levels, 0)
    some = None
    for each in drafts:
        if left and each.position <= choice.limit:
            if each.num_rows > left:
                some = each
                break
            depth_of[each.level] = each.position
            left -= each.num_rows
    depths = [min(depth_of[level], room) for level, room in zip(levels, most, strict=True)]
    if some is not None:
        for row, room in enumerate(most):
            if left and levels[row] == some.level and room >= some.position:
                depths[row] = some.position
                left -= 1
    return depths
