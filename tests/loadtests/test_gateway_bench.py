"""What the benchmark of the gateway says of its figures, and what its clients count."""

import asyncio
import subprocess
import sys

from gateway_bench import Burst, Turn, cpu_seconds, ratio, report
from gateway_side import ByteCounter, Streamed

TURNS = {
    "gateway": [Turn(12.0, 3.0), Turn(11.0, 2.0), Turn(10.0, 2.5)] * 2,
    "gRPC": [Turn(10.0, 2.0), Turn(10.0, 2.0), Turn(10.0, 2.0)] * 2,
}
BYTES = {"gateway": {"whole": 500.0, "streamed": 9000.0}, "gRPC": {"whole": 700.0, "streamed": 8e3}}


def bursts(p99_ms: float) -> dict[str, list[Burst]]:
    cpu_ms = {"tritonserver": 0.75, "gateway": 1.0}
    return {"gateway": [Burst(800.0, 20.0, p99_ms, cpu_ms)], "gRPC": [Burst(1600.0, 10.0, 30.0)]}


def test_a_ratio_is_that_of_each_turn() -> None:
    found = ratio(TURNS, "ttft_ms")
    assert (found.median, found.lowest, found.highest) == (1.1, 1.0, 1.2)
    text = report({8: TURNS}, bursts(40.0), BYTES, 1000)
    assert "| 8 | TTFT | 11.00 | 10.00 | 1.10 (1.00 to 1.20) |" in text
    assert "| 8 | time between tokens | 2.50 | 2.00 | 1.25 (1.00 to 1.50) |" in text
    assert "| gRPC | 700 | 8,000 |" in text
    assert "| tritonserver | 0.75 | 0.00 |" in text


def test_processes_are_called_by_what_they_run() -> None:
    command = [sys.executable, "-c", "input()", "/repository/asleep/1/model.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert {"clients", "asleep"} <= cpu_seconds().keys()
        process.communicate(b"\n")
    assert "asleep" not in cpu_seconds()


def test_a_p99_above_the_goal_is_a_miss() -> None:
    assert "is **met**" in report({8: TURNS}, bursts(50.0), BYTES, 1000)
    assert "is **missed**" in report({8: TURNS}, bursts(50.1), BYTES, 1000)


def test_times_of_a_stream_are_in_milliseconds_per_token() -> None:
    stream = Streamed(sent_at=1.0, first_at=1.25, last_at=2.25, num_tokens=5)
    assert (stream.ttft_ms, stream.inter_token_ms) == (250.0, 250.0)


def test_bytes_are_counted_in_both_directions() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(2 * await reader.readexactly(3))
        await writer.drain()
        writer.close()

    async def ask() -> tuple[bytes, int]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, ByteCounter(f"127.0.0.1:{port}") as counter:
            reader, writer = await asyncio.open_connection(*counter.address.split(":"))
            writer.write(b"abc")
            got = await reader.read()
            writer.close()
            return got, counter.num_bytes

    assert asyncio.run(ask()) == (b"abcabc", 9)
