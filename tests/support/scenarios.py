"""Random scenarios for the scheduler: an engine's sizes, requests that come and go, what breaks.

Owns what a scenario is made of. Must not know how it is played: see `support.scenario_driver`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hypothesis import strategies as st

from charonia.control import NO_SHEDDING, LoadShedding, Policy
from charonia.control.cache.eviction import EVICTIONS
from charonia.control.policies import (
    Deadlines,
    DeadlineWatch,
    Displacement,
    DisplacementByDeadline,
    DisplacementByPriority,
    by_arrival,
    by_deadline,
    by_priority,
    fair,
    ranked,
)
from charonia.protocol import CacheRange

VOCAB = 64


@dataclass(frozen=True)
class Arrival:
    """One request of a scenario; prompts share prefixes so that the cache is hit."""

    at_step: int
    family: int
    shared: int
    own: int
    max_tokens: int
    seed: int
    tenant: int
    stops: bool
    takes_hits: bool
    cancel_after: int | None
    speculates: bool = True
    num_guessed: int = 0
    priority: int = 0
    due_in: int | None = None
    retention: tuple[CacheRange, ...] = ()
    num_samples: int = 1
    cancels_one: bool = False

    @property
    def prompt_ids(self) -> list[int]:
        shared = [(self.family * 7 + i * 3) % VOCAB for i in range(self.shared)]
        return shared + [(self.seed + i) % VOCAB for i in range(self.own)]


@dataclass(frozen=True)
class Scenario:
    """Sizes of an engine, requests that come and go, and steps at which things break.

    Attributes:
        is_early: which steps the engine executes at once, see `EchoExecutor`.
        prompt_tokens: of prompts in a step beside rows that decode; None is all that fit.
        sheddings: what steps do without, in turns.
        expects: how long answers are taken to be, see `PeakMemory`; None is without it.
        max_rows: how far a choice of rows and tokens goes that changes all the time; None is none.
        patience: for how many steps requests wait for others' prefixes; None is not at all.
        tier_sizes: slots of slower tiers, where there is a prefix cache. damages: steps at which
            one of them is damaged.
        rooms: blocks for which the engine says that there is memory, step by step, in turns; it
            does not look without any.
        has_cache_shares: whether tenants have shares of what is cached, by their weights.
    """

    arrivals: list[Arrival]
    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    prefix_caching: bool
    chunked: bool
    failures: set[int] = field(default_factory=set)
    deaths: set[int] = field(default_factory=set)
    drafts: str = "none"
    max_drafts: int = 4
    adaptive: bool = False
    num_stages: int = 1
    async_scheduling: bool = False
    is_early: tuple[bool, ...] = (False,)
    policy: str = "fcfs"
    prompt_tokens: int | None = None
    sheddings: tuple[LoadShedding, ...] = (NO_SHEDDING,)
    expects: bool | None = None
    max_rows: int | None = None
    eviction: str = "lru"
    patience: int | None = None
    tier_sizes: tuple[int, ...] = ()
    damages: set[int] = field(default_factory=set)
    has_cache_shares: bool = False
    rooms: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """True if all that fits into a step is to be in it."""
        return all(getattr(self, name) == value for name, value in PLAIN.items())


PLAIN = {
    "chunked": True,
    "failures": frozenset(),
    "deaths": frozenset(),
    "drafts": "none",
    "num_stages": 1,
    "prompt_tokens": None,
    "sheddings": (NO_SHEDDING,),
    "expects": None,
    "max_rows": None,
    "patience": None,
    "tier_sizes": (),
    "rooms": (),
}
"""Settings with which no request waits that fits."""


class AnyEviction:
    """An eviction policy whose victim is any free entry, never the same one for long."""

    def __init__(self, num_blocks: int) -> None:
        self._free: list[int] = []
        self._state = num_blocks

    def insert(self, entry: int, key: bytes, parent: int) -> None:
        assert entry not in self._free

    def hit(self, entry: int) -> None:
        if entry in self._free:
            self._free.remove(entry)

    def free(self, entry: int) -> None:
        assert entry not in self._free
        self._free.append(entry)

    def victim(self) -> int:
        self._state = (self._state * 75 + 74) % 65537
        return self._free[self._state % len(self._free)]

    def evict(self, entry: int) -> None:
        self._free.remove(entry)


ALL_EVICTIONS = {"any": AnyEviction, **EVICTIONS}
RANKS = {
    "fcfs": by_arrival,
    "priority": by_priority(),
    "aging": by_priority(5.0),
    "deadline": by_deadline,
    "deadline, demoting": by_deadline,
}
WEIGHTS = {"0": 1.0, "1": 2.0}


def _no_watch() -> None:
    """Do nothing, so that nobody looks whether deadlines can be met."""


def _policies() -> dict[str, Callable[[], Policy]]:
    """Every order, alone and within fair shares."""
    found: dict[str, Callable[[], Policy]] = {}
    for name, rank in RANKS.items():
        displacement: Displacement | None = None
        watch: Callable[[], Deadlines | None] = _no_watch
        if name.startswith("deadline"):
            displacement = DisplacementByDeadline()
            watch = partial(DeadlineWatch, demotes=name.endswith("demoting"))
        elif name != "fcfs":
            displacement = DisplacementByPriority(rank)

        def alone(rank=rank, displacement=displacement, watch=watch) -> Policy:
            return ranked(rank, displacement, watch())

        def shared(rank=rank, displacement=displacement, watch=watch) -> Policy:
            return fair(rank, WEIGHTS.__getitem__, displacement, watch())

        found |= {name: alone, f"fair {name}": shared}
    return found


POLICIES = _policies()


@st.composite
def retentions(draw: st.DrawFn) -> tuple[CacheRange, ...]:
    """Ranges in order, of which the last may have no end."""
    places = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=4)))
    return tuple(
        CacheRange(
            start=start,
            end=end,
            priority=draw(st.sampled_from([0, 20, 35, 60, 100])),
            ttl_s=draw(st.sampled_from([None, 1.0, 10.0])),
        )
        for start, end in zip(places, [*places[1:], None], strict=True)
    )


arrivals = st.builds(
    Arrival,
    at_step=st.integers(0, 30),
    family=st.integers(0, 2),
    shared=st.integers(0, 24),
    own=st.integers(1, 12),
    max_tokens=st.integers(1, 16),
    seed=st.integers(0, 3),
    tenant=st.integers(0, 1),
    stops=st.booleans(),
    takes_hits=st.sampled_from([True, True, True, False]),
    cancel_after=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    speculates=st.sampled_from([True, True, False]),
    num_guessed=st.sampled_from([0, 0, 3, 20]),
    priority=st.integers(-1, 2),
    due_in=st.sampled_from([None, 5, 20, 100]),
    retention=st.one_of(st.just(()), retentions()),
    num_samples=st.sampled_from([1, 1, 1, 2, 3, 8]),
    cancels_one=st.booleans(),
)
scenarios = st.builds(
    Scenario,
    arrivals=st.lists(arrivals, min_size=1, max_size=10),
    num_blocks=st.integers(14, 40),
    block_size=st.sampled_from([1, 2, 4, 16]),
    max_num_seqs=st.integers(1, 6),
    budget=st.sampled_from([1, 3, 8, 32, 1000]),
    prefix_caching=st.sampled_from([True, True, False]),
    chunked=st.sampled_from([True, True, False]),
    failures=st.sets(st.integers(0, 60), max_size=2),
    deaths=st.sets(st.integers(0, 60), max_size=2),
    drafts=st.sampled_from(["none", "text", "model", "model", "model of few tokens"]),
    max_drafts=st.sampled_from([1, 2, 5, 16]),
    adaptive=st.booleans(),
    num_stages=st.sampled_from([1, 1, 1, 2, 4]),
    async_scheduling=st.booleans(),
    is_early=st.lists(st.booleans(), min_size=1, max_size=5).map(tuple),
    policy=st.sampled_from(list(POLICIES)),
    prompt_tokens=st.sampled_from([None, None, 1, 4]),
    sheddings=st.lists(
        st.sampled_from(
            [NO_SHEDDING, LoadShedding(speculates=False), LoadShedding(prompt_share=0.25)]
        ),
        min_size=1,
        max_size=4,
    ).map(tuple),
    expects=st.sampled_from([None, None, True, False]),
    max_rows=st.sampled_from([None, None, 1, 3]),
    eviction=st.sampled_from(list(ALL_EVICTIONS)),
    patience=st.sampled_from([None, 1, 3, 20]),
    tier_sizes=st.lists(st.sampled_from([1, 3, 20, 100]), max_size=2).map(tuple),
    damages=st.sets(st.integers(0, 60), max_size=6),
    has_cache_shares=st.booleans(),
    rooms=st.one_of(st.just(()), st.lists(st.integers(2, 40), max_size=12).map(tuple)),
)
