"""Forms the process groups of the ranks, and maps each rank to its parts of the models.

Owns the choice between shared memory and torch.distributed, their lifetimes and their counters.
Must not know models or messages.

Ranks exchange what they need to form a group through a table in the engine's process, see `table`.
Shared memory has no name that could be left behind: the first rank of a group creates it, and the
others open it through /proc, after checking that it is such memory. All ranks have the same list of
who shares memory. If each decided for itself, they could wait for each other for ever. If all
groups share memory, torch.distributed is not used: it listens at ports that anybody can connect to.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from charonia.data.comm import Links, ModelRank
from charonia.errors import ConfigError, RankLostError
from charonia.parallel.addresses import interface_of
from charonia.parallel.comm import GroupComm, SharedMemoryComm
from charonia.parallel.table import TableStore, TableView
from charonia.parallel.topology import (
    DRAFT_GROUP,
    LOGITS_GROUP,
    Topology,
    entry_group,
    parts_group,
)
from charonia.protocol import Collectives

_FORMING_TIMEOUT = timedelta(seconds=30)
"""Timeout for forming a group. All ranks are prepared by then, and load nothing meanwhile."""
_OPERATION_TIMEOUT = timedelta(seconds=300)
"""Timeout of a collective operation. The loss of a rank is noticed much earlier, by its heartbeat.
A pipeline stage may have to wait for a whole long step of the previous stage."""

_NONE = (0, 0, 0.0)
"""Calls, bytes and seconds of an operation that was never called."""


@dataclass(frozen=True)
class Membership:
    """This rank, and how it reaches the others.

    Attributes:
        memories: one entry per rank. Ranks with equal entries share memory; None shares it with no
            rank.
        address: this machine's address, from which it reaches the others.
        table: the ranks' table, see `table`.
    """

    rank: int
    memories: Sequence[str | None]
    address: str
    table: TableView

    def can_share(self, ranks: Sequence[int]) -> bool:
        """Return whether a group of these ranks shares memory; the same on every rank."""
        memories = {self.memories[rank] for rank in ranks}
        return len(memories) == 1 and None not in memories


class Groups:
    """The process groups of one rank; a process can have only one such object at a time.

    Args:
        kernels: the CPU kernels; None if they are not used.
        device: the device of the models.

    Raises:
        RankLostError: the groups cannot be formed, for example because another rank was lost.
            Everything is released then.
    """

    def __init__(
        self,
        topology: Topology,
        me: Membership,
        kernels: ModuleType | None,
        device: torch.device,
    ) -> None:
        self._topology = topology
        self._me = me
        self._told: Collectives = {}
        self._comms: dict[str, SharedMemoryComm | GroupComm] = {}
        self._files: list[int] = []
        self._kernels = kernels
        self._has_world = False
        self._store: TableStore | None = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            self._form(device)
        except Exception as error:
            self.close()
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RankLostError(f"the ranks' groups cannot be formed: {reason}") from error

    def _form(self, device: torch.device) -> None:
        me, topology = self._me, self._topology
        groups = topology.groups()
        if not all(map(me.can_share, groups.values())):
            self._form_world(device)
        for name, ranks in groups.items():
            if me.can_share(ranks):
                if me.rank in ranks:
                    self._comms[name] = SharedMemoryComm(self._exchange(name, ranks))
                continue
            # All ranks must call this, even those outside the group.
            group = dist.new_group(ranks, timeout=_FORMING_TIMEOUT)
            if me.rank in ranks:
                group.set_timeout(_OPERATION_TIMEOUT)
                self._comms[name] = GroupComm(group)

    def _form_world(self, device: torch.device) -> None:
        """Form the group of all ranks, which torch needs for all other groups."""
        me = self._me
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(me.address)
        self._store = TableStore(me.table, _FORMING_TIMEOUT)  # torch keeps only its C++ half
        # torch numbers its groups, and failed attempts count too. The other ranks are fresh
        # processes, so counting must start at 0 here as well.
        distributed_c10d._world.group_count = 0
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("group", self._store),
            rank=me.rank,
            world_size=self._topology.num_ranks,
            timeout=_FORMING_TIMEOUT,
        )
        self._has_world = True

    def model_ranks(self) -> tuple[ModelRank, ModelRank | None]:
        """This rank's parts of the target and of the draft model, which may be None."""
        rank, comms = self._me.rank, self._comms
        place = self._topology.place(rank)
        behind = rank + self._topology.num_parts
        links = Links(
            parts=comms.get(parts_group(place.stage)),
            before=comms.get(entry_group(rank)),
            after=comms.get(entry_group(behind)),
            logits=comms.get(LOGITS_GROUP),
        )
        draft_place = self._topology.draft_place(rank)
        if draft_place is None:
            return ModelRank(place, links), None
        return ModelRank(place, links), ModelRank(draft_place, Links(parts=comms.get(DRAFT_GROUP)))

    def collectives(self) -> Collectives:
        """Counters of this rank's operations since the last call."""
        total: Collectives = {}
        for comm in self._comms.values():
            for name, counts in comm.collectives().items():
                total[name] = _plus(total.get(name, _NONE), counts)
        told, self._told = self._told, total
        changes = {name: _plus(total[name], told.get(name, _NONE), sign=-1) for name in total}
        return {name: counts for name, counts in changes.items() if counts[0]}

    def abort(self) -> None:
        """Make all waits fail; the groups cannot be used afterwards."""
        for comm in self._comms.values():
            comm.abort()

    def close(self) -> None:
        """Release everything."""
        self._comms = {}
        for file in self._files:
            os.close(file)
        self._files = []
        if self._has_world:
            self._has_world = False
            dist.destroy_process_group()

    def _exchange(self, name: str, ranks: Sequence[int]) -> object:
        """Map the memory of a group; the first rank creates it."""
        assert self._kernels is not None, "a rank without kernels has no memory to share"
        index, size = ranks.index(self._me.rank), len(ranks)
        num_bytes: int = self._kernels.exchange_bytes(size)
        key = f"memory of {name}"
        if index == 0:
            file = os.memfd_create(f"charonia {name}", os.MFD_CLOEXEC)
            os.ftruncate(file, num_bytes)
            self._me.table.put(key, f"{os.getpid()} {file}".encode())
        else:
            value = self._me.table.get(key, _FORMING_TIMEOUT.total_seconds())
            if value is None:
                raise RankLostError(f"rank {ranks[0]} has made no memory to share")
            file = open_memory(value, f"charonia {name}", num_bytes)
        exchange: object = self._kernels.Exchange(
            file, index, size, _OPERATION_TIMEOUT.total_seconds()
        )
        if index:
            os.close(file)
        else:
            self._files.append(file)  # stays open for ranks that have not opened it yet
        return exchange


