"""Handover between schedulers: a new scheduler has the old one end its work first.

Owns the socket for this request, which is also used before the server is stopped. Must not know how
a scheduler ends its work.

When a loaded model is loaded again, Triton keeps the old instance until its last request ends, and
sends all new requests to the new one. Two schedulers on one engine would evict each other's rows at
every step, and none of their requests would ever end::

    older                                        newer
      serves                                       initialize: connects, and listens in its place
      serves                                       its first request, or some seconds later:
      ends its work    ◄──── step down ─────       waits
      disconnects      ────────────────────►       starts, on the same engine
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
"""Name of the socket, in the folder of the scheduler's model.py."""
_STEP_DOWN = b"charonia: step down"
"""Message that ends the scheduler, for any process that may connect; not to be sent by mistake."""


class Handover:
    """A scheduler's link to the one before it and the one after it.

    Args:
        path: of the socket; an older scheduler's socket there is replaced.
        step_down: ends all work of this scheduler; called in another thread when a newer one asks.
        log: takes one line, from any thread.

    Raises:
        OSError: the socket cannot be created.
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
        """True if there was an older scheduler that has not been asked to end its work yet."""
        return self._older is not None

    def take_over(self, timeout: float) -> bool:
        """Have the older scheduler end its work; waits at most `timeout` seconds.

        Returns:
            Whether no older scheduler is active any more.
        """
        older, self._older = self._older, None
        return _has_stepped_down(older, timeout)

    def close(self) -> None:
        """Stop listening, and disconnect from an older scheduler."""
        self._server.close()
        if self._older is not None:
            self._older.close()

    def _serve(self, connection: Connection) -> None:
        """Wait for the message, without a timeout. Closing the connection is the answer."""
        if connection.channel.receive() == _STEP_DOWN:
            self._step_down()


def step_down(path: Path, timeout: float) -> bool:
    """Have the scheduler that listens at `path` end its work, without a successor.

    Returns:
        Whether no scheduler is active any more, within `timeout` seconds.
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
    """Connect to the scheduler that listens there; None if there is none."""
    with contextlib.suppress(OSError):
        return connect(path)
    return None
