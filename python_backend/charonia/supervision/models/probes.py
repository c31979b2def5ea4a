"""Probes from a model's process: of the engine's process, its model's state, and the server.

Owns the probes and the meaning of their answers. Must not know when they are sent (`judge`), plans,
or what happens to requests.

::

    EngineProbe   asks the engine's process over a second connection to its socket; a thread of the
                  engine answers, whatever the current step is doing
    Readiness     asks Triton by BLS whether a model is loaded, and whether the server works

    hello ──► answer              the engine lives, however long its step takes
    hello ──► end of connection   the process has ended
    hello ──► shutdown notice     the engine was unloaded
    hello ──► no answer for 1 s   the process table is read: is it stopped?
    hello ──► no answer for 10 s  it hangs, for example in a deadlock
"""

import re
from typing import Any

import msgspec

from charonia.errors import (
    EngineDiedError,
    EngineHungError,
    EngineUnloadedError,
    ServerStartingError,
    ServerStoppingError,
    split_answer,
)
from charonia.protocol import Hello, ShutdownNotice, decode_reply, encode
from charonia.sockets.channel import Channel
from charonia.supervision.process_table import process_state

UNLOADED = "the engine was unloaded"
HUNG_UP = "the engine's process has hung up"
_LOOK_AFTER_S = 1.0
_NUM_LOOKS = 10
_HELLO = encode(Hello())
_OUTPUT = "readiness"
_IS_LOADED = "unexpected inference output"
_IS_NOT_LOADED = "is not ready"
_TAKES_NO_CALLS = ("Server not ready", "BLS is only supported during")
"""Triton's answers for all models while it shuts down or starts, and the Python backend's answer to
a model that is being unloaded."""


class EngineProbe:
    """Probes one engine.

    Args:
        channel: a connection to the engine, used by this object alone.
        pid: of the engine's process.
    """

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel = channel
        self._pid = pid

    def ask(self) -> None:
        """Ask whether the engine lives, and wait for its answer.

        Raises:
            EngineDiedError: it has ended. EngineHungError: it does not answer. EngineUnloadedError:
                it has sent a shutdown notice.
        """
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

    def hang_up(self) -> None:
        """End the connection; a question that waits fails. May be called from another thread."""
        self._channel.hang_up()

    def close(self) -> None:
        """Release the connection."""
        self._channel.close()


def _is_shutdown_notice(data: bytes) -> bool:
    try:
        return isinstance(decode_reply(data), ShutdownNotice)
    except msgspec.DecodeError:
        raise EngineDiedError("the engine's reply cannot be read") from None


class Readiness:
    """Asks Triton, by BLS, about the state of one model and of the server itself.

    The question is a request for an output that no model has. Triton refuses it before it enters
    the model's queue, so the answer waits neither for the model nor behind other requests. BLS
    works in `execute` and, once the asking model is loaded, in threads. Its errors are harmless,
    and so are answers without tensors. Triton 2.51.0 creates the tensors of an answer without
    holding the GIL, so in a process with threads each such answer may corrupt the heap. In a
    measurement a process with three threads died after some thousand calls.

    Attributes:
        model: the model's name.
        has_server_started: whether the server has ever taken a call. If it has and now refuses
            calls, it is shutting down.
    """

    def __init__(self, pb_utils: Any, model: str) -> None:
        self._pb_utils = pb_utils
        self.model = model
        self.has_server_started = False

    def check_loaded(self) -> None:
        """Ask whether the model is loaded.

        Raises:
            EngineUnloadedError: it is not. ServerStoppingError: the server is shutting down.
            ServerStartingError: the server has not loaded all its models yet, and takes no calls.
            EngineDiedError: there is no such model.
        """
        pb_utils = self._pb_utils
        try:
            response = pb_utils.InferenceRequest(
                model_name=self.model, requested_output_names=[_OUTPUT], inputs=[]
            ).exec()
            text = response.error().message()
        except pb_utils.TritonModelException as error:
            text = str(error)
        if any(words in text for words in _TAKES_NO_CALLS):
            if not self.has_server_started:
                raise ServerStartingError("the server has not started yet")
            raise ServerStoppingError("the server takes no calls")
        self.has_server_started = True
        if _IS_NOT_LOADED in text:
            raise EngineUnloadedError(UNLOADED)  # its shutdown notice may not have arrived yet
        if _IS_LOADED not in text:
            raise EngineDiedError(clean(text))

    def check_server(self) -> None:
        """Ask whether the server works.

        Raises:
            ServerStoppingError, ServerStartingError: it is shutting down, or has not started yet.
                It refuses all calls meanwhile.
        """
        try:
            self.check_loaded()
        except (ServerStoppingError, ServerStartingError):
            raise
        except EngineDiedError:
            pass  # says nothing about the server


def clean(message: str) -> str:
    """Triton's message without traceback, paths and kind of error."""
    message, _ = split_answer(re.split(r"\n+(?:At:|Traceback)", message)[0])
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]*", "…", message).strip()
