"""The two ways to a server that are compared: through a gateway by HTTP, and by gRPC.

Owns how a request is sent each way, when its pieces arrive, and how many bytes pass. Must not know
what is reported.

The HTTP client speaks only as much HTTP as the gateway answers with, so that little of what is
measured is the client's own work.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from charonia_client import AsyncClient


@dataclass(frozen=True)
class Streamed:
    """One stream. Times in seconds of `time.perf_counter`."""

    sent_at: float
    first_at: float
    last_at: float
    num_tokens: int

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return 1000 * (self.first_at - self.sent_at)

    @property
    def inter_token_ms(self) -> float:
        """Mean time between its tokens."""
        return 1000 * (self.last_at - self.first_at) / (self.num_tokens - 1)


class Side(Protocol):
    """A way to a server, for one request at a time."""

    async def connect(self) -> None:
        """Open the connection."""
        ...

    async def stream(self, prompt: Sequence[int], num_tokens: int) -> Streamed:
        """Stream a greedy completion of exactly so many tokens."""
        ...

    async def whole(self, prompt: Sequence[int], num_tokens: int) -> str:
        """Complete a prompt greedily, in one piece; the text."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class GrpcSide:
    """A connection by gRPC, by charonia's own client; many requests may use it at once."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address)

    async def connect(self) -> None:
        """See `Side`."""
        await self._client.probe()

    async def stream(self, prompt: Sequence[int], num_tokens: int) -> Streamed:
        """See `Side`."""
        sent_at = time.perf_counter()
        stream = self._client.stream(prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True)
        async with stream as chunks:
            arrivals = [time.perf_counter() async for _ in chunks]
        return Streamed(sent_at, arrivals[0], arrivals[-1], num_tokens)

    async def whole(self, prompt: Sequence[int], num_tokens: int) -> str:
        """See `Side`."""
        answer = await self._client.generate(
            prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True
        )
        return answer.text

    async def close(self) -> None:
        """See `Side`."""
        await self._client.close()


class HttpSide:
    """A connection to a gateway, kept alive between requests.

    Raises:
        RuntimeError: it answered with an error.
    """

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> None:
        """See `Side`."""
        self._streams = await asyncio.open_connection(self._host, self._port)

    async def stream(self, prompt: Sequence[int], num_tokens: int) -> Streamed:
        """See `Side`."""
        sent_at = time.perf_counter()
        events = self._events({"prompt": list(prompt), "max_tokens": num_tokens})
        arrivals = [time.perf_counter() async for _ in events]
        return Streamed(sent_at, arrivals[0], arrivals[-1], num_tokens)

    async def whole(self, prompt: Sequence[int], num_tokens: int) -> str:
        """See `Side`."""
        reader, headers = await self._send({"prompt": list(prompt), "max_tokens": num_tokens})
        body = await reader.readexactly(int(headers["content-length"]))
        text = json.loads(body)["choices"][0]["text"]
        assert isinstance(text, str)
        return text

    async def close(self) -> None:
        """See `Side`."""
        if self._streams is not None:
            self._streams[1].close()
            with contextlib.suppress(OSError):
                await self._streams[1].wait_closed()

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """The events of a stream that have text; each arrives as a chunk of HTTP/1.1."""
        reader, _ = await self._send({**body, "stream": True})
        while size := int(await reader.readline(), 16):
            data = await reader.readexactly(size + 2)
            if not data.startswith(b"data: [DONE]"):
                yield data
        await reader.readline()

    async def _send(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, dict[str, str]]:
        assert self._streams is not None, "it is not connected"
        reader, writer = self._streams
        content = json.dumps({**body, "temperature": 0, "ignore_eos": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.partition(": ") for line in lines[1:] if line)
        headers = {name.lower(): value for name, _, value in pairs}
        if " 200 " not in lines[0]:
            raise RuntimeError(f"the gateway answered {lines[0]}")
        return reader, headers


class ByteCounter:
    """Passes the bytes of connections on to a server, and counts them. A context manager.

    Args:
        address: of the server, `host:port`.

    Attributes:
        num_bytes: passed in both directions so far.
    """

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self.num_bytes = 0
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "ByteCounter":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.gather(*self._connections)  # their clients have closed them

    @property
    def address(self) -> str:
        """Address on which it listens, `host:port`."""
        port = self._server.sockets[0].getsockname()[1]
        return f"127.0.0.1:{port}"

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._relay(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._host, self._port)
        await asyncio.gather(self._pass(reader, there[1]), self._pass(there[0], writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                self.num_bytes += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()
