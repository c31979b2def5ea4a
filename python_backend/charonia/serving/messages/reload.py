"""The operator's orders to the scheduler: reload the engine, or drain.

Owns the messages, the scheduler's end of the socket, and the engine's model.json during a reload.
Must not know how an engine is replaced.

    charonia reload ── ReloadOrder ──► scheduler      checks it, and begins
                    ── ReloadQuestion ───────►        as often as it likes, by the order's number
                    ◄─ ReloadState ──────────

During the load, the old model.json is kept beside the new one. If the scheduler dies meanwhile, the
next load takes the old one: the new one may be the cause.

The socket is in the scheduler's directory, which belongs to the run's user. A process that can open
it could also write the files that Triton loads.
"""

import functools
import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from charonia.config import EngineArgs
from charonia.core.replica.reload import Phase, Reload
from charonia.errors import CharoniaError, ConfigError
from charonia.sockets.answering import answer_each
from charonia.sockets.connection import Connection
from charonia.sockets.local import SOCKET_SUFFIX, is_same_user, listen
from charonia.sockets.server import Server

RELOAD_SOCKET = f"reload{SOCKET_SUFFIX}"
"""Name of the socket, beside the scheduler's model.py."""
MAX_ORDER_BYTES = 2**20
"""Most bytes of an order, which contains a model.json."""
TOKENIZER_FILE = "tokenizer.json"
_BEFORE_SUFFIX, _DRAFT_SUFFIX = ".before", ".draft"
LEFT_OF_RELOADS = (f"*{_BEFORE_SUFFIX}", f"*{_DRAFT_SUFFIX}")
"""Patterns of the files that lie beside model.json during a reload."""


class ReloadOrder(msgspec.Struct, frozen=True, tag=True):
    """Reload the engine with these arguments (model.json), after live requests if `drain`."""

    values: dict[str, Any]
    drain: bool = False


class ReloadQuestion(msgspec.Struct, frozen=True, tag=True):
    """Asks for the progress of a reload; `cancel` cancels it, unless it is loading."""

    number: int
    cancel: bool = False


class DrainOrder(msgspec.Struct, frozen=True, tag=True):
    """Stop taking requests. It may be repeated, to ask how many are left."""


class DrainState(msgspec.Struct, frozen=True):
    """Number of requests that are left."""

    num_live: int


class ReloadState(msgspec.Struct, frozen=True):
    """Progress of a reload; see `charonia.core.replica.reload.Reload`.

    Attributes:
        number: identifies it in questions; -1 if it was refused.
    """

    phase: Phase
    number: int = -1
    num_live: int = 0
    num_held: int = 0
    seconds: float = 0.0
    reason: str = ""


_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    ReloadOrder | ReloadQuestion | DrainOrder
)


def decode_order(data: bytes) -> ReloadOrder | ReloadQuestion | DrainOrder:
    """Raises ValueError, RecursionError: the data is not such a message."""
    message: ReloadOrder | ReloadQuestion | DrainOrder = _decoder.decode(data)
    return message


class Reloadable(Protocol):
    """Carries out the operator's orders."""

    def reload(self, reload: Reload) -> None:
        """Begin a reload."""
        ...

    def drain(self) -> int:
        """Stop taking requests; return how many are left."""
        ...


