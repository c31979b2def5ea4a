"""A line to a server that a test can hold back: its connections stay open, and nothing passes.

Owns the endpoint. Must not know the protocol.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator


@contextlib.asynccontextmanager
async def held_back(url: str) -> AsyncGenerator[tuple[str, asyncio.Event], None]:
    """An endpoint that leads to another one, `host:port`, while the event is set.

    What comes before that is kept.
    """
    passes = asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while data := await reader.read(2**16):
                await passes.wait()
                writer.write(data)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = url.rpartition(":")
        to_server, from_server = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, from_server), pump(to_server, writer))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        try:
            yield f"127.0.0.1:{port}", passes
        finally:
            passes.set()
