"""Transfers of a step beside its computation: blocks loaded and saved, and memory given back.

Owns the amounts. Knows nothing about rows, or which requests wait for loads.
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
        tiers, fetching: None without tiers.
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
        """Names of slower tiers, and the number of blocks in each."""
        return () if self._tiers is None else self._tiers.sizes()

    def set_aside(self, step: Step) -> None:
        """Set aside free blocks for which there is no memory.

        Args:
            step: no row of it may be planned yet, so that no request gets one of those blocks.
        """
        if self._num_usable != self._kv.num_usable:
            # Keep as many as one request may need, whatever the engine reports.
            step.discards = self._kv.resize(max(self._num_usable, self._least_usable))
        if self._kv.num_usable < self._kv.num_blocks - 1:
            step.num_blocks = self._kv.num_usable + 1

    def plan(self, step: Step, *, is_alone: bool) -> None:
        """Plan loads for waiting requests, and saves.

        The step overwrites or gives back what this plan evicted, and saves it before.

        Args:
            step: all its rows must be planned.
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
        """Record what was loaded and saved, and for how many blocks there is memory."""
        if self._tiers is not None and step.saves:
            self._tiers.note_saved(step.saves, result.not_saved)
        for fetch in step.fetches:
            assert self._fetching is not None
            self._fetching.apply(fetch, result.not_loaded)
        if result.num_blocks is not None:
            self._num_usable = result.num_blocks - 1
