"""Which content slower tiers hold, in which of their slots, and what is to be saved to them.

Owns the map from keys to slots, and which slot is written to next. Must not know blocks by anything
but their numbers, nor whether a tier is memory or a file.

    KVCache ── a block was hit, or such a one is evicted ──► Tiers ── saves ──► the next plan
    Fetching ── a request waits for what the KV cache lacks ──► Tiers ── loads ──► the next plan

The tiers do not know of each other: what is saved is saved to each that lacks it, and loaded from
the first that has it. What was asked for longest ago goes first; what continues a prefix goes
before that, as it is noted before it.

That a slot holds what is said here is no promise: a save may have failed, or a file been damaged.
The engine compares keys and checksums, and says what it could not load or save.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from charonia.control.state.stats import SchedulerStats
from charonia.protocol import BlockLoad, BlockSave, KeptBlocks, SlotContent, TierInfo

SAVED_AT_ONCE, SAVED_ALONE = 4 * 2**20, 32 * 2**20
"""Bytes that a step saves in which rows compute, and one that nothing waits for. What is evicted
before it was saved comes on top, up to the greater of these; what is more is lost."""


class _Content(NamedTuple):
    slot: int
    has_draft: bool


class _Tier:
    """Slots, by the keys of what they hold; those asked for longest ago come first."""

    def __init__(self, info: TierInfo) -> None:
        self.contents = OrderedDict(
            (one.key, _Content(one.slot, one.has_draft)) for one in info.contents
        )
        self.num_slots = info.num_slots
        used = {content.slot for content in self.contents.values()}
        # There may be more slots than could be listed.
        self._never_used = (slot for slot in range(info.num_slots) if slot not in used)
        self._empty: list[int] = []

    def put(self, key: bytes, has_draft: bool) -> int:
        """Give a slot to what no slot holds."""
        slot = self._empty.pop() if self._empty else next(self._never_used, None)
        if slot is None:
            slot = self.contents.popitem(last=False)[1].slot
        self.contents[key] = _Content(slot, has_draft)
        return slot

    def drop(self, key: bytes, slot: int) -> None:
        """A slot does not hold a content; nothing happens where it is not said to any more."""
        content = self.contents.get(key)
        if content is not None and content.slot == slot:
            del self.contents[key]
            self._empty.append(slot)


class Tiers:
    """All slower tiers of an engine.

    Args:
        kept: what the engine says of them.
        stats: where to count blocks.

    Attributes:
        hash_secret: of the keys.
    """

    def __init__(self, kept: KeptBlocks, stats: SchedulerStats) -> None:
        self.hash_secret = kept.hash_secret
        self._slot_bytes = kept.slot_bytes
        self._tiers = [_Tier(info) for info in kept.tiers]
        self._names = [info.name for info in kept.tiers]
        self._stats = stats
        self._saves: list[BlockSave] = []

    def __contains__(self, key: bytes) -> bool:
        """Whether any tier holds this content."""
        return any(key in tier.contents for tier in self._tiers)

    def describe(self) -> KeptBlocks:
        """What the tiers hold now, as an engine would say it."""
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
        """Names of the tiers, and how many blocks they hold."""
        return zip(self._names, (len(tier.contents) for tier in self._tiers), strict=True)

    def blocks_in(self, num_bytes: int) -> int:
        """How many blocks have so many bytes; at least one."""
        return max(1, num_bytes // self._slot_bytes)

    def note_hit(self, key: bytes) -> bool:
        """Somebody has asked for a content; whether every tier holds it.

        Of a prefix, what comes last is noted first.
        """
        holds = [key in tier.contents for tier in self._tiers]
        for tier, has in zip(self._tiers, holds, strict=True):
            if has:
                tier.contents.move_to_end(key)
        return all(holds)

    @property
    def may_save_more(self) -> bool:
        """Whether the next plan saves fewer blocks than a step may ever save."""
        return len(self._saves) < self.blocks_in(SAVED_ALONE)

    def save(self, block_id: int, key: bytes, has_draft: bool) -> None:
        """Have the next plan save a block to every tier that lacks its content."""
        for number, tier in enumerate(self._tiers):
            if key not in tier.contents:
                slot = tier.put(key, has_draft)
                self._saves.append(BlockSave(block_id, number, slot, key, has_draft))

    def take_saves(self) -> list[BlockSave]:
        """All that was to be saved since the last call, in order."""
        saves, self._saves = self._saves, []
        return saves

    def note_saved(self, saves: Sequence[BlockSave], not_saved: Collection[int]) -> None:
        """A plan's saves have been executed.

        Args:
            not_saved: places among these of what is not kept.
        """
        self._stats.blocks_saved += len(saves) - len(not_saved)
        for place in not_saved:
            one = saves[place]
            self._tiers[one.tier].drop(one.key, one.slot)

    def load(self, block_id: int, key: bytes) -> tuple[BlockLoad, bool]:
        """How to load a content, which a tier holds, into a block; and whether it has draft KV."""
        number = next(n for n, tier in enumerate(self._tiers) if key in tier.contents)
        contents = self._tiers[number].contents
        contents.move_to_end(key)  # so that nothing takes its place in this step
        slot, has_draft = contents[key]
        return BlockLoad(number, slot, block_id, key), has_draft

    def drop(self, loads: Iterable[BlockLoad]) -> None:
        """These slots did not hold what they were said to."""
        for load in loads:
            self._tiers[load.tier].drop(load.key, load.slot)
            self._stats.loads_failed += 1
