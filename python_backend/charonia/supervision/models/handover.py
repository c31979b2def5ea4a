"""One scheduler after the other: who is loaded while another one lives has it end its work first.

Owns the socket by which the younger one says so, as does whoever is about to stop the server. Must
not know what a scheduler does to end.

Triton loads a model that is loaded already beside the old one, sends it every new request from then
on, and lets the old one go when its last request is over. Two schedulers on one engine would throw
each other's rows out step after step, and none of their requests would ever end::

    older                                        younger
      serves                                       initialize: connects, and listens in its place
      serves                                       its first request, or some seconds later:
      ends all it has  ◄──── step down ─────       waits
      hangs up         ────────────────────►       starts, on the same engine
      finalize
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from charonia.sockets.local import SOCKET_SUFFIX, connect, is_same_user, listen
from charonia.sockets.server import Server

HANDOVER_SOCKET = f"handover{SOCKET_SUFFIX}"
"""Beside the scheduler's model.py."""
_STEP_DOWN = b"charonia: step down"
"""A word that nobody says by mistake: whoever may connect could end the scheduler with it."""


class Handover:
    """A scheduler's place in the row of those that were loaded over each other.

    Args:
        path: where the socket is made; that of an older one is replaced.
        step_down: ends all work of this one; called in another thread when a younger one asks.
        log: takes one line, from any thread.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(
        self, path: Path, step_down: Callable[[], None], *, log: Callable[[str], None]
    ) -> None:
        self._step_down = step_down
        self._older = _connect(path)
        self._server = Server(
            listen(path), is_same_user, self._serve, log=log, max_bytes=len(_STEP_DOWN)
        )
        self._server.start()

    @property
    def has_older(self) -> bool:
        """Whether there was an older one, which nobody has asked to end its work yet."""
        return self._older is not None

    def take_over(self, timeout: float) -> bool:
        """Have the older one end its work; waits at most `timeout` seconds.

        Returns:
            Whether there is none any more that could do anything.
        """
        older, self._older = self._older, None
        return _has_stepped_down(older, timeout)

    def close(self) -> None:
        """Stop listening, and leave an older one to itself."""
        self._server.close()
        if self._older is not None:
            self._older.close()

    def _serve(self, connection: Connection) -> None:
        """Wait for the one message, however long; to hang up is the answer, also to another."""
        if connection.channel.receive() == _STEP_DOWN:
            self._step_down()


def step_down(path: Path, timeout: float) -> bool:
    """Have the scheduler that listens at `path` end its work; nobody follows it.

    Returns:
        Whether there is none any more that could do anything, within `timeout` seconds.
    """
    return _has_stepped_down(_connect(path), timeout)


def _has_stepped_down(older: Channel | None, timeout: float) -> bool:
    if older is None:
        return True
    try:
        older.send(_STEP_DOWN, timeout)
        return older.receive(timeout) is None
    except TimeoutError:
        return False  # it hangs
    except OSError:
        return True  # it has gone
    finally:
        older.close()


def _connect(path: Path) -> Channel | None:
    """To the scheduler that listens there; None where there is none."""
    with contextlib.suppress(OSError):
        return connect(path)
    return None
