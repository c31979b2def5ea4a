"""Where the ranks of an engine join it: who is let in, and who is sent away.

Owns the listening socket, and the connections until all have come. Must not know what ranks do, or
how those of this machine are started.
"""

import contextlib
import hmac
import os
import secrets
import select
import time
from collections.abc import Callable

import msgspec

from charonia.config import EngineArgs
from charonia.errors import ConfigError, RankLostError
from charonia.parallel.addresses import listen, own_address
from charonia.parallel.messages import Join, Refusal
from charonia.parallel.peer import BEAT_S, Peer
from charonia.parallel.worker import SECRET_VARIABLE
from charonia.version import VERSION

_LOCAL_ADDRESS = "127.0.0.1"
_LOCAL_JOIN_TIMEOUT_S = 120.0


class Meeting:
    """Listens for ranks from when it is made.

    Args:
        log: takes one line.

    Attributes:
        address, port: where ranks join. secret: what they must know.

    Raises:
        ConfigError: the rendezvous is no address of this machine, or taken; or ranks of other
            machines are to join, and there is no secret.
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
        self._listener = listen(self.address, port)
        self.port: int = self._listener.getsockname()[1]

    def wait(self, check: Callable[[], None]) -> list[tuple[Join, Peer]]:
        """Wait until every rank has come; those of this machine first, then host by host.

        Args:
            check: called again and again; raises what ends the wait.

        Raises:
            RankLostError: not all came in time.
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

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

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
            arrived = self._accept()
            # Who has ended meanwhile may be the one that comes again now.
            for one in [one for one in joined if not _is_there(one[1], self._args.rank_timeout_s)]:
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

    def _accept(self) -> tuple[Join, Peer] | None:
        """Let a rank in that knows the secret; None when no such one came for a while."""
        self._listener.settimeout(BEAT_S)
        try:
            connection, (host, *_) = self._listener.accept()
        except TimeoutError:
            return None
        peer = Peer(connection, self._args.rank_timeout_s)
        with contextlib.suppress(RankLostError, msgspec.DecodeError, OSError):
            message = peer.receive(self._args.rank_timeout_s)
            if isinstance(message, Join) and hmac.compare_digest(
                message.secret.encode(), self.secret.encode()
            ):
                if message.version == VERSION:
                    return message, peer
                reason = f"it is of version {message.version}, and this engine of {VERSION}"
                self._send_away(message, peer, reason)
                return None
        self._log(f"refused: whoever connected from {host} is no rank of this engine")
        peer.close()
        return None

    def _send_away(self, join: Join, peer: Peer, reason: str) -> None:
        """It belongs to us, so it is told why."""
        self._log(f"refused: process {join.pid} cannot be a rank: {reason}")
        self._refused = f"; one was refused: {reason}"
        with contextlib.suppress(RankLostError):
            peer.send(Refusal("ConfigError", reason))
        peer.close()


def _is_there(peer: Peer, timeout: float) -> bool:
    """Whether who joined lives, and says nothing but that until it is told what to be."""
    poll = select.poll()
    poll.register(peer, select.POLLIN)
    try:
        while poll.poll(0):
            if peer.receive(timeout) is not None:
                return False
    except (RankLostError, msgspec.DecodeError):
        return False
    return not peer.is_silent


def _shared_secret() -> str:
    secret = os.environ.get(SECRET_VARIABLE)
    if not secret:
        raise ConfigError(
            f"ranks of other machines join with a secret: set {SECRET_VARIABLE} to the same text"
            " for the engine and for them"
        )
    return secret
