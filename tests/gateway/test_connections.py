"""Connections: what is bounded, and that a client is seen to leave whatever it has sent."""

import asyncio
import json
import socket

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from charonia.gateway import connections
from charonia.gateway.connections import Connection
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import ENDLESS, scrape, wait_for, wait_idle
from support.gateway import Gateway
from support.waiting import WAIT_S

HEAD = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


def connected(gateway: Gateway) -> socket.socket:
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def read_to_end(connection: socket.socket) -> bytes:
    data = bytearray()
    while piece := connection.recv(2**16):
        data += piece
    return bytes(data)


def completion(**body: object) -> bytes:
    content = json.dumps({"prompt": "x", "ignore_eos": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


@pytest.mark.parametrize("at_once", [False, True])
def test_a_request_before_the_last_answer_ends_the_connection_with_that(
    gateway: Gateway, *, at_once: bool
) -> None:
    with connected(gateway) as connection:
        if at_once:
            connection.sendall(completion(max_tokens=500) + completion(max_tokens=1))
        else:
            connection.sendall(completion(max_tokens=500, stream=True))
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.sendall(completion(max_tokens=1))
        data = read_to_end(connection)
    assert data.count(b'"finish_reason":"length"') == 1
    assert data.count(b"HTTP/1.1 200") == at_once


def test_who_sends_another_request_and_leaves_is_seen_to_leave(
    gateway: Gateway, server: TritonServer
) -> None:
    before = wait_idle(server)["charonia_cancellations_total"]
    with connected(gateway) as connection:
        connection.sendall(completion(max_tokens=ENDLESS))
        wait_for(lambda: scrape(server)["charonia_requests_running"], bool)
        connection.sendall(HEAD * 10_000)
    assert wait_idle(server)["charonia_cancellations_total"] == before + 1


def test_a_connection_is_kept_for_one_request_after_the_other(gateway: Gateway) -> None:
    with connected(gateway) as connection:
        for _ in range(3):
            connection.sendall(HEAD)
            data = bytearray()
            while not data.endswith(b'{"status":"live"}'):
                data += connection.recv(2**16)
            assert data.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: "])
def test_a_head_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.05)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("there is no request")

    async def main() -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(app, http=Connection, lifespan="off", log_level="error")
            server = uvicorn.Server(config)
            task = asyncio.create_task(server._serve([listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(sent)
            try:
                return await asyncio.wait_for(reader.read(), WAIT_S)
            except ConnectionResetError:
                return b""
            finally:
                writer.close()
                server.should_exit = True
                await task

    assert asyncio.run(main()) == b""
