"""The search for the depths with the most goodput; `depth` has the theory.

Pure functions. Knows nothing about requests, or how costs and acceptance are learned.

A row's j-th draft is worth a^j tokens. Rows of equal acceptance a form a group. The j-th drafts of
a group are an item. For a given number of drafts, the best items are those with the most worth, so
items are sorted by worth, and every prefix of this list is a candidate. A pass of a draft model
costs time however few rows take part, so with several groups the search is repeated for several
limits of depth. With few rows every size is measured separately, so the last draft may go to a part
of the rows.

Prefill in the same step is computed anyway, and must not make drafts look cheap. So a step is
charged the time that its drafts add, on top of the time of these rows alone without drafts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from charonia.control.estimators.step_cost import StepCost

_LEAST_WORTH = 0.02  # least worth of a draft that is considered, in tokens
_MARGIN = 1.02  # by which a change must win, because the best of many noisy predictions is too high
_FEW_ROWS = 8  # with fewer rows, some may have one draft more than others
_LIMITS = (1, 2, 3, 5, 8, 13, 21, 34, 64)  # limits of depth; one more pass matters less at the end


@dataclass(frozen=True, slots=True)
class Best:
    """The best depths, and the predictions for them.

    Attributes:
        goodput: tokens per second.
        depth_of: drafts of a row by its acceptance; 0 if it is missing.
        last, num_last: the first `num_last` rows of the acceptance `last` have one draft more.
        deepest: the most drafts of any row.
        saved: seconds saved per token, compared with no drafts.
    """

    goodput: float = 1.0
    depth_of: Mapping[float, int] = field(default_factory=dict)
    last: float = 0.0
    num_last: int = 0
    deepest: int = 0
    saved: float = 0.0

    def depths(self, rates: Sequence[float], room: Sequence[int]) -> list[int]:
        """Depth of each row by its acceptance; it may exceed the row's room."""
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
    """A draft at one position, counted from 1, for each row of a group."""

    worth: float
    position: int
    rate: float


def most_goodput(
    cost: StepCost, rows: Mapping[float, int], room: int, num_rows: int, num_tokens: int, now: int
) -> Best:
    """Find the depths with the most predicted goodput.

    Args:
        rows: number of rows that may draft, by acceptance. room: most drafts of a row.
        num_rows: all rows, also those that may not draft; at least 1.
        num_tokens: tokens of the step without drafts.
        now: the deepest depth so far; another one must be clearly better.
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
    """The items sorted by worth, for each limit of depth."""
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
