"""Measure what several samples of one prompt cost, beside as many requests with their seeds.

    python loadtests/samples_bench.py
    python loadtests/samples_bench.py --pairs 11 --prompts 512

The demo model behind a real Triton, with the prefix cache and without. One side is a request with
`n` = 4 and a seed s, the other four requests at once with the seeds s to s + 3; both stream. A pair
is one prompt, new and random, on either side in random order, each with a salt of its own, so that
nothing is found in the cache that the other side left there. Its ratio is that of the times from
sending to the last token of all samples, and both sides must have the same tokens. Blocks in use
are read from the metrics, in repetitions of their own, since reading them takes time; the peak is
the most that was seen.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from tqdm import tqdm

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia_client import AsyncClient
from command_line import add_output, make_parser, positive
from figures import ratio
from record import circumstances, output_stem, write_record
from report import markdown_table
from thresholds import verdict

NUM_SAMPLES = 4
PROMPTS = (64, 512, 900)
NEW_TOKENS = 60  # so that the last block of each is in use for twelve steps at least
FIRST_ID, END_ID = 1000, 4000  # ordinary tokens of the demo model
LEAST_RATIO = 1.0  # one request must not be slower than four
GROUP, SINGLES = "n", "requests"
SIDES = (GROUP, SINGLES)

_USED = re.compile(r'^charonia_kv_blocks{[^}]*state="used"[^}]*} (\S+)', re.MULTILINE)

Tokens = list[tuple[int, ...]]


@dataclass
class Cell:
    """Measurements of one length of prompt, with the prefix cache or without.

    Attributes:
        milliseconds: by side, pair by pair. num_blocks: by side, the peak.
        num_unlike: pairs whose tokens differ.
    """

    has_cache: bool
    num_prompt: int
    milliseconds: dict[str, list[float]] = field(default_factory=lambda: {one: [] for one in SIDES})
    num_blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))
    num_unlike: int = 0


class Asker:
    """Asks either side of one server, which is idle otherwise.

    Args:
        metrics: gets the page of this address, again and again.
        source: of prompts, seeds and orders.
    """

    def __init__(
        self,
        client: AsyncClient,
        metrics: httpx.AsyncClient,
        metrics_url: str,
        source: random.Random,
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._metrics_url = metrics_url
        self._source = source
        self._num_salts = 0

    async def measure(self, cell: Cell, num_pairs: int, num_peaks: int) -> None:
        """Measure one cell; the first pair does not count."""
        about = f"{cell.num_prompt} tokens, prefix cache {_switch(cell.has_cache)}"
        for index in tqdm(range(num_pairs + 1), desc=about, unit="pair"):
            found = await self._pair(cell.num_prompt)
            cell.num_unlike += found[GROUP][1] != found[SINGLES][1]
            if index:
                for side in SIDES:
                    cell.milliseconds[side].append(found[side][0])
        for side in SIDES:
            peaks = [await self._peak(side, cell.num_prompt) for _ in range(num_peaks)]
            cell.num_blocks[side] = max(peaks)

    async def _pair(self, num_prompt: int) -> dict[str, tuple[float, Tokens]]:
        """Milliseconds and tokens of each side."""
        prompt, seed = self._drawn(num_prompt)
        found = {}
        for side in self._source.sample(SIDES, len(SIDES)):
            started = time.perf_counter()
            tokens = await self._ask(side, prompt, seed)
            found[side] = 1000 * (time.perf_counter() - started), tokens
        return found

    async def _peak(self, side: str, num_prompt: int) -> int:
        """The most blocks that are seen in use while this side is asked."""
        answer = asyncio.create_task(self._ask(side, *self._drawn(num_prompt)))
        most = 0
        while not answer.done():
            page = (await self._metrics.get(self._metrics_url)).raise_for_status().text
            (used,) = _USED.findall(page)
            most = max(most, int(float(used)))
        await answer
        return most

    def _drawn(self, num_prompt: int) -> tuple[list[int], int]:
        """A prompt and a seed."""
        prompt = [self._source.randrange(FIRST_ID, END_ID) for _ in range(num_prompt)]
        return prompt, self._source.randrange(2**32)

    async def _ask(self, side: str, prompt: list[int], seed: int) -> Tokens:
        """The tokens of each sample, or of each request."""
        self._num_salts += 1
        salt = f"salt {self._num_salts}"
        if side == GROUP:
            return await self._stream(prompt, seed, salt, NUM_SAMPLES)
        seeds = range(seed, seed + NUM_SAMPLES)
        answers = await asyncio.gather(*(self._stream(prompt, one, salt, 1) for one in seeds))
        return [tokens for answer in answers for tokens in answer]

    async def _stream(self, prompt: list[int], seed: int, salt: str, num_samples: int) -> Tokens:
        tokens: Tokens = [()] * num_samples
        stream = self._client.stream(
            prompt,
            n=num_samples,
            seed=seed,
            temperature=1.0,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            cache_salt=salt,
            include=["token_ids"],
        )
        async with stream:
            async for chunk in stream:
                tokens[chunk.index] += chunk.token_ids
        return tokens


async def measure_all(
    server: TritonServer, cells: Sequence[Cell], options: argparse.Namespace
) -> None:
    """Measure these cells on a server of their kind."""
    async with AsyncClient(server.grpc_url) as client, httpx.AsyncClient() as metrics:
        asker = Asker(client, metrics, server.metrics_url, random.Random(options.seed))
        for cell in cells:
            await asker.measure(cell, options.pairs, options.peaks)


def report(cells: Sequence[Cell]) -> str:
    """All cells as a Markdown table."""
    header = ["prefix cache", "prompt", "tokens", "blocks, n = 4", "4 requests", "ratio"]
    header += ["p50 ms, n = 4", "4 requests", "times as fast", "interval", "bar", "verdict"]
    return markdown_table(header, [_row(cell) for cell in cells])


def _row(cell: Cell) -> list[str]:
    group, singles = (cell.milliseconds[side] for side in SIDES)
    faster = ratio(singles, group)
    blocks = [cell.num_blocks[side] for side in SIDES]
    return [
        _switch(cell.has_cache),
        str(cell.num_prompt),
        f"differ in {cell.num_unlike} pairs" if cell.num_unlike else "the same",
        *map(str, blocks),
        f"{blocks[0] / blocks[1]:.2f}",
        f"{statistics.median(group):.0f}",
        f"{statistics.median(singles):.0f}",
        f"{faster.median:.2f}",
        str(faster.interval or "too few pairs"),
        f"{LEAST_RATIO:g}",
        verdict(faster.interval, LEAST_RATIO),
    ]


def _switch(is_on: bool) -> str:
    return "on" if is_on else "off"


def main() -> None:
    """Measure as the command line says.

    Raises:
        SystemExit: the two sides had unlike tokens.
    """
    parser = make_parser(__doc__)
    parser.add_argument(
        "--prompts", type=positive, nargs="+", default=PROMPTS, metavar="N", help="tokens of each"
    )
    parser.add_argument("--pairs", type=positive, default=21, metavar="N", help="default: 21")
    parser.add_argument(
        "--peaks", type=positive, default=30, metavar="N", help="for blocks in use, default: 30"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and orders, default: 0")
    add_output(parser, "samples")
    options = parser.parse_args()
    stem = output_stem(options.output, "samples")
    about: dict[str, Any] = circumstances("samples_bench.py")
    cells = []
    for has_cache in (True, False):
        own = [Cell(has_cache, num_prompt) for num_prompt in options.prompts]
        setting = f"enable_prefix_caching={json.dumps(has_cache)}"
        with running_server(settings=(setting,)) as server:
            asyncio.run(measure_all(server, own, options))
        cells += own
    print(report(cells))
    found = about | {"seed": options.seed, "cells": [asdict(cell) for cell in cells]}
    print(f"\n{write_record(stem, found)}")
    if any(cell.num_unlike for cell in cells):
        raise SystemExit("the samples of a request are not what requests with their seeds give")


if __name__ == "__main__":
    main()
