"""Measure what a gateway costs: OpenAI's API through it beside gRPC to the same server.

    python loadtests/gateway_bench.py                        # the demo model
    python loadtests/gateway_bench.py --streams 1 32 --repetitions 9

Three questions, each answered in turns in one run. How much later do the first token and the others
come through the gateway, with so many streams at once? How many requests per second does it
answer, how long do these take, and which processes compute for them, with an engine that answers at
once (every request is for an answer that the scheduler keeps)? And how many bytes does a request
cost each way?

Server, gateway and clients share the machine's cores.
"""

import argparse
import asyncio
import contextlib
import random
import re
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from tqdm import tqdm

from charonia.config import DEMO_CHECKPOINT
from charonia.launch.server.gateway_process import GatewayProcess
from charonia.launch.server.run import running_server
from command_line import add_output, make_parser, positive
from figures import Ratio
from gateway_side import ByteCounter, GrpcSide, HttpSide, Side, Streamed
from medians import median_interval
from record import circumstances, output_stem, write_record
from report import markdown_table

P99_GOAL_MS = 50.0
FIRST_ID, END_ID = 1000, 4000  # ordinary tokens of the demo model
PROMPT_TOKENS = 16
READY_S = 60.0
NUM_COUNTED = 20
"""Requests whose bytes are counted."""
WAYS = ("gateway", "gRPC")
_MODEL = re.compile(r"/([^/]+)/\d+/model\.py$")


@dataclass(frozen=True)
class Addresses:
    """Address of a server for gRPC, and of a gateway for HTTP, as `host:port`."""

    grpc: str
    http: str

    def of(self, way: str) -> str:
        """The address of one way."""
        return self.http if way == "gateway" else self.grpc


@dataclass(frozen=True)
class Turn:
    """Medians over the streams of one turn, in milliseconds."""

    ttft_ms: float
    inter_token_ms: float

    @classmethod
    def of(cls, streams: Sequence[Streamed]) -> "Turn":
        """The medians of some streams."""
        return cls(
            statistics.median(one.ttft_ms for one in streams),
            statistics.median(one.inter_token_ms for one in streams),
        )


@dataclass(frozen=True)
class Burst:
    """Requests for answers that are there: their rate, and their times in milliseconds.

    Attributes:
        cpu_ms: that each process computed for a request, all its threads together.
    """

    per_second: float
    p50_ms: float
    p99_ms: float
    cpu_ms: Mapping[str, float] = field(default_factory=dict)


def several(text: str) -> int:
    """A whole number above 1."""
    if (value := positive(text)) < 2:
        raise ValueError
    return value


@contextlib.asynccontextmanager
async def opened(way: str, address: str, count: int) -> AsyncIterator[list[Side]]:
    """Connect `count` sides: connections to the gateway, or one channel of gRPC for all.

    They are not kept from turn to turn: the gateway closes what is idle for five seconds.
    """
    sides: list[Side] = [GrpcSide(address)]
    if way == "gateway":
        sides = [HttpSide(address) for _ in range(count)]
    try:
        await asyncio.gather(*(side.connect() for side in sides))
        yield sides if way == "gateway" else sides * count
    finally:
        await asyncio.gather(*(side.close() for side in sides))


