"""A rank other than rank 0: it loads its part and follows the engine's process.

Owns the rank's side of `messages`. Must not know processes, or how this one was started.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from charonia.config import EngineArgs
from charonia.data.basis import Basis, LocalRank
from charonia.data.kv_store import KVStore
from charonia.data.kv_tiers import KVTiers, make_tiers
from charonia.data.largest_step import run_largest_step
from charonia.data.loaded_models import Models
from charonia.data.model.fingerprint import fingerprint
from charonia.data.model.paged import PagedModel
from charonia.data.ops.native.threads import ThreadLayout
from charonia.data.sizing import Room, size
from charonia.errors import RankLostError
from charonia.events import with_head
from charonia.parallel.groups import Groups, Membership, host_identity
from charonia.parallel.handshake import SECRET_VARIABLE, find_engine
from charonia.parallel.messages import (
    Allocate,
    Allocated,
    Copy,
    End,
    Form,
    Forward,
    Join,
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
    UseTable,
    batch_of,
    encode,
)
from charonia.parallel.peer import SPIN_S, Peer
from charonia.parallel.table import RemoteTable
from charonia.parallel.topology import Topology
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from charonia.version import VERSION

_JOIN_TIMEOUT_S = 10.0
M = TypeVar("M", bound=Message)


def be_rank(
    connect: Callable[[], Channel],
    *,
    secret: str,
    local_index: int | None,
    paths: Mapping[str, str],
    log: Callable[[str], None],
) -> None:
    """Join an engine and follow it until it ends.

    Args:
        connect: connects to the engine's rendezvous; waits until it exists.
        secret: the shared secret by which the rank and the engine authenticate.
        local_index: index among the ranks that the engine started; None for other ranks.
        paths: of "model" and "draft_model", if they differ on this machine.

    Raises:
        RankLostError: the engine or another rank was lost, or the engine refused this rank.
        Exception: this rank cannot load its part. The engine has been told the reason.
    """
    channel = _introduce(connect(), secret)
    own_address: str = channel.socket.getsockname()[0]
    peer = Peer(Connection(channel), _JOIN_TIMEOUT_S)
    peer.send(Join(VERSION, os.getpid(), host_identity(), local_index))
    peer.beat_for_ever()
    setup = _expect(peer, Setup)

    def log_with_rank(line: str) -> None:
        log(with_head(f"rank {setup.rank}: ", line))

    try:
        follower = _Follower(setup, paths, log_with_rank)
        peer.send(follower.prepared())
        form = _expect(peer, Form)
        beside = _introduce(connect(), secret)
        beside.send(encode(UseTable()))
        follower.load(Membership(setup.rank, form.memories, own_address, RemoteTable(beside)))
        peer.send(Loaded())
        _expect(peer, Measure)
        peer.send(Ready(*follower.room()))
        allocate = _expect(peer, Allocate)
        follower.allocate(Room(allocate.num_blocks, allocate.slot_bytes))
        peer.send(Allocated())
    except Exception as error:
        with contextlib.suppress(RankLostError):
            peer.send(Refusal(type(error).__name__, str(error)))
        raise
    while not isinstance(next_message := peer.receive(spin=SPIN_S), End):
        if isinstance(next_message, Move):
            moved = follower.move(next_message)
            if next_message.is_answered:
                peer.send(moved)
        elif next_message is not None:
            follower.follow(next_message)


def _introduce(channel: Channel, secret: str) -> Channel:
    """Authenticate to the engine, and check that the engine knows the secret too.

    Raises:
        RankLostError: it does not, or it does not answer.
    """
    try:
        is_engine = find_engine(channel, secret)
    except OSError as error:
        raise RankLostError(f"the engine does not answer: {error.strerror or error}") from None
    if not is_engine:
        channel.close()
        raise RankLostError(
            f"the engine has another {SECRET_VARIABLE} than this rank, or takes no connections at"
            " present"
        )
    return channel


def _expect(peer: Peer, kind: type[M]) -> M:
    """Wait for the engine's next message while this rank is loading.

    Raises:
        RankLostError: another message came: this rank is refused, or the engine ends.
    """
    while (message := peer.receive()) is None:
        pass
    if isinstance(message, Refusal):
        raise RankLostError(f"the engine has refused this rank: {message.text}")
    if not isinstance(message, kind):
        raise RankLostError(f"the engine has sent {type(message).__name__}")
    return message


class _Follower:
    """This rank's parts of the models: prepared, loaded, allocated, then computed with."""

    def __init__(self, setup: Setup, paths: Mapping[str, str], log: Callable[[str], None]) -> None:
        args = _with_paths(setup.args, paths)
        self._topology = Topology.of(args)
        self._has_draft = self._topology.draft_place(setup.rank) is not None
        local_rank = LocalRank(setup.local_index, setup.num_local)
        self._basis = basis = Basis.of(args, log=log, local_rank=local_rank)
        self._log = log
        if basis.device.type == "cpu":
            layout = ThreadLayout.of(
                args.cpu_threads, args.cpu_binding, setup.local_index, setup.num_local
            )
            if layout.cores:
                os.sched_setaffinity(0, layout.cores)

    def prepared(self) -> Prepared:
        """Describe this rank to the engine's process."""
        basis = self._basis
        return Prepared(
            device=basis.device.type,
            has_kernels=basis.kernels is not None,
            checkpoints=checkpoints_of(basis, has_draft=self._has_draft),
        )

    def load(self, me: Membership) -> None:
        """Form the groups with the other ranks, and load the weights."""
        basis = self._basis
        self._groups = Groups(self._topology, me, basis.kernels, basis.device)
        model_rank, draft_rank = self._groups.model_ranks()
        self._model_ranks = {"target": model_rank} | ({"draft": draft_rank} if draft_rank else {})
        # The engine's process logs the progress of loading.
        self._loaded = Models.load(basis, model_rank, draft_rank, log=lambda line: None)
        self._models: dict[str, PagedModel] = {}
        self._tiers: KVTiers | None = None
        self._kv_stores: list[KVStore] = []

    def room(self) -> Room:
        """Measure how many KV blocks fit, by running the largest step with the other ranks."""
        basis, models = self._basis, self._loaded
        model_rank, draft_rank = self._model_ranks["target"], self._model_ranks.get("draft")

        def run_step(pool_tokens: int) -> None:
            run_largest_step(
                basis, models, model_rank, draft_rank, pool_tokens=pool_tokens, sampler=None
            )

        return size(basis, models, run_step).room

    def allocate(self, room: Room) -> None:
        """Allocate the KV caches and the slower tiers."""
        basis, loaded = self._basis, self._loaded
        kv = loaded.allocate(room.num_blocks, basis.device)
        self._kv_stores = [store for store in kv if store is not None]
        place = self._model_ranks["target"].place
        self._tiers = make_tiers(basis, loaded, kv, place, room.slot_bytes, log=self._log)
        self._models["target"] = PagedModel(loaded.target.decoder, kv.target)
        if loaded.draft is not None and kv.draft is not None:
            self._models["draft"] = PagedModel(loaded.draft.decoder, kv.draft)

    def move(self, message: Move) -> Moved:
        """Move blocks; return those that failed."""
        not_loaded: list[int] = []
        not_saved: list[int] = []
        with torch.inference_mode():
            if self._tiers is not None:
                not_saved = self._tiers.save(message.saves)
                not_loaded = self._tiers.load(message.loads)
            elif message.saves or message.loads:
                raise RankLostError("the engine has sent Move, but there are no slower tiers")
            for store in self._kv_stores:
                if message.uses_all:
                    store.use_all()
                if message.discards:
                    store.discard(message.discards)
        return Moved(not_loaded, not_saved)

    def follow(self, message: Message) -> None:
        """Compute what the engine's process computes."""
        with torch.inference_mode():
            match message:
                case Forward():
                    batch = batch_of(message, self._basis.device)
                    logits = self._models[message.model].forward(batch, message.lines)
                    if message.lines and self._model_ranks[message.model].place.is_last:
                        logits()
                case Lines():
                    if self._model_ranks[message.model].place.is_last:
                        self._models[message.model].logits(slice(message.start, message.stop))()
                case Copy():
                    self._models[message.model].copy_blocks(message.copies)
                case _:
                    raise RankLostError(f"the engine has sent {type(message).__name__}")


def checkpoints_of(basis: Basis, *, has_draft: bool) -> dict[str, dict[str, str]]:
    """Digests of the checkpoints of each model that a rank has a part of.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    paths = {"target": basis.args.model}
    config = basis.args.speculative_config
    if has_draft and config is not None and config.model is not None:
        paths["draft"] = config.model
    return {name: fingerprint(Path(path)) for name, path in paths.items()}


def _with_paths(args: EngineArgs, paths: Mapping[str, str]) -> EngineArgs:
    """Return the arguments with the paths of the checkpoints on this machine."""
    if "model" in paths:
        args = msgspec.structs.replace(args, model=paths["model"])
    if "draft_model" in paths and args.speculative_config is not None:
        config = msgspec.structs.replace(args.speculative_config, model=paths["draft_model"])
        args = msgspec.structs.replace(args, speculative_config=config)
    return args
