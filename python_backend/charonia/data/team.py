"""The other ranks of an engine, as the engine's own process sees them.

Owns the protocol alone: `parallel.team` implements it. Must not know how ranks are started or what
is said between them.
"""

from collections.abc import Callable
from typing import Protocol

from charonia.data.basis import Basis, LocalRank
from charonia.data.comm import ModelRank
from charonia.data.model.paged import Model, PagedModel
from charonia.data.sizing import Room
from charonia.protocol import Collectives, EngineInfo, StepPlan


class Team(Protocol):
    """The ranks of an engine, as the one that runs the steps sees them."""

    @property
    def local_rank(self) -> LocalRank:
        """This process among those on its machine."""
        ...

    def join(self, basis: Basis) -> tuple[ModelRank, ModelRank | None]:
        """Meet the others; return this rank's part in the target and in the draft model."""
        ...

    def measure(self) -> None:
        """Wait until all have loaded, and have them run the largest step with this one."""
        ...

    def agree(self, room: Room) -> Room:
        """Return what the ranks all have room for, and have all take that."""
        ...

    def move(self, plan: StepPlan, *, uses_all: bool) -> Callable[[], tuple[set[int], set[int]]]:
        """Have the other ranks move a plan's blocks between tiers, and discard others.

        Args:
            uses_all: whether all blocks are in use again, see `KVStore.use_all`.

        Returns:
            Tells what one of them has not loaded and not saved, as `StepResult` does.
        """
        ...

    def lead(self, name: str, model: PagedModel) -> Model:
        """Have the other ranks that are in model `name` follow what is computed with it."""
        ...

    def describe(self, info: EngineInfo) -> EngineInfo:
        """Add what there is to know of the ranks."""
        ...

    def collectives(self) -> Collectives:
        """What was exchanged since the last call."""
        ...

    def lose(self, reason: str) -> None:
        """The ranks no longer do the same: there is no going on."""
        ...

    def check(self) -> None:
        """Raises RankLostError, with the first reason, when there is no going on."""
        ...

    def close(self) -> None:
        """End the other ranks."""
        ...
