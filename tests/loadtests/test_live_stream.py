"""A stream that is watched is read to its end, whatever the server puts into it."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from support.live_stream import WRONG_ANSWER, LiveStream

TOKEN = {"output_ids": [5], "finish_reason": "None"}
LAST = {"output_ids": [6], "finish_reason": "length", "timing": "{}"}
ERROR = {"error": "no engine"}


@pytest.fixture
def stream() -> Iterator[Callable[..., LiveStream]]:
    """Makes a stream of the events that a server sends."""
    servers = []

    def start(*events: dict[str, Any]) -> LiveStream:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.send_response(200)
                self.end_headers()
                for event in events:
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

            def log_message(self, *args: Any) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append((server, threading.Thread(target=server.handle_request)))
        servers[-1][1].start()
        return LiveStream(f"127.0.0.1:{server.server_port}", [1], protocol="http").wait_over()

    yield start
    for server, thread in servers:
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([TOKEN, LAST], None),
        ([TOKEN], "the stream ended before its last response"),
        ([TOKEN, ERROR], "no engine"),
        ([TOKEN, ERROR, {"finish_reason": "None"}], "no engine"),
        ([TOKEN, ERROR, TOKEN, LAST], f"{WRONG_ANSWER}2 responses after the error: no engine"),
        ([ERROR, ERROR], f"{WRONG_ANSWER}1 responses after the error: no engine"),
    ],
)
def test_what_follows_an_error_is_counted(
    stream: Callable[..., LiveStream], events: list[dict[str, Any]], error: str | None
) -> None:
    assert stream(*events).error == error


def test_an_error_after_the_last_response_is_a_wrong_answer(
    stream: Callable[..., LiveStream],
) -> None:
    seen = stream(TOKEN, LAST, ERROR)
    assert seen.finish_reason == "length"
    assert (seen.error or "").startswith(f"{WRONG_ANSWER}a response after the last one")