class Measurement:
    """Requests of a run, sent in both ways.

    Args:
        num_tokens: length of each completion.
    """

    def __init__(self, addresses: Addresses, num_tokens: int) -> None:
        self._addresses = addresses
        self._num_tokens = num_tokens
        self._drawn = random.Random(0)

    def _prompt(self) -> list[int]:
        return [self._drawn.randrange(FIRST_ID, END_ID) for _ in range(PROMPT_TOKENS)]

    async def streams(self, count: int, repetitions: int) -> dict[str, list[Turn]]:
        """Stream `count` answers at once, the ways in turns; the first repetition is left out."""
        turns: dict[str, list[Turn]] = {way: [] for way in WAYS}
        for _ in tqdm(range(1 + repetitions), desc=f"{count} streams", unit="repetition"):
            for way in self._drawn.sample(WAYS, len(WAYS)):
                async with opened(way, self._addresses.of(way), count) as sides:
                    # No prompt comes twice: the scheduler keeps answers.
                    calls = [side.stream(self._prompt(), self._num_tokens) for side in sides]
                    turns[way].append(Turn.of(await asyncio.gather(*calls)))
        return {way: found[1:] for way, found in turns.items()}

    async def bursts(self, at_once: int, repetitions: int) -> dict[str, list[Burst]]:
        """Requests for one answer that the scheduler has, so many at once, the ways in turns."""
        bursts: dict[str, list[Burst]] = {way: [] for way in WAYS}
        prompt = self._prompt()
        async with opened("gRPC", self._addresses.grpc, 1) as (side,):
            expected = await side.whole(prompt, self._num_tokens)
        for _ in tqdm(range(1 + repetitions), desc=f"{at_once} requests", unit="repetition"):
            for way in self._drawn.sample(WAYS, len(WAYS)):
                async with opened(way, self._addresses.of(way), at_once) as sides:
                    bursts[way].append(await self._burst(sides, prompt, expected))
        return {way: found[1:] for way, found in bursts.items()}

    async def _burst(self, sides: Sequence[Side], prompt: Sequence[int], expected: str) -> Burst:
        async def timed(side: Side) -> float:
            sent_at = time.perf_counter()
            assert await side.whole(prompt, self._num_tokens) == expected
            return 1000 * (time.perf_counter() - sent_at)

        computed, started = cpu_seconds(), time.perf_counter()
        times = await asyncio.gather(*map(timed, sides))
        seconds = time.perf_counter() - started
        cpu_ms = {
            name: 1000 * (after - computed.get(name, 0.0)) / len(times)
            for name, after in cpu_seconds().items()
        }
        quantiles = statistics.quantiles(times, n=100, method="inclusive")
        return Burst(len(times) / seconds, quantiles[49], quantiles[98], cpu_ms)

    async def bytes_per_request(self) -> dict[str, dict[str, float]]:
        """Bytes of a request and its answer, whole and streamed, on a connection in use."""
        found: dict[str, dict[str, float]] = {}
        for way in WAYS:
            async with (
                ByteCounter(self._addresses.of(way)) as counter,
                opened(way, counter.address, 1) as (side,),
            ):
                await side.whole(self._prompt(), self._num_tokens)
                start = counter.num_bytes
                for _ in range(NUM_COUNTED):
                    await side.whole(self._prompt(), self._num_tokens)
                middle = counter.num_bytes
                for _ in range(NUM_COUNTED):
                    await side.stream(self._prompt(), self._num_tokens)
                found[way] = {
                    "whole": (middle - start) / NUM_COUNTED,
                    "streamed": (counter.num_bytes - middle) / NUM_COUNTED,
                }
        return found


def cpu_seconds() -> dict[str, float]:
    """The CPU time of this process and of all that it started, by name; models by theirs."""
    found: defaultdict[str, float] = defaultdict(float)
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            name = "clients" if process == this else _name_of(process.cmdline())
            found[name] += times.user + times.system
    return dict(found)


def _name_of(command: Sequence[str]) -> str:
    models = [match[1] for part in command if (match := _MODEL.search(part))]
    if models:
        return models[0]
    return "gateway" if "gateway" in command else Path(command[0]).name if command else "ended"


def ratio(found: dict[str, list[Any]], name: str) -> Ratio:
    """The gateway's over gRPC's, turn by turn."""
    pairs = zip(found["gateway"], found["gRPC"], strict=True)
    ratios = [getattr(ours, name) / getattr(theirs, name) for ours, theirs in pairs]
    return Ratio(statistics.median(ratios), median_interval(ratios), min(ratios), max(ratios))


def _median(values: Sequence[Any], name: str) -> str:
    return f"{statistics.median(getattr(one, name) for one in values):,.2f}"


def _cpu_ms(bursts: Sequence[Burst], name: str) -> str:
    return f"{statistics.median(one.cpu_ms.get(name, 0.0) for one in bursts):.2f}"


