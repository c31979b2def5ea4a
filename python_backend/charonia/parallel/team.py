"""The engine's process and its ranks: started, prepared, led, watched and ended.

Owns the ranks' processes and connections. Must not know plans or what a model computes.

    main thread      steps: a message to every rank, then the same computation here
    watcher thread   starts the ranks of this machine, hears what all say, notices who is lost
"""

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import msgspec

from charonia.config import EngineArgs
from charonia.data.basis import Basis, LocalRank
from charonia.data.comm import ModelRank
from charonia.data.model.paged import Model, PagedModel, PendingLogits
from charonia.data.ops.base import StepBatch
from charonia.data.sizing import Room
from charonia.errors import CharoniaError, CheckpointError, ConfigError, RankLostError
from charonia.events import event
from charonia.parallel.groups import (
    Groups,
    Membership,
    check_unused,
    host_identity,
)
from charonia.parallel.messages import (
    Allocate,
    Allocated,
    Copy,
    End,
    Form,
    Lines,
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
    forward_of,
)
from charonia.parallel.peer import BEAT_S, Peer
from charonia.parallel.rank import checkpoints_of
from charonia.parallel.rendezvous import Rendezvous
from charonia.parallel.topology import Topology
from charonia.parallel.worker import SECRET_VARIABLE
from charonia.protocol import BlockCopy, Collectives, EngineInfo, StepPlan

M = TypeVar("M", bound=Message)
_END_TIMEOUT_S = 5.0
_LAST_WORDS_S = 1.0
"""What the ranks of a lost engine have for saying in their logs what went wrong."""


class RankTeam:
    """Implements `data.team.Team` for the rank that runs the steps.

    The ranks of this machine are started at once, and load while this process does.

    Args:
        on_lost: called from any thread with the reason when a rank is lost after all have loaded
            and allocated their parts. The step at hand, or the next one, raises it too.
        log: takes one line, from any thread.

    Raises:
        ConfigError: the rendezvous is no address of this machine, or taken; there is no secret
            for ranks of other machines; or torch.distributed is in use in this process already.
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
        # What ranks say while they are loading; None when one is lost.
        self._said: SimpleQueue[tuple[int, Message] | None] = SimpleQueue()
        self._pids: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        # Receives a pipeline's logits, because its end must get rid of them before it can take in
        # what this process sends meanwhile.
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
        """This process among those on its machine."""
        return LocalRank(0, self._args.local_ranks)

    def join(self, basis: Basis) -> tuple[ModelRank, ModelRank | None]:
        """Meet the other ranks; return this one's part of the target and of the draft model.

        All have made sure by then that they can be what they are to be, and all from the same
        checkpoints.

        Raises:
            RankLostError: not all came, or one was lost meanwhile.
            CheckpointError: the ranks' checkpoints are not the same.
            CheckpointError, ConfigError: a rank refuses; these are its words.
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
        """Have the other ranks run the largest step once all have loaded, as this one does next.

        Raises:
            RankLostError: one was lost while it was loading.
            CheckpointError, ConfigError: one cannot load its part; these are its words.
        """
        self._collect(Loaded)
        self._rendezvous.stop_listening()  # all groups are formed
        self.tell(Measure(), self._ranks)

    def agree(self, room: Room) -> Room:
        """Have all ranks take as many blocks as the one with the least memory; return that.

        Raises:
            RankLostError: one was lost meanwhile.
            ConfigError: one has no room for its part; these are its words.
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
        """Have the other ranks move a plan's blocks between tiers, and discard others.

        Args:
            uses_all: whether all blocks are in use again, see `KVStore.use_all`.

        Returns:
            Waits for them, if anything is loaded, and tells what any of them could not load and
            save, as `StepResult` does. It waits for saves, too, but in a pipeline, whose other
            stages may compute another step meanwhile; what they have not saved, they cannot load.

        Raises:
            RankLostError: one was lost; also of what is returned.
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
        """Have the ranks that are in model `name` follow what is computed with it."""
        is_draft = name == "draft"
        ranks = range(1, self._topology.num_draft_parts if is_draft else self._topology.num_ranks)
        if not ranks:
            return model
        is_pipeline = not is_draft and self._topology.num_stages > 1
        return _LedModel(self, name, model, ranks, self._receiver if is_pipeline else None)

    def describe(self, info: EngineInfo) -> EngineInfo:
        """Add what there is to know of the ranks."""
        return msgspec.structs.replace(
            info,
            pids=[*info.pids, *self._pids],
            num_stages=self._topology.num_stages,
        )

    def collectives(self) -> Collectives:
        """What this rank has exchanged since the last call."""
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
            self._groups.abort()  # the receiver may be waiting for a rank that stands still
        self._receiver.shutdown()
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        self._rendezvous.close()

    # ------------------------------------------------------------------ leading

    def tell(self, message: Message, ranks: Iterable[int]) -> None:
        """Send a message to some ranks.

        Raises:
            RankLostError: one was lost.
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
        """Raises RankLostError when a rank was lost, or the error with which it refused."""
        if self._lost is not None:
            raise self._lost_as(self._lost)

    def lose(self, reason: str, kind: type[CharoniaError] = RankLostError) -> None:
        """The ranks no longer do the same: there is no going on."""
        with self._losing:
            if self._lost is not None or self._is_closing.is_set():
                return
            self._lost_as, self._lost = kind, reason
        self._log(event("rank_lost", reason=reason))
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
        """Seconds that ranks have for ending by themselves."""
        return _END_TIMEOUT_S if self._lost is None else _LAST_WORDS_S

    def _hang_up(self) -> None:
        """End the connections, also for a thread that sends to a rank which takes nothing."""
        for rank in list(self._ranks.values()):
            rank.hang_up()

    # ------------------------------------------------------------------ loading

    def _check_started(self) -> None:
        """Raises RankLostError when a rank of this machine will not come."""
        self.check()
        for process in self._processes:
            if process.poll() is not None:
                raise RankLostError(
                    f"a rank has ended with exit code {process.returncode} before it joined"
                )

    def _collect(self, kind: type[M]) -> dict[int, M]:
        """Wait until every rank has said what is due; in the order of ranks."""
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
            self.check()  # who it was says more than that one was missing
            raise

    # ------------------------------------------------------------------ the watcher's thread

    def _watch(self) -> None:
        """Start the local ranks, listen to all, and give them a while to end by themselves.

        The kernel ends the local ones with this thread, whatever they are doing.
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
        except Exception as error:  # unseen, ranks could be lost unnoticed ever after
            self.lose(f"the watcher: {type(error).__name__}: {error}")
        self._have_ended.wait(self._end_timeout)
        self._hang_up()

    def _listen_to_ranks(self) -> None:
        looked_at = time.monotonic()
        while not self._is_closing.is_set():
            ranks = dict(self._ranks)
            poll = select.poll()  # select() takes no descriptors from 1024 on
            for rank in ranks.values():
                poll.register(rank, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(BEAT_S * 1000)}
            stood_still = time.monotonic() - looked_at > 2 * BEAT_S
            looked_at = time.monotonic()
            if stood_still:  # this process did: what the others say is yet to come
                for rank in ranks.values():
                    rank.heard_at = looked_at
            for number, rank in ranks.items():
                if self._lost is not None:
                    return
                try:
                    for message in rank.take() if rank.fileno() in ready else ():
                        if isinstance(message, Refusal):  # it ends now, but its words came first
                            self.lose(*_refused(number, message))
                        else:
                            self._said.put((number, message))
                    if rank.is_silent:
                        self.lose(f"rank {number}: nothing was heard of it")
                except RankLostError as error:
                    self.lose(f"rank {number}: {error}")

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "charonia.parallel.worker"),
            *("--join", f"{self._rendezvous.address}:{self._rendezvous.port}"),
            *("--local-index", str(index), "--parent", str(os.getpid())),
        ]
        # The same copy of this package, wherever this process found it.
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
        env = os.environ | {
            SECRET_VARIABLE: self._rendezvous.secret,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)


