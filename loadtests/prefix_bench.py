"""Measure what the prefix cache is worth behind a real Triton.

    python loadtests/prefix_bench.py
    python loadtests/prefix_bench.py --pairs 11 --prefix 256

The demo model, three questions. How much sooner does the first token of a request come when its
prefix is cached? A request with a new prefix is sent, and when it is answered another one with the
same prefix, both with an end of their own; that is a pair, and its ratio is that of the two times
to the first token, as tritonclient sees them on a stream that is open. And which share of their
prompts' tokens is found in conversations whose every turn sends all that was said before? And how
much sooner does the first token come of a prefix that another server has kept in a file, before
this one was started?
"""

import asyncio
import contextlib
import json
import queue
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tritonclient.grpc as triton_grpc
from tqdm import tqdm

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia_client import AsyncClient, Client
from command_line import add_output, make_parser, positive
from medians import median_interval
from record import circumstances, output_stem, write_record
from report import markdown_table
from thresholds import verdict
from triton_inputs import infer_input

LEAST_RATIO, NO_LOSS, LEAST_SHARE = 5.0, 1.0, 0.8
BLOCK_TOKENS = 16
OWN_TOKENS = 16
FIRST_ID, END_ID = 1000, 4000  # ordinary tokens of the demo model
TURNS, TURN_TOKENS = 8, 60
AT_ONCE = 4


@dataclass(frozen=True)
class Pair:
    """Milliseconds to the first token of a request whose prefix is new, and of one that has it too.

    Attributes:
        cached: tokens of the latter's prompt that were found.
    """

    cold_ms: float
    warm_ms: float
    cached: int


@dataclass(frozen=True)
class Conversation:
    """Tokens of all prompts of a conversation, and how many of them were found, turn by turn."""

    prompt: list[int]
    cached: list[int]


def _drawn(source: random.Random, num_tokens: int) -> list[int]:
    return [source.randrange(FIRST_ID, END_ID) for _ in range(num_tokens)]


