"""Index of slower tiers: the content of their slots, and the blocks to save to them.

Owns the map from keys to slots, and the choice of the next slot to write. Knows blocks only by
number, and nothing about whether a tier is memory or a file.

    KVCache ── a block was hit, or a hit block is evicted ──► Tiers ── saves ──► the next plan
    Fetching ── a request waits for what the KV cache lacks ──► Tiers ── loads ──► the next plan

Tiers are independent: a block is saved to each tier that lacks it, and loaded from the first that
has it. The least recently used content is overwritten first. Within a prefix later blocks are
overwritten before earlier ones, because hits are noted from the last block to the first.

A slot may not hold what this map says: a save may have failed, or a file may be damaged. The engine
compares keys and checksums, and reports what it could not load or save.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from charonia.control.state.stats import SchedulerStats
from charonia.protocol import BlockLoad, BlockSave, KeptBlocks, SlotContent, TierInfo

SAVED_AT_ONCE, SAVED_ALONE = 4 * 2**20, 32 * 2**20
"""Bytes that a step saves if rows compute in it, and if nothing waits for it. Blocks that are
evicted before they were saved come on top, up to the greater of the two; the rest is lost."""


class _Content(NamedTuple):
    slot: int
    has_draft: bool


class _Tier:
    """Slots by the key of their content, least recently used first."""

    def __init__(self, info: TierInfo) -> None:
        self.contents = OrderedDict(
            (one.key, _Content(one.slot, one.has_draft)) for one in info.contents
        )
        self.num_slots = info.num_slots
        used = {content.slot for content in self.contents.values()}
        # A generator, because there may be too many slots to list.
        self._never_used = (slot for slot in range(info.num_slots) if slot not in used)
        self._empty: list[int] = []

    def put(self, key: bytes, has_draft: bool) -> int:
        """Assign a slot to content that no slot holds."""
        slot = self._empty.pop() if self._empty else next(self._never_used, None)
        if slot is None:
            slot = self.contents.popitem(last=False)[1].slot
        self.contents[key] = _Content(slot, has_draft)
        return slot

    def drop(self, key: bytes, slot: int) -> None:
        """Forget that a slot holds a key, unless it was reassigned meanwhile."""
        content = self.contents.get(key)
        if content is not None and content.slot == slot:
            del self.contents[key]
            self._empty.append(slot)


class Tiers:
    """All slower tiers of an engine.

    Args:
        kept: the engine's description of them.
        stats: counts blocks.

    Attributes:
        hash_secret: secret of the hash that makes the keys.
    """

    def __init__(self, kept: KeptBlocks, stats: SchedulerStats) -> None:
        self.hash_secret = kept.hash_secret
        self._slot_bytes = kept.slot_bytes
        self._tiers = [_Tier(info) for info in kept.tiers]
        self._names = [info.name for info in kept.tiers]
        self._stats = stats
        self._saves: list[BlockSave] = []

    def __contains__(self, key: bytes) -> bool:
        """Return whether any tier holds the content with this key."""
        return any(key in tier.contents for tier in self._tiers)

    def describe(self) -> KeptBlocks:
        """Describe the content of the tiers, as an engine would."""
        tiers = [
            TierInfo(
                name=name,
                num_slots=tier.num_slots,
                contents=[SlotContent(one.slot, key, one.has_draft) for key, one in items],
            )
            for name, tier in zip(self._names, self._tiers, strict=True)
            for items in [tier.contents.items()]
        ]
        return KeptBlocks(hash_secret=self.hash_secret, slot_bytes=self._slot_bytes, tiers=tiers)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Names of the tiers, and the number of blocks in each."""
        return zip(self._names, (len(tier.contents) for tier in self._tiers), strict=True)

    def blocks_in(self, num_bytes: int) -> int:
        """Return the number of blocks that fit into `num_bytes`; at least one."""
        return max(1, num_bytes // self._slot_bytes)

    def note_hit(self, key: bytes) -> bool:
        """Note a hit; return whether every tier holds the content.

        Hits of a prefix must be noted from the last block to the first.
        """
        holds = [key in tier.contents for tier in self._tiers]
        for tier, has in zip(self._tiers, holds, strict=True):
            if has:
                tier.contents.move_to_end(key)
        return all(holds)

    @property
    def may_save_more(self) -> bool:
        """True if the next plan may save more blocks."""
        return len(self._saves) < self.blocks_in(SAVED_ALONE)

    def save(self, block_id: int, key: bytes, has_draft: bool) -> None:
        """Let the next plan save a block to every tier that lacks its content."""
        for number, tier in enumerate(self._tiers):
            if key not in tier.contents:
                slot = tier.put(key, has_draft)
                self._saves.append(BlockSave(block_id, number, slot, key, has_draft))

    def take_saves(self) -> list[BlockSave]:
        """All saves since the last call, in order."""
        saves, self._saves = self._saves, []
        return saves

    def note_saved(self, saves: Sequence[BlockSave], not_saved: Collection[int]) -> None:
        """A plan's saves have been executed.

        Args:
            not_saved: indexes of the saves that failed.
        """
        self._stats.blocks_saved += len(saves) - len(not_saved)
        for place in not_saved:
            one = saves[place]
            self._tiers[one.tier].drop(one.key, one.slot)

    def load(self, block_id: int, key: bytes) -> tuple[BlockLoad, bool]:
        """Return the load of a tier's content into a block; and whether it has draft KV."""
        number = next(n for n, tier in enumerate(self._tiers) if key in tier.contents)
        contents = self._tiers[number].contents
        contents.move_to_end(key)  # so that no save of this step overwrites it
        slot, has_draft = contents[key]
        return BlockLoad(number, slot, block_id, key), has_draft

    def drop(self, loads: Iterable[BlockLoad]) -> None:
        """These loads failed: the slots did not hold their keys."""
        for load in loads:
            self._tiers[load.tier].drop(load.key, load.slot)
            self._stats.loads_failed += 1
