"""Servers that are none of charonia's."""

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from charonia_client import AsyncClient, Client, ServerError

BODY = b"no gzip"
ANSWER = b"\r\n".join(
    [
        b"HTTP/1.1 200 OK",
        b"Content-Type: text/event-stream",
        b"Content-Encoding: gzip",
        b"Content-Length: %d" % len(BODY),
        b"",
        BODY,
    ]
)


@pytest.fixture
def url() -> Iterator[str]:
    """A server whose one answer is not compressed as it says."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(2**16)
                connection.sendall(ANSWER)

        answering = threading.Thread(target=answer)
        answering.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        answering.join()


def test_an_answer_that_cannot_be_decompressed_is_the_servers_fault(url: str) -> None:
    with Client(url, protocol="http") as client, pytest.raises(ServerError, match="decompressing"):
        client.generate("a")


def test_asyncio_has_the_same_error(url: str) -> None:
    async def main() -> None:
        async with AsyncClient(url, protocol="http") as client:
            with pytest.raises(ServerError, match="decompressing"):
                await client.generate("a")

    asyncio.run(main())
