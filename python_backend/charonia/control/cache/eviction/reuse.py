"""Reuse of entries by kind: the ages at which they are used, and the value of keeping one.

Owns these statistics. Knows nothing about entries, or the meaning of a kind.

For each kind it counts how many entries reached each age without being used, and how many were used
at that age. The quotient is a hazard (Kaplan, Meier 1958, "Nonparametric Estimation from Incomplete
Observations"). Each step of ages is twice as long as the one before, so a kind takes a dozen
numbers. The value of an entry of age a is the most hits per time that keeping it can bring, if it
is evicted at the best age b unless it was used::

                      P(used at an age in a .. b | not before a)
    density(a) = max  ──────────────────────────────────────────────
                 b>a  E[time until it is used or reaches age b | same]

This is the index of Gittins (1979, "Bandit Processes and Dynamic Allocation Indices"): among items
that each pay once, at an unknown time, and of which only few can be kept, keep those with the
largest index.
"""

from itertools import pairwise

_NUM_AGES = 12
_FIRST_AGE = 1 / 32  # the end of the first step of ages, as a share of the cache's blocks
_PRIOR_HAZARD = (
    0.02  # per step of ages; the same in each, so that old entries are worth less by default
)
_PRIOR_WEIGHT = 50.0  # entries
_KIND_WEIGHT = 200.0  # weight of the average of all kinds in one kind's hazards, in entries
_HALF_LIFE = 8.0  # half-life of the counts, in fillings of the cache
_MAX_WEIGHT = 1e100


class ReuseTimes:
    """Hazards and densities by kind and age. Time is counted in entries that become free.

    Args:
        num_blocks: blocks of the cache.

    Attributes:
        ends: ends of the steps of ages, in time.
    """

    def __init__(self, num_blocks: int, num_kinds: int) -> None:
        self.ends = [max(1.0, _FIRST_AGE * num_blocks) * 2**age for age in range(_NUM_AGES)]
        self._widths = [end - start for start, end in pairwise([0.0, *self.ends])]
        self._num_blocks = num_blocks
        self._weight = 1.0  # weight of a new count; it grows instead of all counts shrinking
        self._everything = num_kinds
        self._reached = [[0.0] * _NUM_AGES for _ in range(num_kinds + 1)]
        self._asked = [[0.0] * _NUM_AGES for _ in range(num_kinds + 1)]
        self._density = [[0.0] * _NUM_AGES for _ in range(num_kinds)]
        self._pooled = [_PRIOR_HAZARD] * _NUM_AGES
        self._seen = [False] * num_kinds
        self._has_data: list[int] = []  # kinds that were seen
        self._next = 0  # index in it of the kind to learn next
        for kind in range(num_kinds):
            self._density[kind] = self._densities(self._pooled)

    def density(self, kind: int, age: int) -> float:
        """Most hits per time that keeping an entry of this kind and age can bring."""
        return self._density[kind][age]

    def note_reached(self, kind: int, age: int, num_entries: int) -> None:
        """`num_entries` entries reached an age."""
        if num_entries and not self._seen[kind]:
            self._seen[kind] = True
            self._has_data.append(kind)
        self._reached[kind][age] += num_entries * self._weight
        self._reached[self._everything][age] += num_entries * self._weight

    def note_asked(self, kind: int, age: int) -> None:
        """An entry was used at an age."""
        self._asked[kind][age] += self._weight
        self._asked[self._everything][age] += self._weight

    def pass_time(self, num_entries: int) -> None:
        """Let earlier counts weigh less."""
        self._weight *= 2 ** (num_entries / (_HALF_LIFE * self._num_blocks))
        if self._weight > _MAX_WEIGHT:
            for counts in (*self._reached, *self._asked):
                counts[:] = [count / self._weight for count in counts]
            self._weight = 1.0

    def learn(self) -> int | None:
        """Update the densities of one kind from the counts; return it, if there is any."""
        if not self._has_data:
            return None
        if self._next >= len(self._has_data):
            self._next = 0
            prior = [_PRIOR_HAZARD] * _NUM_AGES
            self._pooled = self._hazards(self._everything, prior, _PRIOR_WEIGHT)
        kind = self._has_data[self._next]
        self._next += 1
        self._density[kind] = self._densities(self._hazards(kind, self._pooled, _KIND_WEIGHT))
        return kind

    def _hazards(self, kind: int, prior: list[float], num_prior: float) -> list[float]:
        num_prior *= self._weight
        return [
            min(1.0, (asked + num_prior * before) / (reached + num_prior))
            for asked, reached, before in zip(
                self._asked[kind], self._reached[kind], prior, strict=True
            )
        ]

    def _densities(self, hazards: list[float]) -> list[float]:
        found = []
        for first in range(_NUM_AGES):
            surviving, hits, time, best = 1.0, 0.0, 0.0, 0.0
            for hazard, width in zip(hazards[first:], self._widths[first:], strict=True):
                hits += surviving * hazard
                time += surviving * width * (1 - hazard / 2)
                surviving *= 1 - hazard
                best = max(best, hits / time)
            found.append(best)
        return found