class ReloadServer:
    """The scheduler's end.

    Args:
        path: where the socket is made; an old one is replaced.
        model_file: the engine's model.json.
        refusal: why reloads are impossible; None if they are possible.
        log: takes one line, from any thread.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(
        self,
        path: Path,
        model_file: Path,
        reloadable: Reloadable,
        *,
        refusal: str | None,
        log: Callable[[str], None],
    ) -> None:
        self._model_file = model_file
        self._reloadable = reloadable
        self._refusal = refusal
        self._lock = threading.Lock()
        self._orders: list[Reload] = []  # all so far, by number
        self._server = Server(
            listen(path), is_same_user, self._serve, log=log, max_bytes=MAX_ORDER_BYTES
        )
        self._server.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _serve(self, connection: Connection) -> None:
        answer_each(connection, lambda message: partial(self._answer, message))

    def _answer(self, data: bytes) -> bytes:
        try:
            message = decode_order(data)
            if isinstance(message, DrainOrder):
                return msgspec.msgpack.encode(DrainState(self._reloadable.drain()))
            if isinstance(message, ReloadOrder):
                number = self._take(message)
            else:
                number = message.number
                if message.cancel:
                    self._order(number).is_cancelled = True
            return msgspec.msgpack.encode(_state(number, self._order(number)))
        except (CharoniaError, OSError, ValueError, RecursionError) as error:
            return msgspec.msgpack.encode(ReloadState("failed", reason=str(error)))

    def _take(self, order: ReloadOrder) -> int:
        """Begin a reload; returns its number.

        Raises:
            CharoniaError: it is impossible.
        """
        with self._lock:
            if self._refusal is not None:
                raise ConfigError(self._refusal)
            if self._orders and not self._orders[-1].is_over:
                raise ConfigError("another reload is under way")
            before = EngineArgs.from_file(self._model_file)
            after = EngineArgs.from_dict(order.values)
            check_same_tokenizer(fingerprint_tokenizer(before), after)
            check_same_kv_events(before, after)
            text = msgspec.json.format(msgspec.json.encode(order.values)) + b"\n"
            reload = Reload(NewModelFile(self._model_file, text), order.drain)
            self._orders.append(reload)
            self._reloadable.reload(reload)
            return len(self._orders) - 1

    def _order(self, number: int) -> Reload:
        """Raises ConfigError: there is no reload of this number."""
        if not 0 <= number < len(self._orders):
            raise ConfigError(f"there is no reload of number {number}")
        return self._orders[number]


def _state(number: int, one: Reload) -> ReloadState:
    return ReloadState(one.phase, number, one.num_live, one.num_held, one.seconds, one.reason)


def fingerprint_tokenizer(args: EngineArgs) -> str:
    """Fingerprint of a tokenizer, independent of its file's layout. Cached until the file changes.

    Raises:
        ConfigError: the tokenizer cannot be read.
    """
    path = args.tokenizer_dir / TOKENIZER_FILE
    try:
        stat = path.stat()
        return _fingerprint(path, (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size))
    except OSError as error:
        raise ConfigError(f"{TOKENIZER_FILE} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{TOKENIZER_FILE} cannot be read: {error}") from None


@functools.lru_cache(maxsize=4)
def _fingerprint(path: Path, version: tuple[int, ...]) -> str:
    """The fingerprint of a file, cached: it has some megabytes and is needed for every new engine.

    Args:
        version: changes whenever the file changes.
    """
    content = msgspec.json.decode(path.read_bytes())
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def check_same_tokenizer(fingerprint: str, args: EngineArgs) -> None:
    """Check that the tokens of live requests keep their meaning.

    Raises:
        ConfigError: the tokenizer does not have this fingerprint.
    """
    if fingerprint_tokenizer(args) != fingerprint:
        raise ConfigError(
            f"the new engine has another tokenizer ({TOKENIZER_FILE} differs), with which live"
            " requests could not go on; start a server of its own for it"
        )


def check_same_kv_events(before: EngineArgs, after: EngineArgs) -> None:
    """Check that the KV events keep their endpoints.

    Raises:
        ConfigError: `kv_events_config` differs.
    """
    if before.kv_events != after.kv_events:
        raise ConfigError(
            "kv_events_config differs: its endpoints are the scheduler's, which goes on with the"
            " new engine; start the server anew for it"
        )


@dataclass(frozen=True)
class NewModelFile:
    """A new model.json, see `Configuration`."""

    path: Path
    content: bytes

    def install(self) -> None:
        """Replace model.json; the old one is kept beside it.

        Raises:
            OSError: it cannot be written; nothing has changed.
        """
        _replace(_before(self.path), self.path.read_bytes())
        try:
            _replace(self.path, self.content)
        except OSError:
            self.settle()
            raise

    def restore(self) -> None:
        """Restore the model.json that was kept."""
        restore(self.path)

    def settle(self) -> None:
        """Remove the old model.json."""
        _before(self.path).unlink(missing_ok=True)


def restore(model_file: Path) -> bool:
    """Restore the model.json that was kept; return whether there was one."""
    try:
        os.replace(_before(model_file), model_file)
    except FileNotFoundError:
        return False
    return True


def _before(model_file: Path) -> Path:
    return model_file.with_name(model_file.name + _BEFORE_SUFFIX)


def _replace(path: Path, content: bytes) -> None:
    """Write a file atomically: an engine may be loading at any moment."""
    draft = path.with_name(path.name + _DRAFT_SUFFIX)
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
