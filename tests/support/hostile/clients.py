"""Attacks of clients that send a good request and then do not behave.

Owns those who vanish and those who never read. Must not know what a bad request is.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from support.e2e import at_once
from support.hostile.target import Target, infer_request, reset
from support.live_stream import LiveStream

PROMPT_IDS = [5, 6, 7]
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "logprobs": 20}
WAYS_IN = [("grpc", "scheduler"), ("grpc", "llm"), ("http", "scheduler"), ("http", "llm")]
UPLOAD_BYTES = 2**22
PATIENCE_S = 2.0


def vanish_in_streams(target: Target, strength: int) -> None:
    """Leave before the first token, and in the middle, by every way in."""

    def run(index: int) -> None:
        protocol, model = WAYS_IN[index % len(WAYS_IN)]
        url = target.http_url if protocol == "http" else target.grpc_url
        stream = LiveStream(url, PROMPT_IDS, protocol=protocol, model=model, **LONG)
        stream.wait_tokens(4 * (index // len(WAYS_IN) % 3))
        assert not stream.is_over, stream.error
        stream.leave()
        stream.wait_over()

    at_once([lambda i=i: run(i) for i in range(24 * strength)], num_threads=8)


def vanish_in_uploads(target: Target, strength: int) -> None:
    """Reset the connection, or cancel the call, while the request is being sent."""
    body = b"x" * UPLOAD_BYTES
    head = (
        b"POST /v2/models/scheduler/generate_stream HTTP/1.1\r\nHost: charonia\r\n"
        b"Content-Length: 16777216\r\n\r\n"
    )
    request = infer_request("generate", {"text_input": body})
    for index in range(10 * strength):
        connection = target.connect(target.http_port)
        with contextlib.suppress(OSError):
            connection.sendall(head + body)
        reset(connection)
        with target.stub() as stub:
            call = stub.ModelInfer.future(request)
            time.sleep(0.002 * (index % 10))
            call.cancel()


def never_read(target: Target, strength: int) -> None:
    """Long streams of which nobody takes a response, until their clients vanish."""
    with contextlib.ExitStack() as held:
        calls = [held.enter_context(_unread_grpc(target)) for _ in range(6 * strength)]
        connections = [_unread_http(target) for _ in range(6 * strength)]
        time.sleep(PATIENCE_S)
        for call in calls:
            call.cancel()
        for connection in connections:
            reset(connection)


@contextlib.contextmanager
def _unread_grpc(target: Target) -> Iterator[Any]:
    inputs = {"input_ids": PROMPT_IDS, "stream": True, "return_logprobs": True}
    request = infer_request("scheduler", inputs | {"sampling_parameters": LONG})
    with target.stub() as stub:
        yield stub.ModelStreamInfer(iter([request]))


def _unread_http(target: Target) -> Any:
    body = {"input_ids": PROMPT_IDS, "stream": True, "return_logprobs": True}
    data = json.dumps(body | {"sampling_parameters": json.dumps(LONG)}).encode()
    connection = target.connect(target.http_port, receive_bytes=1024)
    connection.sendall(
        b"POST /v2/models/scheduler/generate_stream HTTP/1.1\r\nHost: charonia\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
    )
    return connection
