"""Lines to a server that a test can hold back, or cut.

Owns the endpoints. Must not know the protocol.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

Pump = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
"""Passes on what one side says to the other one."""


@contextlib.asynccontextmanager
async def held_back(url: str) -> AsyncGenerator[tuple[str, asyncio.Event], None]:
    """An endpoint that leads to another one, `host:port`, while the event is set.

    Otherwise its connections stay open, and nothing passes. What comes before that is kept.
    """
    passes = asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while data := await reader.read(2**16):
                await passes.wait()
                writer.write(data)

    async with _leading_to(url, pump) as own:
        try:
            yield own, passes
        finally:
            passes.set()


@contextlib.asynccontextmanager
async def severable(url: str) -> AsyncGenerator[tuple[str, Callable[[], None]], None]:
    """An endpoint that leads to another one, `host:port`, and what cuts its connections."""
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while data := await reader.read(2**16):
                writer.write(data)

    def cut() -> None:
        for writer in writers:
            writer.transport.abort()

    async with _leading_to(url, pump) as own:
        try:
            yield own, cut
        finally:
            cut()


@contextlib.asynccontextmanager
async def _leading_to(url: str, pump: Pump) -> AsyncGenerator[str, None]:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = url.rpartition(":")
        to_server, from_server = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, from_server), pump(to_server, writer))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        yield f"127.0.0.1:{port}"
