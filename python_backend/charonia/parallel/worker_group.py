"""Rank 0's view of the other ranks: starts, prepares, leads, watches and ends them.

Owns the ranks' processes and connections. Must not know plans or what a model computes.

    main thread      runs steps: sends a message to every rank, then computes the same here
    watcher thread   starts the ranks of this machine, receives all messages, notices losses
"""

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import msgspec

from charonia.config import EngineArgs
from charonia.data.basis import Basis, LocalRank
from charonia.data.comm import ModelRank
from charonia.data.model.paged import Model, PagedModel
from charonia.data.sizing import Room
from charonia.errors import CharoniaError, CheckpointError, ConfigError, RankLostError
from charonia.events import error_event
from charonia.parallel.groups import (
    Groups,
    Membership,
    check_unused,
    host_identity,
)
from charonia.parallel.handshake import SECRET_VARIABLE
from charonia.parallel.led_model import LedModel
from charonia.parallel.messages import (
    Allocate,
    Allocated,
    End,
    Form,
    Loaded,
    Measure,
    Message,
    Move,
    Moved,
    Prepared,
    Ready,
    Refusal,
    Setup,
    encode,
)
from charonia.parallel.peer import BEAT_S, Peer
from charonia.parallel.rank import checkpoints_of
from charonia.parallel.rendezvous import Rendezvous
from charonia.parallel.topology import Topology
from charonia.protocol import Collectives, EngineInfo, StepPlan

M = TypeVar("M", bound=Message)
_END_TIMEOUT_S = 5.0
_LAST_WORDS_S = 1.0
"""Time for the ranks of a lost engine to log what went wrong."""