def _plus(
    counts: tuple[int, int, float], others: tuple[int, int, float], *, sign: int = 1
) -> tuple[int, int, float]:
    calls, num_bytes, seconds = others
    return counts[0] + sign * calls, counts[1] + sign * num_bytes, counts[2] + sign * seconds


def host_identity() -> str:
    """Return an identity. Processes with equal identities can share memory and see each other.

    It includes user, group and capabilities, because only processes with the same ones may open
    each other's files through /proc.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (capabilities,) = (line for line in status if line.startswith("CapEff:"))
    return " ".join([boot_id, *spaces, str(os.geteuid()), str(os.getegid()), capabilities])


def check_unused() -> None:
    """Check that torch.distributed is free: a process can have only one group of all ranks.

    Raises:
        ConfigError: it is already in use, by charonia or by the program.
    """
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is in use in this process already, by another engine of several"
            " ranks or by the program itself: an engine of several ranks needs a process that"
            " does not use it"
        )


def open_memory(value: bytes, name: str, num_bytes: int) -> int:
    """Open memory that another process of this user created; returns a file descriptor.

    Args:
        value: the pid of that process and its file descriptor, separated by a space.
        name: the name it was created with. num_bytes: its size.

    Raises:
        RankLostError: the descriptor is not such memory. Nothing was written to it.
    """
    try:
        pid, number = map(int, value.split())
        # O_PATH has no side effect: the file could be a device, or a pipe without a reader.
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    except (ValueError, OSError) as error:
        raise RankLostError(f"memory to share cannot be opened: {error}") from None
    own_path = f"/proc/self/fd/{file}"
    try:
        found, size = os.readlink(own_path), os.fstat(file).st_size
        if found != f"/memfd:{name} (deleted)" or size != num_bytes:
            raise RankLostError(f"{found!r} of {size} bytes is no memory that ranks share")
        return os.open(own_path, os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(file)
