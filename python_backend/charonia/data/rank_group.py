"""The other ranks of an engine, from the view of the engine's own process.

Owns the protocol only: `parallel.worker_group` implements it. Must not know how ranks are started,
or their messages.
"""

from collections.abc import Callable
from typing import Protocol

from charonia.data.basis import Basis, LocalRank
from charonia.data.comm import ModelRank
from charonia.data.model.paged import Model, PagedModel
from charonia.data.sizing import Room
from charonia.protocol import Collectives, EngineInfo, StepPlan


class RankGroup(Protocol):
    """The ranks of an engine, from the view of the rank that runs the steps."""

    @property
    def local_rank(self) -> LocalRank:
        """This rank's place among those of its machine."""
        ...

    def join(self, basis: Basis) -> tuple[ModelRank, ModelRank | None]:
        """Wait for the other ranks; return this one's parts of the target and draft models."""
        ...

    def measure(self) -> None:
        """Wait until all ranks have loaded, and have them run the largest step with this one."""
        ...

    def agree(self, room: Room) -> Room:
        """Agree on the KV blocks that fit on all ranks, and have all ranks allocate them."""
        ...

    def move(self, plan: StepPlan, *, uses_all: bool) -> Callable[[], tuple[set[int], set[int]]]:
        """Have the other ranks move a plan's blocks between tiers and discard blocks.

        Args:
            uses_all: whether all blocks are in use again, see `KVStore.use_all`.

        Returns:
            A function that returns what any of them could not load and save, as `StepResult` does.
        """
        ...

    def lead(self, name: str, model: PagedModel) -> Model:
        """Wrap a model so that the other ranks with parts of it compute the same."""
        ...

    def describe(self, info: EngineInfo) -> EngineInfo:
        """Add the information about the ranks."""
        ...

    def collectives(self) -> Collectives:
        """Counters of the operations since the last call."""
        ...

    def lose(self, reason: str) -> None:
        """Give up the engine: its ranks are no longer in step."""
        ...

    def check(self) -> None:
        """Raise RankLostError, with the first reason, if a rank was lost."""
        ...

    def close(self) -> None:
        """End the other ranks."""
        ...
