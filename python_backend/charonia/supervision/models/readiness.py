"""What Triton says of a model, and of itself, to a question by BLS.

Owns the question and what its answers mean. Must not know when it is safe to ask: that is
`server_watch`'s.

Triton is asked with a request for an output that no model has: that is refused before it gets into
the model's queue, so the answer waits neither for the model nor behind anybody's requests. BLS
works in `execute` and, once the model that asks is loaded, in threads; its errors are harmless, and
so are answers without tensors. The tensors of an answer are made without holding Python's lock
(2.51.0), so in a process with threads every such answer may corrupt the heap; measured, a process
with three threads dies after some thousand calls.
"""

import re
from typing import Any

from charonia.errors import (
    EngineDiedError,
    EngineUnloadedError,
    ServerStartingError,
    ServerStoppingError,
    split_answer,
)
from charonia.supervision.models.engine_liveness import UNLOADED

_OUTPUT = "readiness"
_IS_LOADED = "unexpected inference output"
_IS_NOT_LOADED = "is not ready"
_TAKES_NO_CALLS = ("Server not ready", "BLS is only supported during")
"""What it says of all models while it shuts down, and before it has started; and its Python backend
to a model that is being unloaded."""


class Readiness:
    """Of one model, the engine or another, and of the Triton that this process belongs to.

    Attributes:
        has_server_started: whether it is known to take calls, or to have taken some: one that
            refuses them then is shutting down.
    """

    def __init__(self, pb_utils: Any, model: str) -> None:
        self._pb_utils = pb_utils
        self._model = model
        self.has_server_started = False

    def check_loaded(self) -> None:
        """Ask whether the model is loaded.

        Raises:
            EngineUnloadedError: it is not. ServerStoppingError: no model is, any more.
            ServerStartingError: the server takes no calls before it has loaded all its models.
            EngineDiedError: there is no such model.
        """
        pb_utils = self._pb_utils
        try:
            response = pb_utils.InferenceRequest(
                model_name=self._model, requested_output_names=[_OUTPUT], inputs=[]
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
            raise EngineUnloadedError(UNLOADED)  # its shutdown notice may still be to come
        if _IS_LOADED not in text:
            raise EngineDiedError(clean(text))

    def check_server(self) -> None:
        """Ask whether the server works.

        Raises:
            ServerStoppingError, ServerStartingError: it does not, any more or yet; whatever it is
                asked for now it will refuse.
        """
        try:
            self.check_loaded()
        except (ServerStoppingError, ServerStartingError):
            raise
        except EngineDiedError:
            pass  # of the model, not of the server


def clean(message: str) -> str:
    """Triton's message without the traceback, the paths and the kind that it may carry."""
    message, _ = split_answer(re.split(r"\n+(?:At:|Traceback)", message)[0])
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]*", "…", message).strip()
