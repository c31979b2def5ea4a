"""The slower tiers of one rank's KV cache, as its engine was asked to have them.

Owns which tiers there are, and the way of a block to a slot and back. Must not know which blocks
are worth keeping: plans say what is saved and loaded.

    pages (device) ── BlockBytes ──► HostSlots    memory, `swap_space`
                                └──► FileSlots    a file, `kv_cache_path`
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from charonia.config import EngineArgs
from charonia.data.comm import Place
from charonia.data.kv_store import KVStore
from charonia.data.kv_tiers.block_bytes import BlockBytes
from charonia.data.kv_tiers.file_slots import SECRET_BYTES, FileSlots, Identity
from charonia.data.kv_tiers.host_slots import HostSlots
from charonia.data.kv_tiers.slots import Slots
from charonia.data.memory import available_memory
from charonia.data.model.fingerprint import fingerprint
from charonia.data.model.loader import weight_files
from charonia.data.models import Basis, KVStores, Models
from charonia.errors import ConfigError
from charonia.protocol import BlockLoad, BlockSave, KeptBlocks, TierInfo
from charonia.version import VERSION

_GIB = 2**30
_PACKAGE = Path(__file__).parents[2]


def make_tiers(
    basis: Basis,
    models: Models,
    kv: KVStores,
    place: Place,
    slot_bytes: int,
    *,
    log: Callable[[str], None],
) -> "KVTiers | None":
    """The tiers that an engine's arguments ask for; None where that is none.

    Args:
        kv: of these models. place: of this rank in the target.
        slot_bytes: see `Room`; of all ranks.
        log: takes one line.

    Raises:
        ConfigError: there can be no file where one is asked for, or there is no room for a block.
        CheckpointError: files of a checkpoint are missing or damaged.
    """
    sizes = TierSizes.of(basis.args, slot_bytes)
    if not sizes:
        return None
    stores = [store for store in kv if store is not None]
    num_ranks, memory = basis.local_rank.count, available_memory()
    # A CPU's KV cache takes its memory as it is written to.
    kv_bytes = sum(store.num_bytes for store in stores) if basis.device.type == "cpu" else 0
    available = max(memory.available - num_ranks * kv_bytes, 0)
    if sizes.host * slot_bytes * num_ranks > available:
        raise ConfigError(
            f"swap_space = {basis.args.swap_space:g} GiB for each of {num_ranks} ranks is more than"
            f" the {available / _GIB:.1f} GiB that are available beside the KV cache"
            f" ({memory.source})"
        )
    identity = identity_of(basis, models, place)
    return KVTiers(basis.args, stores, sizes, slot_bytes, identity, log=log)


class KVTiers:
    """All slower tiers of a rank.

    Args:
        stores: the KV caches of this rank.
        num_slots: of each tier. slot_bytes: see `Room`; of all ranks.
        identity: see `identity_of`.
        log: takes one line.

    Raises:
        ConfigError: there can be no file where one is asked for.
    """

    def __init__(
        self,
        args: EngineArgs,
        stores: Sequence[KVStore],
        num_slots: "TierSizes",
        slot_bytes: int,
        identity: Identity,
        *,
        log: Callable[[str], None],
    ) -> None:
        self._blocks = BlockBytes(stores)
        self._slots: list[Slots] = []
        self._slot_bytes = slot_bytes
        self._secret = os.urandom(SECRET_BYTES)
        if num_slots.host:
            self._slots.append(HostSlots(num_slots.host, self._blocks.num_bytes))
        if num_slots.file:
            assert args.kv_cache_path is not None
            file = FileSlots(
                Path(args.kv_cache_path),
                identity,
                num_slots.file,
                self._blocks.num_bytes,
                most_bytes=int(args.kv_cache_file_space * _GIB),
                log=log,
            )
            self._slots.append(file)
            self._secret = file.secret

    def kept(self) -> KeptBlocks:
        """What the tiers contain at this moment."""
        tiers = [
            TierInfo(name=slots.name, num_slots=slots.num_slots, contents=slots.contents())
            for slots in self._slots
        ]
        return KeptBlocks(hash_secret=self._secret, slot_bytes=self._slot_bytes, tiers=tiers)

    def save(self, saves: Sequence[BlockSave]) -> None:
        """Save blocks, one after the other."""
        for one in saves:
            pieces = self._blocks.read(one.block_id)
            self._slots[one.tier].save(one.slot, one.key, one.has_draft, pieces)

    def load(self, loads: Sequence[BlockLoad]) -> list[int]:
        """Load blocks; those for which that fails contain zeros then, and are returned."""
        not_loaded = []
        for one in loads:
            pieces = self._blocks.pieces(one.block_id)
            if self._slots[one.tier].load(one.slot, one.key, pieces):
                self._blocks.write(one.block_id)
            else:
                self._blocks.clear(one.block_id)
                not_loaded.append(one.block_id)
        return not_loaded

    def forget(self, loads: Sequence[BlockLoad]) -> None:
        """Forget what was loaded here, and could not be on another rank."""
        for one in loads:
            self._slots[one.tier].forget(one.slot)

    def close(self) -> None:
        """Let go of the tiers."""
        for slots in self._slots:
            slots.close()


class TierSizes(msgspec.Struct, frozen=True):
    """Slots of each tier; 0 where there is none."""

    host: int = 0
    file: int = 0

    @classmethod
    def of(cls, args: EngineArgs, slot_bytes: int) -> "TierSizes":
        """As many as fit into what an engine's arguments allow a rank.

        Args:
            slot_bytes: of the rank with the largest slots, as all have the same number of them.

        Raises:
            ConfigError: not even one fits.
        """
        sizes = {}
        spaces = {"swap_space": args.swap_space, "kv_cache_file_space": args.kv_cache_file_space}
        if args.kv_cache_path is None:
            del spaces["kv_cache_file_space"]
        for name, space in spaces.items():
            sizes[name] = int(space * _GIB) // slot_bytes
            if space and not sizes[name]:
                raise ConfigError(
                    f"{name} = {space:g} GiB holds no block of {slot_bytes} bytes; set at least"
                    f" {slot_bytes / _GIB:.2g}"
                )
        return cls(sizes["swap_space"], sizes.get("kv_cache_file_space", 0))

    def __bool__(self) -> bool:
        return self.host + self.file > 0


def identity_of(basis: Basis, models: Models, place: Place) -> Identity:
    """All that a block's content depends on beside its key, on one rank.

    Raises:
        CheckpointError: files of a checkpoint are missing or damaged.
    """
    args, kernels = basis.args, basis.kernels
    paths = [args.model]
    quantizations: list[str | None] = [args.quantization]
    if args.speculative_config is not None and args.speculative_config.model is not None:
        paths.append(args.speculative_config.model)
        quantizations.append(args.speculative_config.quantization)
    engine: dict[str, Any] = {
        "version": VERSION,
        "sources": _digest_of_sources(),
        "computed by": Path(kernels.__file__ or "").stem if kernels else str(torch.__version__),
        "device": basis.device.type,
        "dtype": str(basis.dtype),
        "quantizations": quantizations,
        "checkpoints": [_checkpoint(Path(path)) for path in paths],
        "ranks": (args.tensor_parallel_size, args.pipeline_parallel_size, args.draft_ranks),
    }
    layouts = [model.layout for model in (models.target, models.draft) if model is not None]
    encode = msgspec.msgpack.encode
    return Identity(encode(engine), encode([repr(place), layouts]))


def _digest_of_sources() -> str:
    """Of this package: what computes K and V, lays them out, and makes their keys."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def _checkpoint(model_dir: Path) -> dict[str, Any]:
    """What tells a checkpoint from another one, or from itself before it was written to."""
    files = {path.name: path.stat() for path in weight_files(model_dir)}
    written = {name: (status.st_size, status.st_mtime_ns) for name, status in files.items()}
    return {"fingerprint": fingerprint(model_dir), "files": written}