class _Stream:
    """Requests for one token each, one after the other on one stream of tritonclient's."""

    def __init__(self, url: str) -> None:
        self._responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client = triton_grpc.InferenceServerClient(url)
        self._client.start_stream(lambda result, error: self._responses.put((result, error)))

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Milliseconds to the first token, and how many tokens of the prompt were cached."""
        parameters = json.dumps({"max_tokens": 1, "temperature": 0})
        inputs = [
            infer_input("input_ids", "INT32", prompt),
            infer_input("stream", "BOOL", [True]),
            infer_input("sampling_parameters", "BYTES", [parameters]),
            infer_input("return_timing", "BOOL", [True]),
        ]
        started = time.perf_counter()
        self._client.async_stream_infer("scheduler", inputs)
        result, error = self._responses.get(timeout=60)
        milliseconds = 1000 * (time.perf_counter() - started)
        if error is not None:
            raise error
        return milliseconds, json.loads(result.as_numpy("timing")[0])["cached_tokens"]

    def close(self) -> None:
        """Close the stream and its connection."""
        self._client.stop_stream()
        self._client.close()


def measure_pairs(url: str, num_pairs: int, num_prefix: int) -> list[Pair]:
    """Ask for one prefix after the other, each twice; the first pair does not count."""
    source = random.Random(0)
    pairs = []
    with contextlib.closing(_Stream(url)) as stream:
        for _ in tqdm(range(num_pairs + 1), desc="shared prefix", unit="pair"):
            prefix = _drawn(source, num_prefix)
            cold_ms, _ = stream.first_token(prefix + _drawn(source, OWN_TOKENS))
            warm_ms, cached = stream.first_token(prefix + _drawn(source, OWN_TOKENS))
            pairs.append(Pair(cold_ms, warm_ms, cached))
    return pairs[1:]


def measure_restart(num_pairs: int, num_prefix: int) -> list[Pair]:
    """Ask a server for prefixes, and the next one for these and for new ones, in turns."""
    source = random.Random(1)
    prefixes = [_drawn(source, num_prefix) for _ in range(num_pairs + 1)]
    with tempfile.TemporaryDirectory() as directory:
        settings = (f"kv_cache_path={json.dumps(directory)}",)
        with running_server(settings=settings) as server:
            with contextlib.closing(_Stream(server.grpc_url)) as stream:
                for prefix in tqdm(prefixes, desc="prefixes to keep", unit="prefix"):
                    for _ in range(2):  # what is hit is kept
                        stream.first_token(prefix + _drawn(source, OWN_TOKENS))
            _wait_saved(server, len(prefixes) * (num_prefix // BLOCK_TOKENS))
        pairs = []
        with (
            running_server(settings=settings) as server,
            contextlib.closing(_Stream(server.grpc_url)) as stream,
        ):
            for prefix in tqdm(prefixes, desc="after a restart", unit="pair"):
                cold_ms, _ = stream.first_token(_drawn(source, num_prefix + OWN_TOKENS))
                warm_ms, cached = stream.first_token(prefix + _drawn(source, OWN_TOKENS))
                pairs.append(Pair(cold_ms, warm_ms, cached))
    return pairs[1:]


def _wait_saved(server: TritonServer, num_blocks: int) -> None:
    """Raises TimeoutError where a server does not save so many blocks within a minute."""
    deadline = time.monotonic() + 60
    with Client(server.grpc_url, metrics_url=server.metrics_url) as client:
        while client.metrics().value("charonia_kv_blocks_saved_total") < num_blocks:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server has not saved {num_blocks} blocks")
            time.sleep(0.1)


async def converse(client: AsyncClient, seed: int) -> Conversation:
    """Have one conversation."""
    source = random.Random(seed)
    found = Conversation([], [])
    prompt: list[int] = []
    for _ in range(TURNS):
        prompt += _drawn(source, TURN_TOKENS)
        answer = await client.generate(
            prompt,
            max_tokens=TURN_TOKENS,
            ignore_eos=True,
            seed=seed,
            include=["token_ids", "timing"],
        )
        assert answer.timing is not None
        found.prompt.append(len(prompt))
        found.cached.append(answer.timing["cached_tokens"])
        prompt += answer.token_ids
    return found


async def measure_conversations(url: str, num: int) -> list[Conversation]:
    """Have some at once."""
    found: list[Conversation] = []
    async with AsyncClient(url) as client:
        for first in tqdm(range(0, num, AT_ONCE), desc="conversations", unit=f"{AT_ONCE} of them"):
            seeds = range(first + 1, min(first + AT_ONCE, num) + 1)
            found += await asyncio.gather(*(converse(client, seed) for seed in seeds))
    return found


def _row(name: str, pairs: Sequence[Pair], least: float) -> list[str]:
    ratios = [pair.cold_ms / pair.warm_ms for pair in pairs]
    interval = median_interval(ratios)
    return [
        name,
        f"{statistics.median(pair.cold_ms for pair in pairs):.1f}",
        f"{statistics.median(pair.warm_ms for pair in pairs):.1f}",
        str(min(pair.cached for pair in pairs)),
        f"{statistics.median(ratios):.2f}",
        str(interval),
        f"{least:g}",
        verdict(interval, least),
    ]


def report(
    pairs: Sequence[Pair], restarted: Sequence[Pair], conversations: Sequence[Conversation]
) -> str:
    """All answers as Markdown."""
    shares = [sum(one.cached) / sum(one.prompt) for one in conversations]
    by_turn = [
        sum(one.cached[turn] for one in conversations)
        / sum(one.prompt[turn] for one in conversations)
        for turn in range(TURNS)
    ]
    return "\n".join(
        [
            markdown_table(
                [
                    "prefix",
                    "TTFT cold p50, ms",
                    "warm p50, ms",
                    "tokens found",
                    "ratio",
                    "interval",
                    "bar",
                    "verdict",
                ],
                [
                    _row("in the KV cache", pairs, LEAST_RATIO),
                    _row("in a file, after a restart", restarted, NO_LOSS),
                ],
            ),
            "",
            markdown_table(
                ["conversations", "tokens found", "least", "bar", "by turn", "verdict"],
                [
                    [
                        str(len(conversations)),
                        f"{100 * statistics.mean(shares):.1f} %",
                        f"{100 * min(shares):.1f} %",
                        f"{100 * LEAST_SHARE:g} %",
                        ", ".join(f"{100 * share:.0f}" for share in by_turn),
                        "met" if min(shares) >= LEAST_SHARE else "missed",
                    ]
                ],
            ),
        ]
    )


def main() -> None:
    """Measure as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=positive, default=51, metavar="N", help="default: 51")
    parser.add_argument(
        "--prefix", type=positive, default=512, metavar="N", help="tokens, default: 512"
    )
    parser.add_argument(
        "--conversations", type=positive, default=20, metavar="N", help="default: 20"
    )
    add_output(parser, "prefix")
    options = parser.parse_args()
    stem = output_stem(options.output, "prefix")
    about = circumstances("prefix_bench.py")
    with running_server() as server:
        pairs = measure_pairs(server.grpc_url, options.pairs, options.prefix)
        going = measure_conversations(server.grpc_url, options.conversations)
        conversations = asyncio.run(going)
    restarted = measure_restart(options.pairs, options.prefix)
    print(report(pairs, restarted, conversations))
    found = about | {
        "pairs": [asdict(pair) for pair in pairs],
        "restarted": [asdict(pair) for pair in restarted],
        "conversations": [asdict(one) for one in conversations],
    }
    print(f"\n{write_record(stem, found)}")


if __name__ == "__main__":
    main()
