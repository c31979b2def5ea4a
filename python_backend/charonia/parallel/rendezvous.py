"""The rendezvous: where ranks join an engine, or are refused.

Owns the listening socket, the connections until all ranks have joined, and the ranks' table. Must
not know what ranks do, or how those of this machine are started.

Each connection has a thread of its own and limits of time and size, so a silent one does not hold
up the others (`charonia.sockets.server`). No message is decoded before the other end has
authenticated (`handshake`).
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

import msgspec

from charonia.config import EngineArgs
from charonia.errors import ConfigError, RankLostError
from charonia.parallel.addresses import listen, own_address
from charonia.parallel.handshake import MAX_BYTES as HANDSHAKE_BYTES
from charonia.parallel.handshake import SECRET_VARIABLE, admit_rank
from charonia.parallel.messages import Join, Refusal, UseTable, decode
from charonia.parallel.peer import BEAT_S, Peer
from charonia.parallel.table import Table
from charonia.sockets.channel import MAX_BYTES, Channel
from charonia.sockets.connection import Connection
from charonia.sockets.server import Server
from charonia.version import VERSION

_LOCAL_ADDRESS = "127.0.0.1"
_LOCAL_JOIN_TIMEOUT_S = 120.0


class Rendezvous:
    """Listens for ranks, from its construction on.

    Args:
        log: takes one line.

    Attributes:
        address, port: where ranks join. secret: the shared secret.
        table: the ranks' table, see `table`.

    Raises:
        ConfigError: the rendezvous is not an address of this machine, or is in use; or ranks of
            other machines are expected and no secret is set.
    """

    def __init__(self, args: EngineArgs, log: Callable[[str], None]) -> None:
        self._args = args
        self._log = log
        self._num_foreign = args.num_ranks - args.local_ranks
        self._refused = ""
        self.address, port = _LOCAL_ADDRESS, 0
        self.secret = secrets.token_hex()
        if self._num_foreign:
            assert args.rendezvous is not None
            host, _, text = args.rendezvous.rpartition(":")
            try:
                self.address, port = own_address(host.strip("[]")), int(text)
            except ConfigError as error:
                raise ConfigError(f"rendezvous = {args.rendezvous!r}: {error}") from None
            self.secret = _shared_secret()
        self.table = Table()
        self._arrived: SimpleQueue[tuple[Join, Peer] | None] = SimpleQueue()
        listener = listen(self.address, port)
        self.port: int = listener.getsockname()[1]
        self._server = Server(
            listener,
            partial(_admit, secret=self.secret),
            self._meet,
            log=log,
            max_bytes=HANDSHAKE_BYTES,
        )
        self._server.start()

    def wait(self, check: Callable[[], None]) -> list[tuple[Join, Peer]]:
        """Wait for all ranks; return those of this machine first, then the others host by host.

        Args:
            check: called repeatedly; an exception that it raises ends the wait.

        Raises:
            RankLostError: not all ranks joined in time.
        """
        joined: list[tuple[Join, Peer]] = []
        try:
            self._wait(joined, check)
        except BaseException:
            for _, peer in joined:
                peer.close()
            raise
        hosts = list(dict.fromkeys(join.host for join, _ in joined))
        return sorted(
            joined,
            key=lambda one: (
                one[0].local_index is None,
                one[0].local_index or 0,
                hosts.index(one[0].host),
            ),
        )

    def stop_listening(self) -> None:
        """Accept no more connections; those that exist stay."""
        self._server.stop_listening()

    def close(self) -> None:
        """Close the table and all connections to it, and end a `wait` in another thread."""
        self._arrived.put(None)
        self.table.close()
        self._server.close()

    def _wait(self, joined: list[tuple[Join, Peer]], check: Callable[[], None]) -> None:
        num_others = self._args.num_ranks - 1
        timeout = _LOCAL_JOIN_TIMEOUT_S
        if self._num_foreign:
            timeout = self._args.rendezvous_timeout_s
            place = self._args.rendezvous
            self._log(f"waiting at {place} for {self._num_foreign} ranks of other machines")
        deadline = time.monotonic() + timeout
        while len(joined) < num_others:
            check()
            if time.monotonic() > deadline:
                raise RankLostError(
                    f"only {len(joined)} of {num_others} other ranks have joined{self._refused}"
                )
            arrived = self._next()
            # The new rank may be the successor of one that joined and has ended since.
            for one in [one for one in joined if not _is_there(one[1])]:
                self._log(f"process {one[0].pid} had joined, and has gone again")
                one[1].close()
                joined.remove(one)
            if arrived is None:
                continue
            if self._has_room(arrived[0], [join for join, _ in joined]):
                joined.append(arrived)
            else:
                self._send_away(*arrived, "this engine has all the ranks that it waits for")

    def _has_room(self, join: Join, joined: list[Join]) -> bool:
        taken = [one.local_index for one in joined]
        if join.local_index is None:
            return taken.count(None) < self._num_foreign
        return 0 < join.local_index < self._args.local_ranks and join.local_index not in taken

    def _next(self) -> tuple[Join, Peer] | None:
        """Return the next rank that joins; None if none does for a while."""
        try:
            arrived = self._arrived.get(timeout=BEAT_S)
        except Empty:
            return None
        if arrived is None:
            raise RankLostError("the rendezvous is over")
        join, peer = arrived
        if join.version == VERSION:
            return join, peer
        reason = f"it is of version {join.version}, and this engine of {VERSION}"
        self._send_away(join, peer, reason)
        return None

    def _meet(self, connection: Connection) -> bool:
        """Accept a rank, or serve the table; runs in the thread of the connection."""
        for data in connection.messages():
            match decode(data):
                case Join() as join:
                    peer = Peer(connection, self._args.rank_timeout_s)
                    self._arrived.put((join, peer))
                    return True
                case UseTable():
                    self.table.serve(connection)
            break
        return False

    def _send_away(self, join: Join, peer: Peer, reason: str) -> None:
        """Refuse a rank. It has authenticated, so it is told the reason."""
        self._log(f"warning: refused: process {join.pid} cannot be a rank: {reason}")
        self._refused = f"; one was refused: {reason}"
        with contextlib.suppress(RankLostError):
            peer.send(Refusal("ConfigError", reason))
        peer.close()


def _admit(channel: Channel, secret: str) -> bool:
    is_rank = admit_rank(channel, secret)
    channel.max_bytes = MAX_BYTES
    return is_rank


def _is_there(peer: Peer) -> bool:
    """Return whether a rank that joined is still connected, and has sent only heartbeats since."""
    try:
        return not any(True for _ in peer.take()) and not peer.is_silent
    except (RankLostError, msgspec.DecodeError):
        return False


def _shared_secret() -> str:
    secret = os.environ.get(SECRET_VARIABLE)
    if not secret:
        raise ConfigError(
            f"ranks of other machines join with a secret: set {SECRET_VARIABLE} to the same text"
            " for the engine and for them"
        )
    return secret