class _LedModel:
    """A model of which other ranks have parts: they do what this process does."""

    def __init__(
        self,
        team: RankTeam,
        name: str,
        model: PagedModel,
        ranks: Sequence[int],
        receiver: Executor | None,
    ) -> None:
        self._team = team
        self._name = name
        self._model = model
        self._ranks = ranks
        self._receiver = receiver

    def forward(self, batch: StepBatch, lines: Sequence[int]) -> PendingLogits:
        """See `Model`."""
        self._team.tell(forward_of(self._name, batch, list(lines)), self._ranks)
        pending = self._model.forward(batch, lines)
        return self._receive(pending) if lines else pending

    def logits(self, lines: slice) -> PendingLogits:
        """See `Model`."""
        self._team.tell(Lines(self._name, lines.start, lines.stop), self._ranks)
        return self._receive(self._model.logits(lines))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `Model`."""
        self._team.tell(Copy(self._name, list(copies)), self._ranks)
        self._model.copy_blocks(copies)

    def _receive(self, pending: PendingLogits) -> PendingLogits:
        return pending if self._receiver is None else self._receiver.submit(pending).result


def _check_same(basis: Basis, prepared: dict[int, Prepared]) -> None:
    """Raises CheckpointError or ConfigError when a rank has what does not go with this one."""
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
    """What to raise; what is none of our errors (no memory, a bug) has cost us the rank."""
    for kind in (CheckpointError, ConfigError, RankLostError):
        if refusal.kind == kind.__name__:
            return f"rank {number}: {refusal.text}", kind
    return f"rank {number}: {refusal.kind}: {refusal.text}", RankLostError
