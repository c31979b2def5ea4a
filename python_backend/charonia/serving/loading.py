"""Models that are loaded and unloaded by a process of its own, on another one's order.

Owns the orders, both ends of the socket that they go through, and the calls to Triton. Must not
know which model is loaded, or why.

`pb_utils.load_model` holds Python's lock until the model is loaded (2.51.0; measured: for as long
as that takes no other thread of its process runs). In the scheduler's process no request would run
out of time meanwhile, be cancelled, or be refused, and no probe be answered. So a model that has
nothing else to do makes the call::

    scheduler ── LoadOrder ──► loader ── pb_utils.load_model ──► Triton
              ◄─ LoadReply ──

Where no loader can be reached, the call is made here after all.

A load takes as long as it takes, so no time limit ends the wait for a reply; but a loader that is
stopped will not answer. Who ordered has hung up then, and its order is void.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from charonia.errors import ConfigError
from charonia.serving.liveness import process_state
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from charonia.sockets.local import SOCKET_SUFFIX, connect, is_same_user, listen, peer_pid
from charonia.sockets.server import Server

LOADER_SOCKET = f"loader{SOCKET_SUFFIX}"
"""Beside the loader's model.py."""
_MAX_BYTES = 2**16
_SEND_TIMEOUT_S = 10.0
_LOOK_AFTER_S = 1.0
_NUM_LOOKS = 3
"""At a process that is stopped, until it is given up; it may be for a moment only."""


class LoadOrder(msgspec.Struct, frozen=True):
    """Load a model, or unload it."""

    model: str
    action: Literal["load", "unload"]


class LoadReply(msgspec.Struct, frozen=True):
    """That it is done, or what Triton said."""

    error: str | None = None


class LoadError(Exception):
    """Triton has refused, or nobody knows what has come of an order."""


class Loader:
    """The loader's end.

    Args:
        path: where the socket is made; an old one is replaced. log: takes one line, from any
            thread.

    Raises:
        ConfigError: the model's directory takes no socket.
    """

    def __init__(self, pb_utils: Any, path: Path, *, log: Callable[[str], None]) -> None:
        self._pb_utils = pb_utils
        try:
            listener = listen(path)
        except OSError as error:
            raise ConfigError(
                f"the loader's directory must take a socket, {path.name}: {error.strerror}"
            ) from None
        self._server = Server(listener, is_same_user, self._serve, log=log, max_bytes=_MAX_BYTES)
        self._server.start()

    def close(self) -> None:
        """Take no more orders."""
        self._server.close()

    def _serve(self, connection: Connection) -> None:
        for message in connection.messages():
            order = msgspec.msgpack.decode(message, type=LoadOrder)
            if not connection.channel.is_quiet():
                return  # who ordered that has given up, and may have ordered otherwise since
            connection.send(msgspec.msgpack.encode(LoadReply(self._carry_out(order))))

    def _carry_out(self, order: LoadOrder) -> str | None:
        try:
            control(self._pb_utils, order)
        except LoadError as error:
            return str(error)
        return None


def control(pb_utils: Any, order: LoadOrder) -> None:
    """Carry an order out in this process.

    Raises:
        LoadError: Triton refuses.
    """
    call = pb_utils.load_model if order.action == "load" else pb_utils.unload_model
    try:
        call(order.model)
    except Exception as error:
        raise LoadError(str(error)) from None


def order_control(pb_utils: Any, path: Path, order: LoadOrder) -> None:
    """Have the loader that listens at `path` carry an order out; waits until it has.

    Raises:
        LoadError: Triton refuses, or the loader has ended meanwhile, or is stopped.
    """
    try:
        loader = connect(path, max_bytes=_MAX_BYTES)
    except OSError:
        control(pb_utils, order)
        return
    try:
        _order(loader, order)
    except OSError as error:
        raise LoadError(f"the loader takes no order: {error.strerror or error}") from None
    finally:
        loader.close()


def _order(loader: Channel, order: LoadOrder) -> None:
    loader.send(msgspec.msgpack.encode(order), _SEND_TIMEOUT_S)
    data = _receive_reply(loader)
    if data is None:
        raise LoadError(f"the loader has ended, the model may be {order.action}ed all the same")
    reply = msgspec.msgpack.decode(data, type=LoadReply)
    if reply.error is not None:
        raise LoadError(reply.error)


def _receive_reply(loader: Channel) -> bytes | None:
    """Wait for a reply as long as one may come; None when the loader has ended.

    Raises:
        LoadError: it is stopped.
    """
    pid = peer_pid(loader)
    num_looks = 0
    while num_looks < _NUM_LOOKS:
        try:
            return loader.receive(_LOOK_AFTER_S)
        except TimeoutError:
            num_looks = num_looks + 1 if process_state(pid) in ("T", "t") else 0
    raise LoadError("the loader's process is stopped")
