"""Connects models of the same Triton to the scheduler's socket.

Owns the socket's path, and the request that makes the scheduler listen. Must not know the messages.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from charonia.errors import UnavailableError, error_of, split_answer
from charonia.events import RareLog, error_event
from charonia.serving.messages.relay_client import requests_socket
from charonia.sockets.channel import Channel
from charonia.sockets.local import connect
from charonia.supervision.models.probes import clean


class SchedulerAddress:
    """Address of the scheduler, for a model in the same repository.

    Args:
        scheduler_model: its name. repository: directory of the models.
        log: takes one line, from any thread.
    """

    def __init__(
        self,
        pb_utils: Any,
        scheduler_model: str,
        repository: Path,
        *,
        log: Callable[[str], None],
    ) -> None:
        self._pb_utils = pb_utils
        self._complain = RareLog(log)
        self._scheduler_model = scheduler_model
        self._path = requests_socket(repository, scheduler_model)

    def connect(self) -> Channel:
        """Connect; to be called in the thread of `execute`.

        The scheduler takes connections only after its first request, which shows that Triton has
        loaded it. So this sends a probe first. It asks for no text, because BLS makes tensors
        without holding Python's lock, see `Readiness`.

        Raises:
            CharoniaError: there is no scheduler, or it answers with this error.
        """
        pb_utils = self._pb_utils
        try:
            knock = pb_utils.InferenceRequest(
                model_name=self._scheduler_model,
                requested_output_names=["timing"],
                inputs=[pb_utils.Tensor("probe", np.array([True]))],
            )
            for response in knock.exec(decoupled=True):
                if response.has_error():
                    message, kind = split_answer(response.error().message())
                    raise error_of(clean(message), kind or UnavailableError.kind)
            return connect(self._path)
        except pb_utils.TritonModelException as error:
            raise UnavailableError(clean(str(error))) from None
        except OSError as error:
            name = "/".join(self._path.parts[-3:])
            self._complain(error_event("scheduler_unreachable", socket=name, reason=error.strerror))
            raise UnavailableError(f"the scheduler cannot be reached: {error.strerror}") from None
