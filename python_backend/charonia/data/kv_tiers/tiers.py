"""The slower tiers of one rank's KV cache, as the engine's arguments configure them.

Owns the list of tiers, and copying blocks to slots and back. Must not know which blocks are worth
keeping: plans say what is saved and loaded.

    pages (device) ── BlockBytes ──► HostSlots    memory, `swap_space`
                                └──► FileSlots    a file, `kv_cache_path`
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from charonia.config import EngineArgs
from charonia.data.basis import Basis
from charonia.data.comm import Place
from charonia.data.kv_store import KVStore
from charonia.data.kv_tiers.block_bytes import BlockBytes
from charonia.data.kv_tiers.file_slots import SECRET_BYTES, FileSlots, bytes_for, num_slots_in
from charonia.data.kv_tiers.host_slots import HostSlots
from charonia.data.kv_tiers.identity import identity_of, label_of
from charonia.data.kv_tiers.slots import Slots
from charonia.data.loaded_models import KVStores, Models
from charonia.data.memory import available_memory
from charonia.errors import ConfigError
from charonia.protocol import BlockLoad, BlockSave, KeptBlocks, TierInfo

_GIB = 2**30


def make_tiers(
    basis: Basis,
    models: Models,
    kv: KVStores,
    place: Place,
    slot_bytes: int,
    *,
    log: Callable[[str], None],
) -> "KVTiers | None":
    """Create the tiers that an engine's arguments configure; None if there are none.

    Args:
        kv: the KV caches of these models. place: of this rank in the target.
        slot_bytes: the most of all ranks, see `Room`. log: takes one line.

    Raises:
        ConfigError: a file cannot be created, or there is no space for a block.
        CheckpointError: files of a checkpoint are missing or damaged.
    """
    sizes = TierSizes.of(basis.args, slot_bytes)
    if not sizes:
        return None
    stores = [store for store in kv if store is not None]
    num_ranks, memory = basis.local_rank.count, available_memory()
    # On a CPU the KV cache takes memory only as it is written.
    kv_bytes = sum(store.num_bytes for store in stores) if basis.device.type == "cpu" else 0
    available = max(memory.available - num_ranks * kv_bytes, 0)
    if sizes.host * slot_bytes * num_ranks > available:
        raise ConfigError(
            f"swap_space = {basis.args.swap_space:g} GiB for each of {num_ranks} ranks is more than"
            f" the {available / _GIB:.1f} GiB that are available beside the KV cache"
            f" ({memory.source})"
        )
    identity = identity_of(basis, models, place)
    label = label_of(basis.args, place)
    file = partial(FileSlots, identity=identity, label=label, num_files=num_ranks, log=log)
    return KVTiers(basis.args, stores, sizes, slot_bytes, file)


class KVTiers:
    """All slower tiers of a rank.

    Args:
        stores: the KV caches of this rank.
        num_slots: of each tier. slot_bytes: the most of all ranks, see `Room`.
        make_file: creates a `FileSlots` from a directory, the number of slots, their size, and the
            file's maximum size.

    Raises:
        ConfigError: a file cannot be created.
    """

    def __init__(
        self,
        args: EngineArgs,
        stores: Sequence[KVStore],
        num_slots: "TierSizes",
        slot_bytes: int,
        make_file: Callable[..., FileSlots],
    ) -> None:
        self._blocks = BlockBytes(stores)
        self._slots: list[Slots] = []
        self._slot_bytes = slot_bytes
        self._secret = os.urandom(SECRET_BYTES)
        if num_slots.host:
            self._slots.append(HostSlots(num_slots.host, self._blocks.num_bytes))
        if num_slots.file:
            assert args.kv_cache_path is not None
            file = make_file(
                Path(args.kv_cache_path),
                num_slots=num_slots.file,
                slot_bytes=self._blocks.num_bytes,
                most_bytes=int(args.kv_cache_file_space * _GIB),
            )
            self._slots.append(file)
            self._secret = file.secret

    def kept(self) -> KeptBlocks:
        """The current contents of the tiers."""
        tiers = [
            TierInfo(name=slots.name, num_slots=slots.num_slots, contents=slots.contents())
            for slots in self._slots
        ]
        return KeptBlocks(hash_secret=self._secret, slot_bytes=self._slot_bytes, tiers=tiers)

    def save(self, saves: Sequence[BlockSave]) -> list[int]:
        """Save blocks in order; return the indices of those that failed."""
        not_saved = []
        for place, one in enumerate(saves):
            pieces = self._blocks.read(one.block_id)
            if not self._slots[one.tier].save(one.slot, one.key, one.has_draft, pieces):
                not_saved.append(place)
        return not_saved

    def load(self, loads: Sequence[BlockLoad]) -> list[int]:
        """Load blocks; return the ids of those that failed, which are filled with zeros."""
        not_loaded = []
        for one in loads:
            pieces = self._blocks.pieces(one.block_id)
            if self._slots[one.tier].load(one.slot, one.key, pieces):
                self._blocks.write(one.block_id)
            else:
                self._blocks.clear(one.block_id)
                not_loaded.append(one.block_id)
        return not_loaded

    def forget(self, moves: Sequence[BlockLoad] | Sequence[BlockSave]) -> None:
        """Clear slots whose load or save failed on another rank."""
        for one in moves:
            self._slots[one.tier].forget(one.slot)

    def close(self) -> None:
        """Release the tiers."""
        for slots in self._slots:
            slots.close()


class TierSizes(msgspec.Struct, frozen=True):
    """The number of slots of each tier; 0 for a tier that is not used."""

    host: int = 0
    file: int = 0

    @classmethod
    def of(cls, args: EngineArgs, slot_bytes: int) -> "TierSizes":
        """The most slots within the space that an engine's arguments allow each rank.

        Args:
            slot_bytes: of the rank with the largest slots, as all ranks have the same number of
                slots.

        Raises:
            ConfigError: not even one slot fits.
        """
        host_space, file_space = args.swap_space, args.kv_cache_file_space
        host = int(host_space * _GIB) // slot_bytes
        if host_space and not host:
            raise _too_little("swap_space", host_space, slot_bytes, slot_bytes)
        file = 0
        if args.kv_cache_path is not None:
            file = num_slots_in(int(file_space * _GIB), slot_bytes)
            if not file:
                least = bytes_for(1, slot_bytes)
                raise _too_little("kv_cache_file_space", file_space, slot_bytes, least)
        return cls(host, file)

    def __bool__(self) -> bool:
        return self.host + self.file > 0


def _too_little(name: str, space: float, slot_bytes: int, least: int) -> ConfigError:
    return ConfigError(
        f"{name} = {space:g} GiB holds no block of {slot_bytes} bytes; set at least"
        f" {1.05 * least / _GIB:.2g}"  # still enough after rounding
    )
