"""Readers of an answer: a slow one gets all of it, one that reads nothing is aborted.

Both over real sockets. The time that they take is skipped. What is kept for one that reads nothing
is counted between a real gateway and a real server.
"""

import asyncio
import contextlib
import fcntl
import socket
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from charonia.events import Log
from charonia.gateway.connections import UNSENT_BYTES, Connection, bounded
from charonia.gateway.observing import Metrics, Observed
from charonia.gateway.watching import PIECE_BYTES, Reply, Watch, Work
from charonia.launch.server.tritonserver import TritonServer
from support.counting_relay import counting_relay
from support.e2e import ENDLESS, scrape, wait_for, wait_idle
from support.gateway import posting, running_gateway

STALL_S = 60.0
SIOCOUTQNSD = 0x894B
"""Asks Linux for how many bytes of a connection it has taken and not sent."""
RECEIVE_BYTES = 2**15
BYTES_PER_STALL = 2**17
"""What a slow reader reads in the time after which one that reads nothing is aborted."""
ANSWER_BYTES = 2**23
"""More than the kernel takes from a process, if nothing bounds it."""
HELD_BYTES = 2**19
"""More than a gateway takes from a server for a reader that has stopped, see its README.md."""
PROBE_BYTES = 2**12
"""What a server may send meanwhile that is no answer."""
GENERATED = "charonia_generation_tokens_total"
COMPLETIONS = "/v1/completions"


@dataclass
class Exchange:
    """A request for a large answer.

    Attributes:
        client: its socket, of which nothing has been read. lines: of the log.
    """

    client: socket.socket
    server: uvicorn.Server
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    lines: list[str] = field(default_factory=list)
    _skipped_s: float = 0.0

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        real = loop.time
        loop.time = lambda: real() + self._skipped_s  # type: ignore[method-assign]

    def skip(self, seconds: float) -> None:
        """Let time pass on the event loop."""
        self._skipped_s += seconds

    async def wait_blocked(self) -> Connection:
        """Return the connection once it takes nothing more from the gateway."""
        while True:
            for connection in self.server.server_state.connections:
                assert isinstance(connection, Connection)
                if connection.flow.write_paused:
                    return connection
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def asking() -> AsyncGenerator[Exchange, None]:
    """A request to uvicorn as the gateway runs it."""

    async def run(body: bytes, reply: Reply) -> None:
        await reply.whole("x" * ANSWER_BYTES)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await Work(watch, run)(scope, receive, send)
        finally:
            exchange.ended.set()

    options: dict[str, Any] = {"max_body_bytes": 1, "max_held_bytes": 1, "max_requests": 1}
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        lines: list[str] = []
        watch = Watch(read_timeout_s=STALL_S, stall_timeout_s=STALL_S, log=lines.append, **options)
        log = Log(lines.append, lambda: "info")
        observed = Observed(app, Metrics(), log, frozenset(), STALL_S + 1.0)
        config = uvicorn.Config(observed, http=bounded(STALL_S), lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        exchange = Exchange(client, server, lines=lines)
        serving = asyncio.create_task(server._serve([listener]))
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, listener.getsockname())
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        try:
            yield exchange
        finally:
            client.close()
            server.should_exit = True
            await serving


def test_the_kernel_takes_little_more_than_it_can_send() -> None:
    async def main() -> int:
        async with asking() as exchange:
            connection = await exchange.wait_blocked()
            descriptor = connection.transport.get_extra_info("socket").fileno()
            answer = fcntl.ioctl(descriptor, SIOCOUTQNSD, bytes(4))
            return int.from_bytes(answer, sys.byteorder)

    assert asyncio.run(main()) < 4 * UNSENT_BYTES


def test_the_process_keeps_one_piece_and_the_next_one_waits() -> None:
    async def main() -> int:
        async with asking() as exchange:
            return (await exchange.wait_blocked()).transport.get_write_buffer_size()

    assert 0 < asyncio.run(main()) <= PIECE_BYTES


def test_a_stream_that_nobody_reads_stays_at_the_server_and_the_others_go_on(
    server: TritonServer, model: Path
) -> None:
    """An answer of megabytes: each token has twenty log-probabilities."""
    body = {"prompt": "x", "stream": True, "logprobs": 20, "ignore_eos": True}
    before = wait_idle(server)[GENERATED]

    def wait_tokens(count: int) -> None:
        wanted = before + count
        assert wait_for(lambda: scrape(server)[GENERATED], lambda found: found >= wanted) >= wanted

    with (
        counting_relay(server.grpc_url) as relay,
        running_gateway([relay.address], model, "--stall-timeout", "600") as gateway,
        posting(gateway, COMPLETIONS, {**body, "max_tokens": ENDLESS}, 4096) as connection,
    ):
        assert connection.recv(12) == b"HTTP/1.1 200"
        num_tokens, held = 1000, 0
        wait_tokens(num_tokens)
        while relay.num_bytes > held + PROBE_BYTES and num_tokens < 5000:  # all buffers fill
            held, num_tokens = relay.num_bytes, num_tokens + 200
            wait_tokens(num_tokens)
        wait_tokens(num_tokens + 1000)
        assert relay.num_bytes <= held + 2 * PROBE_BYTES
        print(f"{held} bytes have left the server")
        assert held <= HELD_BYTES
        reply = gateway.http.post(COMPLETIONS, json={**body, "max_tokens": 1000})
        assert reply.text.endswith("data: [DONE]\n\n")
        assert relay.num_bytes > held + 2 * HELD_BYTES, "so would be the other one"
    wait_idle(server)


def test_a_reader_that_is_slow_but_reads_is_not_aborted() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with asking() as exchange:
            await exchange.wait_blocked()
            num_read = 0
            while num_read < 3 * BYTES_PER_STALL:
                piece = await loop.sock_recv(exchange.client, 2**12)
                assert piece, exchange.lines
                num_read += len(piece)
                exchange.skip(STALL_S * len(piece) / BYTES_PER_STALL)
                await asyncio.sleep(0)  # whoever waits for that time notices
            assert not exchange.ended.is_set()

    asyncio.run(main())


def test_a_reader_that_reads_nothing_is_aborted() -> None:
    async def main() -> None:
        async with asking() as exchange:
            await exchange.wait_blocked()
            while not exchange.ended.is_set():
                exchange.skip(1.0)
                await asyncio.sleep(0)
            assert any("the client reads nothing" in line for line in exchange.lines)

    asyncio.run(main())
