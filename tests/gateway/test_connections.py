"""Connections: what is bounded, and that a client is seen to leave whatever it has sent."""

import asyncio
import json
import socket

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from charonia.gateway import connections
from charonia.gateway.connections import Connection, bounded
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


def read_answer(connection: socket.socket) -> bytes:
    """One answer that is a JSON object."""
    data = bytearray()
    while not data.endswith(b"}"):
        piece = connection.recv(2**16)
        assert piece, data
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


def test_headers_of_a_request_that_is_not_taken_are_not_those_of_the_one_before(
    gateway: Gateway,
) -> None:
    other = b"GET /health/live HTTP/1.1\r\nhost: x\r\nx-request-id: other\r\n\r\n"
    with connected(gateway) as connection:
        connection.sendall(completion(max_tokens=3) + other)
        data = read_to_end(connection)
    assert data.count(b"HTTP/1.1 200") == 1
    assert b"x-request-id" in data
    assert b"x-request-id: other" not in data


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
            assert read_answer(connection).startswith(b"HTTP/1.1 200")


def test_an_idle_connection_is_kept_for_longer_than_uvicorn_would(gateway: Gateway) -> None:
    """Otherwise a proxy that keeps it for longer loses the request that it sends too late."""
    with connected(gateway) as connection:
        connection.sendall(HEAD)
        assert read_answer(connection).startswith(b"HTTP/1.1 200")
        connection.settimeout(uvicorn.Config(None).timeout_keep_alive + 1.0)  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(WAIT_S)
        connection.sendall(HEAD)
        assert read_answer(connection).startswith(b"HTTP/1.1 200")


HELLO = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
EARLY = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "more"),
    [
        (b"", b""),
        (b"", b"GET / HTTP/1.1\r\nhost: "),
        (HELLO, b"\r\n"),  # uvicorn stops its own timer for that
        (EARLY, b"x"),
    ],
)
def test_a_head_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, more: bytes
) -> None:
    """The timeout is short only for what comes last, so nothing else can end the connection."""
    monkeypatch.setattr(connections, "HEAD_S", 10_000.0 if more else 0.05)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"hi"})

    async def main() -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(
                app, http=Connection, lifespan="off", log_level="error", timeout_keep_alive=10_000
            )
            server = uvicorn.Server(config)
            task = asyncio.create_task(server._serve([listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            while more and not server.server_state.connections:
                await asyncio.sleep(0.001)
            writer.write(sent)
            try:
                if sent:
                    assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200")
                monkeypatch.setattr(connections, "HEAD_S", 0.05)
                writer.write(more)
                return await asyncio.wait_for(reader.read(), WAIT_S)
            except ConnectionResetError:
                return b""
            finally:
                writer.close()
                server.should_exit = True
                await task

    assert asyncio.run(main()) == b""


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_the_end_of_an_answer_that_nobody_takes_is_not_waited_for(version: str) -> None:
    """Whether the connection would be kept or not: uvicorn waits for ever in both cases."""
    body = bytes(2**25)  # more than the kernel takes

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
            config = uvicorn.Config(
                app, http=bounded(0.1), lifespan="off", log_level="error", timeout_keep_alive=10_000
            )
            server = uvicorn.Server(config)
            task = asyncio.create_task(server._serve([listener]))
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, listener.getsockname())
            await loop.sock_sendall(client, f"GET / HTTP/{version}\r\nhost: x\r\n\r\n".encode())
            assert await loop.sock_recv(client, 12) == b"HTTP/1.1 200"
            async with asyncio.timeout(WAIT_S):
                while server.server_state.connections:
                    await asyncio.sleep(0.01)
            server.should_exit = True
            await task

    asyncio.run(main())


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
"""As Java's client sends it by default."""


def chunked(request: bytes) -> bytes:
    """The same request without the length of its body."""
    head, content = request.split(b"\r\n\r\n")
    head = head[: head.index(b"content-length")] + b"transfer-encoding: chunked"
    return head + b"\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(content), content)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("part_bytes", [1, 2**16])
def test_an_offer_of_another_protocol_is_ignored(
    gateway: Gateway, *, is_chunked: bool, part_bytes: int
) -> None:
    """Such a request is answered as any other one, and so is the next one on its connection."""
    request = chunked(completion(max_tokens=3)) if is_chunked else completion(max_tokens=3)
    request = request.replace(b"host: x\r\n", b"host: x\r\n" + OFFER)
    with connected(gateway) as connection:
        for _ in range(2):
            for start in range(0, len(request), part_bytes):
                connection.sendall(request[start : start + part_bytes])
            data = read_answer(connection)
            assert data.startswith(b"HTTP/1.1 200"), data
            assert data.count(b"HTTP/1.1 ") == data.count(b'"finish_reason":"length"') == 1
        connection.sendall(HEAD.replace(b"host: x\r\n", b"host: x\r\n" + OFFER) + HEAD)
        data = read_to_end(connection)
    assert data.count(b"HTTP/1.1 200") == 1, "the second one came before the answer to the first"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/batch"])
def test_a_stream_to_an_old_client_has_no_chunks_and_ends_with_the_connection(
    gateway: Gateway, path: str
) -> None:
    """Nginx has long spoken HTTP/1.0 to the servers behind it by default."""
    asked: dict[str, object] = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    asked = {"requests": [asked]} if path == "/v1/batch" else asked
    content = json.dumps(asked | {"stream": True}).encode()
    request = f"POST {path} HTTP/1.0\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    with connected(gateway) as connection:
        connection.sendall(request + content)
        head, _, body = read_to_end(connection).decode().partition("\r\n\r\n")
    assert "transfer-encoding" not in head
    assert "connection: close" in head
    lines = [line.removeprefix("data: ") for line in body.split("\n") if line]
    assert lines[-1] == "[DONE]" or path == "/v1/batch"
    parts = [json.loads(line) for line in lines if line != "[DONE]"]
    assert len(parts) > 1


def test_a_whole_answer_to_an_old_client_has_its_length_and_closes(gateway: Gateway) -> None:
    with connected(gateway) as connection:
        connection.sendall(completion(max_tokens=3).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}\r\n".encode() in head
    assert json.loads(body)["choices"][0]["finish_reason"] == "length"
