"""What a scheduling policy is made of. Owns the protocols, no policy."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.state.request import Request, Update


class WaitingOrder(Protocol):
    """The requests that have no row, in the order in which they are offered one.

    A preempted request comes back to the place that it would have had if it had never left.
    """

    def __len__(self) -> int:
        """How many wait."""
        ...

    def __contains__(self, request: Request) -> bool:
        """Whether this one does."""
        ...

    def push(self, request: Request, *, is_new: bool) -> None:
        """Add a request, that has just come, or waited or ran before."""
        ...

    def remove(self, request: Request) -> None:
        """Take a waiting request out, wherever it stands."""
        ...

    def in_order(self) -> Iterator[Request]:
        """Those to be offered what is free, first one first; one that does not fit may be passed.

        Nothing may be pushed or removed meanwhile.
        """
        ...

    def foremost(self, highest_level: float) -> Iterator[Request]:
        """Those to be looked at that may displace others, first one first; as `in_order`.

        Args:
            highest_level: of those that run, see `Displacement`: there is no need to give anybody
                where all that wait have the same or more.
        """
        ...


class RunningOrder(Protocol):
    """The requests that have a row, in the order in which they keep what they have."""

    def __len__(self) -> int:
        """How many run."""
        ...

    def add(self, request: Request) -> None:
        """Add a request that was given a row."""
        ...

    def remove(self, request: Request) -> None:
        """Take one out that gives its row back."""
        ...

    def in_order(self) -> list[Request]:
        """All of them: the first is the first to get tokens, the last one is the first victim.

        The list is the caller's.
        """
        ...

    @property
    def highest_level(self) -> float:
        """Of any of them, see `Displacement`; -inf where nobody displaces anybody."""
        ...


class Displacement(Protocol):
    """Who may take rows and blocks of whom."""

    def level(self, request: Request) -> float:
        """Smaller is sooner: nobody may displace one of a smaller level, or of the same.

        It stays the same while a request has a row.
        """
        ...

    def victims(self, waiting: Request, running: Iterable[Request]) -> Iterator[Request]:
        """Those of `running`, in this order, of whom the one that waits may take all they have."""
        ...


class Service(Protocol):
    """Takes note of what requests are given, where the order depends on it."""

    def start(self, lengths: OutputLengths) -> None:
        """Called once, before all else.

        Args:
            lengths: how long answers are, to be asked when that matters.
        """
        ...

    def note_admission(self, request: Request) -> None:
        """A request begins for the first time: its prompt will be computed but for its hits."""
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
    """Watches over the deadlines of those that wait.

    Attributes:
        demotes: whether those that are late are to go behind all others; else they are to end.
    """

    demotes: bool

    def start(self, lengths: OutputLengths, prompt_time: PromptTime) -> None:
        """Called once, before all else.

        Args:
            lengths, prompt_time: how long answers are, and how long prompts take, to be asked when
                that matters.
        """
        ...

    def note_waiting(self, request: Request) -> None:
        """A request waits from now on: it has just come, or was preempted."""
        ...

    def note_leaving(self, request: Request) -> None:
        """A request waits no longer, or has ended."""
        ...

    def note_step(self, seconds: float) -> None:
        """A step took so long in the engine, the draft model included."""
        ...

    def take_late(self, now: float, num_cached: Callable[[Request], int]) -> list[Late]:
        """Those that wait and will be late, as far as is known now; each is told of once.

        Args:
            num_cached: tokens of a request that the prefix cache or a slower tier holds, which
                takes long to tell.
        """
        ...


@dataclass(frozen=True)
class Policy:
    """A scheduling policy, of one scheduler: it holds the requests that wait and run.

    Attributes:
        displacement: None where nobody displaces anybody.
        service: None where the order does not depend on what requests were given.
        deadlines: None where nobody looks whether they can be met.
    """

    waiting: WaitingOrder
    running: RunningOrder
    displacement: Displacement | None = None
    service: Service | None = None
    deadlines: Deadlines | None = None
