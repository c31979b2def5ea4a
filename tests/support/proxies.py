"""A proxy on the double of `pb_utils`, whose scheduler is the test's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from charonia.serving.conventions.convention import Convention, PlainConvention
from charonia.serving.hosts.proxy import ProxyHost
from charonia.serving.requests.queue_limit import QueueLimit
from support.pb_utils import Request, request_of
from support.waiting import WAIT_S


def new_proxy(
    pb_utils: Any,
    repository: Path,
    queue_limit: QueueLimit,
    *,
    is_decoupled: bool,
    convention: Convention | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> ProxyHost:
    return ProxyHost(
        pb_utils,
        "scheduler",
        repository,
        queue_limit,
        convention or PlainConvention(is_decoupled=is_decoupled),
        is_decoupled=is_decoupled,
        log=log,
    )


def text_request() -> Request:
    return request_of(text_input=np.array([b"x"], dtype=object))


def answer_to(request: Request) -> Any:
    """The text or the error that it got, and that it got nothing else."""
    response = request.sender.sent.get(timeout=WAIT_S)
    assert request.sender.ended.wait(WAIT_S)
    assert request.sender.sent.empty()
    if (error := response.error()) is not None:
        return error.message(), error.code()
    return response.output_tensors()[0].as_numpy().item().decode()
