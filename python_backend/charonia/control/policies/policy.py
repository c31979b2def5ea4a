"""The protocols that make up a scheduling policy. Owns no policy."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request, Update


class WaitingOrder(Protocol):
    """The requests without a row, in the order in which they are offered one.

    A preempted request returns to the place that it would have if it had never left.
    """

    def __len__(self) -> int:
        """Number of waiting requests."""
        ...

    def __contains__(self, request: Request) -> bool:
        """Return whether a request waits."""
        ...

    def push(self, request: Request, *, is_new: bool) -> None:
        """Add a request: a new one, or one that waited or ran before."""
        ...

    def remove(self, request: Request) -> None:
        """Remove a waiting request at any position."""
        ...

    def in_order(self) -> Iterator[Request]:
        """The requests to admit, in order. A later one may pass one that does not fit.

        Nothing may be pushed or removed during the iteration.
        """
        ...

    def foremost(self, highest_level: float) -> Iterator[Request]:
        """The requests to consider for displacing others, in order; otherwise as `in_order`.

        Args:
            highest_level: highest level of the running requests, see `Displacement`. If all waiting
                requests have at least this level, none needs to be returned.
        """
        ...


class RunningOrder(Protocol):
    """The requests with a row; the last in order is preempted first."""

    def __len__(self) -> int:
        """Number of running requests."""
        ...

    def add(self, request: Request) -> None:
        """Add a request that was given a row."""
        ...

    def remove(self, request: Request) -> None:
        """Remove a request that gives its row back."""
        ...

    def in_order(self) -> list[Request]:
        """All requests: the first gets tokens first, the last is preempted first.

        The caller may change the list.
        """
        ...

    @property
    def highest_level(self) -> float:
        """Highest level of a running request, see `Displacement`; -inf without displacement."""
        ...


class Displacement(Protocol):
    """Order of displacement: the running requests that a waiting one may displace."""

    def level(self, request: Request) -> float:
        """Smaller is sooner: a request can only be displaced by one of a smaller level.

        It does not change while a request has a row.
        """
        ...

    def victims(self, waiting: Request, running: Iterable[Request]) -> Iterator[Request]:
        """Return those of `running`, in this order, that the waiting request may preempt."""
        ...


class Service(Protocol):
    """Counts what requests are given, if the order depends on it."""

    def start(self, lengths: OutputLengths) -> None:
        """Called once, before all else.

        Args:
            lengths: estimates how long answers are; to be asked later.
        """
        ...

    def start_epoch(self, limits: Limits) -> None:
        """Called for each engine, before its first step."""
        ...

    def note_admission(self, request: Request) -> None:
        """A request is admitted for the first time; its prompt is computed, except for its hits."""
        ...

    def note_outputs(self, updates: Iterable[Update]) -> None:
        """Tokens were generated in a step."""
        ...


class Late(NamedTuple):
    """A waiting request that cannot meet its deadline: it needs more seconds than are left."""

    request: Request
    needed_s: float
    left_s: float


class Deadlines(Protocol):
    """Watches the deadlines of waiting requests.

    Attributes:
        demotes: whether late requests go behind all others; otherwise they are ended.
    """

    demotes: bool

    def start(self, lengths: OutputLengths, prompt_time: PromptTime) -> None:
        """Called once, before all else.

        Args:
            lengths, prompt_time: estimate how long answers are, and how long prompts take; to be
                asked later.
        """
        ...

    def note_waiting(self, request: Request) -> None:
        """A request waits from now on: it is new, or was preempted."""
        ...

    def note_leaving(self, request: Request) -> None:
        """A request no longer waits, or has ended."""
        ...

    def note_step(self, seconds: float) -> None:
        """A step took `seconds` in the engine, the draft model included."""
        ...

    def take_late(self, now: float, num_cached: Callable[[Request], int]) -> list[Late]:
        """The waiting requests that will be late, as estimated now; each is returned once.

        Args:
            num_cached: tokens of a request that the prefix cache or a slower tier holds; slow.
        """
        ...


@dataclass(frozen=True)
class Policy:
    """A scheduling policy of one scheduler. It holds the waiting and the running requests.

    Attributes:
        displacement: None if no request may displace others.
        service: None if the order does not depend on what requests were given.
        deadlines: None if deadlines are not watched.
    """

    waiting: WaitingOrder
    running: RunningOrder
    displacement: Displacement | None = None
    service: Service | None = None
    deadlines: Deadlines | None = None
