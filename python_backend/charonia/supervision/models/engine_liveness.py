"""Whether the engine's process lives, asked time and again beside the steps.

Owns a second connection to the engine's socket, which a thread of the engine's own answers whatever
its step is doing, and what the kernel says of the process. Must not know plans, or what becomes of
an engine that does not live.

    hello ──► answer              it lives, however long its step takes
    hello ──► the end             its process has ended, or gave notice: it was unloaded
    hello ──► nothing for 1 s     the kernel is asked: stopped?
    hello ──► nothing for 10 s    it hangs: a deadlock, say
"""

import threading
from pathlib import Path

import msgspec

from charonia.errors import EngineDiedError, EngineHungError, EngineUnloadedError
from charonia.protocol import Hello, ShutdownNotice, decode_reply, encode
from charonia.sockets.channel import Channel

UNLOADED = "the engine was unloaded"
HUNG_UP = "the engine's process has hung up"
_ASK_EVERY_S = 1.0
_LOOK_AFTER_S = 1.0
_NUM_LOOKS = 10
_HELLO = encode(Hello())


class EngineWatch:
    """Watches one engine from when it is made.

    Args:
        channel: a connection to the engine that nobody else uses.
        pid: of the engine's process.
    """

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel = channel
        self._pid = pid
        self._failure: EngineDiedError | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="charonia-watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Say whether it lives, as far as is known; waits for nothing.

        Raises:
            EngineDiedError: it does not, or (EngineHungError) it does not answer, or
                (EngineUnloadedError) it has given notice.
        """
        failure = self._failure
        if failure is not None:
            raise type(failure)(str(failure))

    def close(self) -> None:
        """Stop watching."""
        self._is_closing.set()
        self._channel.hang_up()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set():
                self._ask()
                self._is_closing.wait(_ASK_EVERY_S)
        except EngineDiedError as failure:
            self._failure = failure
        finally:
            self._channel.close()

    def _ask(self) -> None:
        """Raises as `check`."""
        try:
            self._channel.send(_HELLO, _LOOK_AFTER_S)
        except OSError:
            raise EngineDiedError(HUNG_UP) from None
        for _ in range(_NUM_LOOKS):
            try:
                data = self._channel.receive(_LOOK_AFTER_S)
            except TimeoutError:
                if process_state(self._pid) in ("T", "t"):
                    raise EngineHungError("the engine's process is stopped") from None
                continue
            if data is None:
                raise EngineDiedError(HUNG_UP)
            if _is_shutdown_notice(data):
                raise EngineUnloadedError(UNLOADED)
            return
        raise EngineHungError(f"no answer of the engine within {_NUM_LOOKS * _LOOK_AFTER_S:g} s")


def _is_shutdown_notice(data: bytes) -> bool:
    try:
        return isinstance(decode_reply(data), ShutdownNotice)
    except msgspec.DecodeError:
        raise EngineDiedError("the engine's reply cannot be read") from None


def process_state(pid: int) -> str | None:
    """One letter, such as R, S or T (stopped); None when a process has ended."""
    stat = _stat(pid)
    return None if stat is None else stat[0]


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it has ended."""
    stat = _stat(pid)
    return None if stat is None else int(stat[19])


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state on; None of a process that has ended, be it a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    values = text.rpartition(")")[2].split()
    return None if values[0] in "ZX" else values