class WorkerGroup:
    """Implements `data.rank_group.RankGroup` for the rank that runs the steps.

    The ranks of this machine are started at once. They load at the same time as this process.

    Args:
        on_lost: called from any thread, with the reason, if a rank is lost after all have allocated
            their KV blocks. The current or next step also raises.
        log: takes one line, from any thread.

    Raises:
        ConfigError: the rendezvous is not an address of this machine, or is in use; no secret is
            set for ranks of other machines; or this process already uses torch.distributed.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        log: Callable[[str], None],
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        check_unused()
        self._args = args
        self._topology = Topology.of(args)
        self._log = log
        self._on_lost = on_lost
        self._rendezvous = Rendezvous(args, log)
        self._groups: Groups | None = None
        self._ranks: dict[int, Peer] = {}
        # Messages of the ranks; None when one was lost.
        self._said: SimpleQueue[tuple[int, Message] | None] = SimpleQueue()
        self._pids: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        # Receives a pipeline's logits: the last stage must deliver them before it can receive what
        # this process sends meanwhile.
        self._receiver = ThreadPoolExecutor(1, thread_name_prefix="charonia-logits")
        self._lost: str | None = None
        self._lost_as: type[CharoniaError] = RankLostError
        self._is_loaded = False
        self._losing = threading.Lock()
        self._is_closing = threading.Event()
        self._have_ended = threading.Event()
        self._has_started = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="charonia-ranks", daemon=True)
        self._watcher.start()
        self._has_started.wait()

    @property
    def local_rank(self) -> LocalRank:
        """This rank's place among those of its machine."""
        return LocalRank(0, self._args.local_ranks)

    def join(self, basis: Basis) -> tuple[ModelRank, ModelRank | None]:
        """Wait for the other ranks; return this rank's parts of the target and of the draft model.

        By then all ranks have checked that they can take their roles, with the same checkpoints.

        Raises:
            RankLostError: not all joined in time, or one was lost.
            CheckpointError: the ranks' checkpoints differ.
            CheckpointError, ConfigError: a rank refused, for the reason given.
        """
        joined = self._rendezvous.wait(self._check_started)
        hosts = [host_identity(), *(join.host for join, _ in joined)]
        self._ranks.update(enumerate((peer for _, peer in joined), start=1))
        for rank, (join, _) in enumerate(joined, start=1):
            host = hosts[rank]
            index, count = hosts[:rank].count(host), hosts.count(host)
            self.tell(Setup(rank, self._args, index, count), [rank])
            self._log(f"rank {rank} has joined, process {join.pid}")
        prepared = self._collect(Prepared)
        _check_same(basis, prepared)
        with_kernels = [] if basis.kernels is None else [0]
        with_kernels += [rank for rank, message in prepared.items() if message.has_kernels]
        memories = [host if rank in with_kernels else None for rank, host in enumerate(hosts)]
        self._groups = self._form(basis, memories)
        return self._groups.model_ranks()

    def measure(self) -> None:
        """Wait until all ranks have loaded, and have them run the largest step.

        The caller runs the same step next.

        Raises:
            RankLostError: one was lost while loading.
            CheckpointError, ConfigError: a rank cannot load its part, for the reason given.
        """
        self._collect(Loaded)
        self._rendezvous.stop_listening()  # all groups are formed
        self.tell(Measure(), self._ranks)

    def agree(self, room: Room) -> Room:
        """Have all ranks allocate as many blocks as fit on the rank with the least memory.

        Raises:
            RankLostError: one was lost meanwhile.
            ConfigError: a rank has no memory for its part, for the reason given.
        """
        ready = self._collect(Ready)
        room = Room(
            min([room.num_blocks, *(message.num_blocks for message in ready.values())]),
            max([room.slot_bytes, *(message.slot_bytes for message in ready.values())]),
        )
        self.tell(Allocate(*room), self._ranks)
        self._collect(Allocated)
        self._is_loaded = True
        self.check()
        return room

    def move(self, plan: StepPlan, *, uses_all: bool) -> Callable[[], tuple[set[int], set[int]]]:
        """Have the other ranks move a plan's blocks between tiers and discard blocks.

        Args:
            uses_all: whether all blocks are in use again, see `KVStore.use_all`.

        Returns:
            A function that waits for the ranks and returns the blocks that any of them could not
            load and the saves that any of them could not make, as `StepResult` does. It waits if
            blocks are loaded. For saves alone it waits unless there is a pipeline, whose other
            stages may be computing another step. If such a save fails, loading that slot fails
            later.

        Raises:
            RankLostError: a rank was lost. The returned function raises it too.
        """
        is_pipeline = self._topology.num_stages > 1
        is_answered = bool(plan.loads or (plan.saves and not is_pipeline))
        move = Move(plan.saves, plan.loads, plan.discards, uses_all, is_answered)
        self.tell(move, self._ranks)

        def missed() -> tuple[set[int], set[int]]:
            moved = self._collect(Moved).values() if is_answered else ()
            not_loaded = {block_id for message in moved for block_id in message.not_loaded}
            not_saved = {place for message in moved for place in message.not_saved}
            return not_loaded, not_saved

        return missed

    def lead(self, name: str, model: PagedModel) -> Model:
        """Wrap a model so that the ranks with parts of it compute the same."""
        is_draft = name == "draft"
        ranks = range(1, self._topology.num_draft_parts if is_draft else self._topology.num_ranks)
        if not ranks:
            return model
        is_pipeline = not is_draft and self._topology.num_stages > 1
        return LedModel(self.tell, name, model, ranks, self._receiver if is_pipeline else None)

    def describe(self, info: EngineInfo) -> EngineInfo:
        """Add the processes of the ranks and the number of stages."""
        return msgspec.structs.replace(
            info,
            pids=[*info.pids, *self._pids],
            num_stages=self._topology.num_stages,
        )

    def collectives(self) -> Collectives:
        """Counters of this rank's operations since the last call."""
        assert self._groups is not None
        return self._groups.collectives()

    def close(self) -> None:
        """End the other ranks."""
        self._is_closing.set()
        for rank in self._ranks.values():
            with contextlib.suppress(RankLostError):
                rank.send(End())
        deadline = time.monotonic() + self._end_timeout
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._have_ended.set()
        self._watcher.join()
        for rank in self._ranks.values():
            rank.close()
        if self._groups is not None:
            self._groups.abort()  # the receiver may be waiting for a rank that hangs
        self._receiver.shutdown()
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        self._rendezvous.close()

    # ------------------------------------------------------------------ leading

    def tell(self, message: Message, ranks: Iterable[int]) -> None:
        """Send a message to some ranks.

        Raises:
            RankLostError: a rank was lost.
        """
        data = encode(message)
        for rank in ranks:
            self.check()
            try:
                self._ranks[rank].send_encoded(data)
            except RankLostError as error:
                self.lose(f"rank {rank}: {error}")
                self.check()

    def check(self) -> None:
        """Raise RankLostError if a rank was lost, or the error with which a rank refused."""
        if self._lost is not None:
            raise self._lost_as(self._lost)

    def lose(self, reason: str, kind: type[CharoniaError] = RankLostError) -> None:
        """Give up the engine: its ranks are no longer in step."""
        with self._losing:
            if self._lost is not None or self._is_closing.is_set():
                return
            self._lost_as, self._lost = kind, reason
        self._log(error_event("rank_lost", reason=reason))
        self._said.put(None)
        self._hang_up()
        self._rendezvous.table.close()
        try:
            if self._groups is not None:
                self._groups.abort()
        finally:
            if self._on_lost is not None and self._is_loaded:
                self._on_lost(reason)

    @property
    def _end_timeout(self) -> float:
        """Seconds that ranks have to end by themselves."""
        return _END_TIMEOUT_S if self._lost is None else _LAST_WORDS_S

    def _hang_up(self) -> None:
        """End the connections, even if a thread is blocked sending to a rank."""
        for rank in list(self._ranks.values()):
            rank.hang_up()

    # ------------------------------------------------------------------ loading

    def _check_started(self) -> None:
        """Raise RankLostError if a rank of this machine has ended before it joined."""
        self.check()
        for process in self._processes:
            if process.poll() is not None:
                raise RankLostError(
                    f"a rank has ended with exit code {process.returncode} before it joined"
                )

    def _collect(self, kind: type[M]) -> dict[int, M]:
        """Wait for a message of this type from every rank; return them in the order of ranks."""
        found: dict[int, M] = {}
        while len(found) < len(self._ranks):
            said = self._said.get()
            if said is None:
                self.check()
                continue
            number, message = said
            if not isinstance(message, kind):
                raise RankLostError(f"rank {number} has sent {type(message).__name__}")
            found[number] = message
        return dict(sorted(found.items()))

    def _form(self, basis: Basis, memories: list[str | None]) -> Groups:
        self.tell(Form(memories), self._ranks)
        try:
            me = Membership(0, memories, self._rendezvous.address, self._rendezvous.table)
            return Groups(self._topology, me, basis.kernels, basis.device)
        except RankLostError:
            self.check()  # names the rank that was lost, if one was
            raise

    # ------------------------------------------------------------------ the watcher's thread

    def _watch(self) -> None:
        """Start the local ranks, receive from all ranks, and give them time to end by themselves.

        The kernel kills the local ranks when this thread ends.
        """
        try:
            for index in range(1, self._args.local_ranks):
                self._processes.append(self._start(index))
            self._pids = [process.pid for process in self._processes]
        except OSError as error:
            self.lose(f"a rank cannot be started: {error.strerror or error}")
        finally:
            self._has_started.set()
        try:
            self._listen_to_ranks()
        except Exception as error:  # otherwise no loss would be noticed any more
            self.lose(f"the watcher: {type(error).__name__}: {error}")
        self._have_ended.wait(self._end_timeout)
        self._hang_up()

    def _listen_to_ranks(self) -> None:
        looked_at = time.monotonic()
        while not self._is_closing.is_set():
            ranks = dict(self._ranks)
            poll = select.poll()  # select() does not support descriptors above 1023
            for rank in ranks.values():
                poll.register(rank, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(BEAT_S * 1000)}
            stood_still = time.monotonic() - looked_at > 2 * BEAT_S
            looked_at = time.monotonic()
            if stood_still:  # this process was suspended: heartbeats are yet to be read
                for rank in ranks.values():
                    rank.heard_at = looked_at
            for number, rank in ranks.items():
                if self._lost is not None:
                    return
                try:
                    for message in rank.take() if rank.fileno() in ready else ():
                        if isinstance(message, Refusal):  # its reason counts, not its end
                            self.lose(*_refused(number, message))
                        else:
                            self._said.put((number, message))
                    if rank.is_silent:
                        self.lose(f"rank {number}: no message or heartbeat came in time")
                except RankLostError as error:
                    self.lose(f"rank {number}: {error}")

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "charonia.parallel.worker"),
            *("--join", f"{self._rendezvous.address}:{self._rendezvous.port}"),
            *("--local-index", str(index), "--parent", str(os.getpid())),
        ]
        # Use the same copy of this package as this process.
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
        env = os.environ | {
            SECRET_VARIABLE: self._rendezvous.secret,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)


def _check_same(basis: Basis, prepared: dict[int, Prepared]) -> None:
    """Raise CheckpointError or ConfigError if a rank's checkpoint or device differs."""
    expected = checkpoints_of(basis, has_draft=basis.draft_spec is not None)
    for number, message in prepared.items():
        if message.device != basis.device.type:
            raise ConfigError(
                f"rank {number} computes on device {message.device!r}, and the engine's process on"
                f" {basis.device.type!r}; all must have the same"
            )
        for model, digests in message.checkpoints.items():
            different = [what for what, one in expected[model].items() if digests.get(what) != one]
            if different:
                raise CheckpointError(
                    f"rank {number} has another checkpoint of the {model} model than the engine's"
                    f" process: {' and '.join(different)} differ"
                )


def _refused(number: int, refusal: Refusal) -> tuple[str, type[CharoniaError]]:
    """The error to raise. Other kinds (out of memory, a bug) count as the loss of the rank."""
    for kind in (CheckpointError, ConfigError, RankLostError):
        if refusal.kind == kind.__name__:
            return f"rank {number}: {refusal.text}", kind
    return f"rank {number}: {refusal.kind}: {refusal.text}", RankLostError
