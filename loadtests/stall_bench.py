"""Measure how long a stream stands still while another request's long prompt is computed.

    python loadtests/stall_bench.py                      # llama-135m, a prompt of 4,000 tokens
    python loadtests/stall_bench.py --target 30          # inter_token_target_ms, in place of auto

On a real server, with and without `inter_token_target_ms`: a request streams alone, and again with
long prompts sent beside it one after the other. What counts are the times between its tokens from
the sending of such a prompt to that one's first token.
"""

import argparse
import asyncio
import json
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

from charonia.launch.run import running_server
from checkpoint import SHAPES, make_checkpoint
from record import circumstances, output_stem
from report import markdown_table
from sides import Trace
from triton_side import complete

BAR = 2.0
SHAPE = "llama-135m"
STREAM_PROMPT = 32
MAX_TOKENS = 3000


@dataclass(frozen=True)
class Case:
    """What one setting gave: milliseconds between tokens, and until the prompts' first tokens.

    Attributes:
        alone_p50, alone_p99: of the stream alone. beside_*: beside a long prompt.
        ttft: median of the long prompts, in seconds.
    """

    target: str
    alone_p50: float
    alone_p99: float
    beside_p50: float
    beside_p99: float
    beside_most: float
    ttft: float

    @property
    def ratio(self) -> float:
        """Of the time between tokens beside a prompt and alone, at the 99th percentile."""
        return self.beside_p99 / self.alone_p99


async def measure(url: str, target: str, num_prompts: int, length: int, seed: int) -> Case:
    """Stream alone, and beside long prompts."""
    drawn = random.Random(seed)

    def prompt(num_tokens: int) -> list[int]:
        return [drawn.randrange(10, 1000) for _ in range(num_tokens)]

    async with grpc_aio.InferenceServerClient(url) as client:
        await client.is_server_live()
        await complete(client, prompt(length), 8, {}, 0.0)  # buffers and kernels are there
        alone, beside, ttfts = [], [], []
        for _ in tqdm(range(num_prompts), desc=target, unit="prompt"):
            started = time.perf_counter()
            trace = Trace()
            stream = asyncio.create_task(
                complete(client, prompt(STREAM_PROMPT), MAX_TOKENS, {}, started, trace)
            )
            await asyncio.sleep(1.5)
            sent = time.perf_counter() - started
            other = await complete(client, prompt(length), 1, {}, started)
            ttfts.append(other.arrivals[0] - sent)
            until = other.arrivals[0]
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
            gaps = [(after, after - before) for before, after in pairwise(trace.arrivals)]
            alone += [gap for at, gap in gaps if 0.3 < at < sent]
            beside += [gap for at, gap in gaps if sent < at <= until]
    quantiles = [
        1000 * value for part in (alone, beside) for value in np.percentile(part, (50, 99))
    ]
    return Case(target, *quantiles, 1000 * max(beside), float(np.median(ttfts)))


def run(settings: Sequence[str], target: str, options: argparse.Namespace) -> Case:
    """Measure one setting on a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config = SHAPES[SHAPE] | {"max_position_embeddings": 8192}
        model = make_checkpoint(config, Path(folder) / SHAPE)
        common = ("enable_prefix_caching=false", "num_gpu_blocks_override=1000")
        with running_server(model=model, settings=(*common, *settings)) as server:
            going = measure(server.grpc_url, target, options.prompts, options.length, 0)
            return asyncio.run(going)


def table(cases: Sequence[Case]) -> str:
    """The cases as Markdown."""
    header = ["target", "alone p50, ms", "p99", "beside p50", "p99", "longest", "ratio of p99"]
    return markdown_table(
        [*header, f"bar {BAR:g}", "TTFT of the prompt, s"],
        [
            [
                case.target,
                *(
                    f"{value:.1f}"
                    for value in (
                        case.alone_p50,
                        case.alone_p99,
                        case.beside_p50,
                        case.beside_p99,
                        case.beside_most,
                    )
                ),
                f"{case.ratio:.2f}",
                "met" if case.ratio <= BAR else "missed",
                f"{case.ttft:.2f}",
            ]
            for case in cases
        ],
    )


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="auto", metavar="MS", help="default: auto")
    parser.add_argument("--length", type=int, default=4000, metavar="N", help="default: 4000")
    parser.add_argument("--prompts", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument(
        "--output", type=Path, metavar="STEM", help="default: results/DATE-stall, beside this"
    )
    options = parser.parse_args()
    stem = output_stem(options.output, "stall")
    about = circumstances("stall_bench.py")
    setting = f"scheduler.inter_token_target_ms={options.target}"
    cases = [run((), "none", options), run((setting,), options.target, options)]
    print(table(cases))
    found = about | {"cases": [asdict(case) | {"ratio": case.ratio} for case in cases]}
    path = stem.with_name(f"{stem.name}.json")
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten: {path.name}")


if __name__ == "__main__":
    main()
