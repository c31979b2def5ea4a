"""What a step moves beside what it computes: blocks loaded and saved, and memory given back.

Owns the amounts. Must not know rows, nor which requests wait for what is loaded.
"""

from collections.abc import Iterable

from charonia.control.cache import Tiers
from charonia.control.cache.block_tables import BlockTables
from charonia.control.cache.fetching import LOADED_ALONE, LOADED_AT_ONCE, Fetching
from charonia.control.cache.tiers import SAVED_ALONE, SAVED_AT_ONCE
from charonia.control.scheduling.fitting import Fitting
from charonia.control.state.limits import Limits
from charonia.control.state.step import Step
from charonia.protocol import StepResult


class Transfers:
    """The transfers of one epoch's steps.

    Args:
        fitting: tells how many blocks may be loaded into.
        tiers, fetching: None where the engine has none.
    """

    def __init__(
        self,
        limits: Limits,
        blocks: BlockTables,
        fitting: Fitting,
        tiers: Tiers | None,
        fetching: Fetching | None,
    ) -> None:
        self._kv = blocks.kv
        self._fitting = fitting
        self._tiers = tiers
        self._fetching = fetching
        self._least_usable = limits.blocks_for(limits.max_model_len)
        self._num_usable = limits.num_blocks - 1  # blocks for which the engine has memory

    def sizes(self) -> Iterable[tuple[str, int]]:
        """Names of slower tiers, and how many blocks they hold."""
        return () if self._tiers is None else self._tiers.sizes()

    def set_aside(self, step: Step) -> None:
        """Have no more blocks in use than there is memory for, as far as others are free.

        Args:
            step: in which no row has been planned: who is admitted gets none of those blocks.
        """
        if self._num_usable != self._kv.num_usable:
            # As many stay as one request may need, whatever the engine says.
            step.discards = self._kv.resize(max(self._num_usable, self._least_usable))
        if self._kv.num_usable < self._kv.num_blocks - 1:
            step.num_blocks = self._kv.num_usable + 1

    def plan(self, step: Step, *, is_alone: bool) -> None:
        """Have some blocks loaded that waiting requests need, and some saved.

        What is evicted in this plan is written to, or given back, in its step, and saved before.

        Args:
            step: in which all rows have been planned.
            is_alone: whether nothing is computed meanwhile.
        """
        if self._tiers is None or self._fetching is None:
            return
        if self._fetching.has_more:
            most = self._tiers.blocks_in(LOADED_ALONE if is_alone else LOADED_AT_ONCE)
            num_spare = self._fitting.num_to_load_into(self._fitting.num_owed())
            step.fetches = self._fetching.plan(most, num_spare)
        self._kv.save(self._tiers.blocks_in(SAVED_ALONE if is_alone else SAVED_AT_ONCE))
        step.saves = self._tiers.take_saves()

    def apply(self, step: Step, result: StepResult) -> None:
        """Take note of what was loaded and saved, and of the memory that there is."""
        if self._tiers is not None and step.saves:
            self._tiers.note_saved(step.saves, result.not_saved)
        for fetch in step.fetches:
            assert self._fetching is not None
            self._fetching.apply(fetch, result.not_loaded)
        if result.num_blocks is not None:
            self._num_usable = result.num_blocks - 1
