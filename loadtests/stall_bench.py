"""Measure how long streams stand still while another request's long prompt is computed.

    python loadtests/stall_bench.py                      # llama-135m, a prompt of 4,000 tokens
    python loadtests/stall_bench.py --target 30          # inter_token_target_ms, in place of auto
    python loadtests/stall_bench.py --streams 8 --chunks 128 256 512 2048    # steps of fixed size

On a real server, with and without `inter_token_target_ms`, or with chunks of fixed sizes: requests
stream by themselves, and again with long prompts sent beside them one after the other. What counts
are the times between their tokens from the sending of such a prompt to that one's first token.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import tritonclient.grpc.aio as grpc_aio
from tqdm import tqdm

from charonia.launch.server.run import running_server
from checkpoint import SHAPES, make_checkpoint
from command_line import add_output, make_parser, positive
from record import circumstances, output_stem, write_record
from report import markdown_table
from systems_under_test import SideError, Trace
from triton_side import complete

BAR = 2.0
SHAPE = "llama-135m"
STREAM_PROMPT = 32
MAX_TOKENS = 3000
MAX_LENGTH = 32768
ALONE_S = 1.5
"""Seconds for which streams are by themselves before a prompt is sent, from when all have begun."""


@dataclass(frozen=True)
class Case:
    """Results of one setting: milliseconds between tokens, and until the prompts' first tokens.

    Attributes:
        setting: name for people.
        alone_p50, alone_p99: of the streams by themselves. beside_*: beside a long prompt.
        ttft: median of the long prompts, in seconds.
        beside_rate: tokens per second of all streams beside a long prompt.
    """

    setting: str
    alone_p50: float
    alone_p99: float
    beside_p50: float
    beside_p99: float
    beside_most: float
    ttft: float
    beside_rate: float

    @property
    def ratio(self) -> float:
        """Ratio of the times between tokens beside a prompt and alone, at the 99th percentile."""
        return self.beside_p99 / self.alone_p99


async def wait_until_begun(streams: Sequence[asyncio.Task[Trace]], traces: Sequence[Trace]) -> None:
    """Wait for the first token of every stream.

    Args:
        traces: what each of the streams notes its tokens in.

    Raises:
        Exception: whatever a stream failed with.
        SideError: a stream ended without a token.
    """
    while not all(trace.arrivals for trace in traces):
        raise_failure(streams)
        if any(stream.done() and not stream.result().arrivals for stream in streams):
            raise SideError("a stream ended without a token")
        await asyncio.sleep(0.01)


def raise_failure(streams: Sequence[asyncio.Task[Trace]]) -> None:
    """Raise what a stream failed with, if one did."""
    for stream in streams:
        if stream.done():
            stream.result()


async def measure(url: str, setting: str, options: argparse.Namespace) -> Case:
    """Stream alone, and beside long prompts."""
    drawn = random.Random(0)

    def prompt(num_tokens: int) -> list[int]:
        return [drawn.randrange(10, 1000) for _ in range(num_tokens)]

    async with grpc_aio.InferenceServerClient(url) as client:
        await client.is_server_live()
        await complete(client, prompt(options.length), 8, {}, 0.0)  # buffers and kernels are there
        alone, beside, ttfts, num_beside = [], [], [], 0
        for _ in tqdm(range(options.prompts), desc=setting, unit="prompt"):
            started = time.perf_counter()
            traces = [Trace() for _ in range(options.streams)]
            streams = [
                asyncio.create_task(
                    complete(client, prompt(STREAM_PROMPT), MAX_TOKENS, {}, started, trace)
                )
                for trace in traces
            ]
            await wait_until_begun(streams, traces)
            begun = time.perf_counter() - started
            await asyncio.sleep(ALONE_S)
            sent = time.perf_counter() - started
            other = await complete(client, prompt(options.length), 1, {}, started)
            until = other.arrivals[0]
            ttfts.append(until - sent)
            raise_failure(streams)
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            gaps = [gap for trace in traces for gap in pairwise(trace.arrivals)]
            alone += [after - before for before, after in gaps if begun <= before and after < sent]
            beside += [after - before for before, after in gaps if sent < after and before < until]
            num_beside += sum(sent < after <= until for _, after in gaps)
    quantiles = [
        1000 * value for part in (alone, beside) for value in np.percentile(part, (50, 99))
    ]
    rate = num_beside / sum(ttfts)
    return Case(setting, *quantiles, 1000 * max(beside), float(np.median(ttfts)), rate)


def run(setting: str, values: Sequence[str], options: argparse.Namespace) -> Case:
    """Measure one setting on a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config = SHAPES[SHAPE] | {"max_position_embeddings": MAX_LENGTH}
        model = make_checkpoint(config, Path(folder) / SHAPE)
        num_tokens = options.length + 8 + options.streams * (STREAM_PROMPT + MAX_TOKENS)
        num_blocks = 2 + num_tokens // 16 + options.streams
        common = ("enable_prefix_caching=false", f"num_gpu_blocks_override={num_blocks}")
        with running_server(model=model, settings=(*common, *values)) as server:
            return asyncio.run(measure(server.grpc_url, setting, options))


def settings_of(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Return the settings of the server that are compared, by name for people."""
    if options.chunks:
        return {
            f"chunks of {size:,}": (f"max_num_batched_tokens={size + options.streams}",)
            for size in options.chunks
        }
    target = f"scheduler.inter_token_target_ms={options.target}"
    return {"no target": (), f"target {options.target}": (target,)}


def table(cases: Sequence[Case], *, with_bar: bool) -> str:
    """The cases as Markdown; chunks of fixed sizes have no bar."""
    header = ["setting", "alone p50, ms", "p99", "beside p50", "p99", "longest"]
    header += ["ratio of p99", f"bar {BAR:g}"] if with_bar else []
    rows = []
    for case in cases:
        times = (
            case.alone_p50,
            case.alone_p99,
            case.beside_p50,
            case.beside_p99,
            case.beside_most,
        )
        row = [case.setting, *(f"{value:.1f}" for value in times)]
        if with_bar:
            row += [f"{case.ratio:.2f}", "met" if case.ratio <= BAR else "missed"]
        rows.append([*row, f"{case.ttft:.2f}", f"{case.beside_rate:.1f}"])
    header += ["TTFT of the prompt, s", "tok/s of the streams beside it"]
    return markdown_table(header, rows)


def main() -> None:
    """Measure as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--length", type=positive, default=4000, metavar="N", help="tokens of a prompt (4000)"
    )
    parser.add_argument("--prompts", type=positive, default=5, metavar="N", help="default: 5")
    parser.add_argument("--streams", type=positive, default=1, metavar="N", help="default: 1")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--target", default="auto", metavar="MS", help="default: auto")
    kind.add_argument(
        "--chunks",
        type=positive,
        nargs="+",
        metavar="N",
        help="prompt tokens of a step, in place of a target",
    )
    add_output(parser, "stall or DATE-chunks")
    options = parser.parse_args()
    if options.length > MAX_LENGTH - 8:  # the first one is answered with 8 tokens
        parser.error(f"--length: {options.length} is more than {MAX_LENGTH - 8}")
    stem = output_stem(options.output, "chunks" if options.chunks else "stall")
    about = circumstances("stall_bench.py")
    cases = [run(name, values, options) for name, values in settings_of(options).items()]
    print(table(cases, with_bar=not options.chunks))
    found = about | {"cases": [asdict(case) | {"ratio": case.ratio} for case in cases]}
    print(f"\n{write_record(stem, found)}")


if __name__ == "__main__":
    main()
