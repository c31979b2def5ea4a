"""The server's own HTTP front end, with bodies that end one whose threads have the usual stacks."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from charonia.launch.server import TritonServer
from support.bystander import Bystander
from support.e2e import generate

NUM_BRACKETS = 200_000
TEXT_BYTES = 40_000_000
NUM_CHUNKS = 1_000_000
CHUNKS_AT_ONCE = 10_000
ANSWER_TIMEOUT_S = 120.0


@pytest.fixture
def bystander(server: TritonServer) -> Iterator[Bystander]:
    """A stream of the same server, which must live on and be what it would be alone."""
    pid = server.pid
    with Bystander(server, seed=5) as stream:
        yield stream
        stream.wait_tokens(3)
    assert stream.token_ids == stream.undisturbed()
    assert (server.pid, server.is_running) == (pid, True)


def post_chunks(server: TritonServer, num_chunks: int) -> bytes:
    """POST a body of so many chunks of one byte; the beginning of the answer."""
    head = (
        b"POST /v2/models/scheduler/generate HTTP/1.1\r\nHost: charonia\r\n"
        b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    )
    address = (server.http_url.split(":")[0], server.http_port)
    with closing(socket.create_connection(address, timeout=ANSWER_TIMEOUT_S)) as connection:
        connection.sendall(head)
        for _ in range(num_chunks // CHUNKS_AT_ONCE):
            connection.sendall(b"1\r\n \r\n" * CHUNKS_AT_ONCE)
        connection.sendall(b"0\r\n\r\n")
        return connection.recv(4096)


@pytest.mark.usefixtures("bystander")
def test_a_body_of_brackets_is_refused(server: TritonServer) -> None:
    assert generate(server, b"[" * NUM_BRACKETS).status_code in (400, 500)


@pytest.mark.usefixtures("bystander")
def test_a_body_of_much_text_is_refused(server: TritonServer) -> None:
    reply = generate(server, json.dumps({"text_input": "x" * TEXT_BYTES}).encode())
    assert reply.status_code in (400, 413)


@pytest.mark.usefixtures("bystander")
def test_a_body_of_a_million_chunks_is_refused(server: TritonServer) -> None:
    assert post_chunks(server, NUM_CHUNKS).startswith((b"HTTP/1.1 4", b"HTTP/1.1 5"))