def report(
    streams: dict[int, dict[str, list[Turn]]],
    bursts: dict[str, list[Burst]],
    num_bytes: dict[str, dict[str, float]],
    at_once: int,
) -> str:
    """All answers as Markdown."""
    rows = []
    for count, turns in streams.items():
        for title, name in (("TTFT", "ttft_ms"), ("time between tokens", "inter_token_ms")):
            medians = [_median(turns[way], name) for way in WAYS]
            rows.append([str(count), title, *medians, str(ratio(turns, name))])
    head = ["streams", "median of", "gateway, ms", "gRPC, ms", "gateway / gRPC"]
    parts = [markdown_table(head, rows)]

    rows = [
        [way, *(_median(bursts[way], name) for name in ("per_second", "p50_ms", "p99_ms"))]
        for way in WAYS
    ]
    p99_ms = statistics.median(one.p99_ms for one in bursts["gateway"])
    is_met = "met" if p99_ms <= P99_GOAL_MS else "missed"
    parts.append(
        markdown_table([f"{at_once:,} at once", "requests/s", "p50, ms", "p99, ms"], rows)
        + f"\n\nThe goal for the gateway's p99, {P99_GOAL_MS:g} ms, is **{is_met}**."
    )
    names = sorted({name for way in WAYS for one in bursts[way] for name in one.cpu_ms})
    rows = [[name, *(_cpu_ms(bursts[way], name) for way in WAYS)] for name in names]
    parts.append(markdown_table(["CPU time of a request, ms", *WAYS], rows))
    rows = [
        [way, *(f"{num_bytes[way][kind]:,.0f}" for kind in ("whole", "streamed"))] for way in WAYS
    ]
    parts.append(markdown_table(["bytes of a request and its answer", "whole", "streamed"], rows))
    return "\n\n".join(parts) + "\n"


@contextlib.contextmanager
def running(options: argparse.Namespace) -> Iterator[Addresses]:
    """A server of the demo model that keeps answers, and a gateway in front of it."""
    settings = (f"max_num_seqs={max(options.streams)}", f"scheduler.answer_cache_bytes={2**26}")
    with running_server(settings=settings) as server:
        gateway = GatewayProcess(
            server.grpc_url,
            DEMO_CHECKPOINT,
            ["demo"],
            address="127.0.0.1",
            port=0,
            drain_s=0.0,
            log=lambda line: None,
        )
        with gateway:
            _wait_ready(gateway.url)
            yield Addresses(server.grpc_url, gateway.url.removeprefix("http://"))


def _wait_ready(url: str) -> None:
    """Raises TimeoutError where a gateway is not ready within a minute."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health/ready").is_success:
                return
        time.sleep(0.1)
    raise TimeoutError(f"the gateway is not ready after {READY_S:g} s")


async def measure(addresses: Addresses, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all; print the tables."""
    measurement = Measurement(addresses, options.tokens)
    streams = {
        count: await measurement.streams(count, options.repetitions) for count in options.streams
    }
    bursts = await measurement.bursts(options.at_once, options.repetitions)
    num_bytes = await measurement.bytes_per_request()
    print("\n" + (text := report(streams, bursts, num_bytes, options.at_once)))
    return {
        "table": text,
        "streams": {
            count: {way: [asdict(one) for one in found] for way, found in turns.items()}
            for count, turns in streams.items()
        },
        "bursts": {way: [asdict(one) for one in found] for way, found in bursts.items()},
        "bytes": num_bytes,
    }


def main() -> None:
    """Measure as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--streams",
        type=positive,
        nargs="+",
        default=[1, 8, 32, 256],
        metavar="N",
        help="streams at once (default: 1 8 32 256)",
    )
    parser.add_argument(
        "--at-once", type=several, default=1000, metavar="N", help="requests (default: 1000)"
    )
    parser.add_argument(
        "--tokens", type=several, default=64, metavar="N", help="of an answer (default: 64)"
    )
    parser.add_argument(
        "--repetitions", type=positive, default=9, metavar="N", help="counted ones (default: 9)"
    )
    add_output(parser, "gateway", "md")
    options = parser.parse_args()
    stem = output_stem(options.output, "gateway")
    with running(options) as addresses:
        found = asyncio.run(measure(addresses, options))
    table = found.pop("table")
    record = circumstances("gateway_bench.py") | found
    print(write_record(stem, record, table=table))


if __name__ == "__main__":
    main()
