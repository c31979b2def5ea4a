"""The depths with the most goodput: the search behind `AdaptiveDepth`, which has the theory.

Pure; must not know requests, or how costs and acceptance are learned.

A row's j-th draft is worth a^j tokens. Rows of equal acceptance a are a group, a draft for each of
them is an item, and of so many drafts the best are those worth most. So items are sorted by worth
and every prefix of that list is a candidate. Passes of a draft model cost something however few
rows take part, so where groups differ the same is done for several limits of depth. Rows so few
that each size is measured by itself need not all have the last draft.

What others prefill in the step is spent anyway, and must not make drafts look cheap: a step is
charged what its drafts add to it, on top of what these rows alone would take without drafts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from charonia.control.estimators.step_cost import StepCost

_LEAST_WORTH = 0.02  # tokens, of a draft that is considered
_MARGIN = 1.02  # by which a change must win: the best of many noisy predictions is flattered
_FEW_ROWS = 8  # fewer can share what is free: some have one draft more than others
_LIMITS = (1, 2, 3, 5, 8, 13, 21, 34, 64)  # wider apart where one pass more matters less


@dataclass(frozen=True, slots=True)
class Best:
    """The best depths, and what is predicted of them.

    Attributes:
        goodput: tokens per second.
        depth_of: drafts of a row by its acceptance; 0 where it is not in there.
        last, num_last: the first `num_last` rows of the acceptance `last` have one draft more.
        deepest: the most drafts of any row.
        saved: seconds per token, against no drafts.
    """

    goodput: float = 1.0
    depth_of: Mapping[float, int] = field(default_factory=dict)
    last: float = 0.0
    num_last: int = 0
    deepest: int = 0
    saved: float = 0.0

    def depths(self, rates: Sequence[float], room: Sequence[int]) -> list[int]:
        """Depth of each row by its acceptance; where its room is less, that is to be applied."""
        left = self.num_last
        depths = []
        for rate, most in zip(rates, room, strict=True):
            depth = self.depth_of.get(rate, 0)
            if rate == self.last and most and left:
                depth += 1
                left -= 1
            depths.append(depth)
        return depths


class _Item(NamedTuple):
    """A draft at a position, from 1, for each row of a group."""

    worth: float
    position: int
    rate: float


def most_goodput(
    cost: StepCost, rows: Mapping[float, int], room: int, num_rows: int, num_tokens: int, now: int
) -> Best:
    """Find the depths with the most predicted goodput.

    Args:
        rows: that may draft, by acceptance. room: drafts of a row at most.
        num_rows: with those that may not, at least 1. num_tokens: of the step without drafts.
        now: the most drafts of a row so far; another number must be clearly better.
    """
    alone = cost.target.at(num_rows)
    spent = cost.target.at(num_tokens) - alone
    best = Best(num_rows / alone)
    value = _MARGIN * best.goodput
    for items in _lists(rows, room, cost.has_draft_model):
        num_drafts, worth, deepest = 0, 0.0, 0
        for index, item in enumerate(items):
            group = rows[item.rate]
            deepest = max(deepest, item.position)
            step = 1 if len(rows) == 1 and num_rows < _FEW_ROWS else group
            for num_last in range(step, group + 1, step):
                size = num_drafts + num_last
                seconds = cost.target.at(num_tokens + size) - spent
                seconds += cost.of_drafts(deepest, size)
                goodput = (num_rows + worth + item.worth * num_last) / seconds
                margin = _MARGIN if deepest == now else 1.0
                if margin * goodput > value:
                    value = margin * goodput
                    depth_of = Counter(each.rate for each in items[:index])
                    saved = max(0.0, alone / num_rows - 1.0 / goodput)
                    best = Best(goodput, depth_of, item.rate, num_last, deepest, saved)
            num_drafts += group
            worth += item.worth * group
    return best


def _lists(
    rows: Mapping[float, int], room: int, has_draft_model: bool
) -> Iterator[Sequence[_Item]]:
    """The items by worth, for each limit of depth."""
    items = [
        _Item(worth, position, rate)
        for rate in rows
        for position in range(1, room + 1)
        if (worth := rate**position) >= _LEAST_WORTH
    ]
    items.sort(key=lambda each: (-each.worth, each.position))
    if has_draft_model and len(rows) > 1:
        for limit in _LIMITS:
            if limit < room:
                yield [each for each in items if each.position <= limit]
    yield items
