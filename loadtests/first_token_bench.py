"""Measure what a prompt's first token costs beside the engine's step, and where.

    python loadtests/first_token_bench.py                      # llama-135m, prompts of 128 tokens

On a real server one prompt after another is sent for one token. Their times are cut where the
scheduler hands a step to the engine and has its result. In turns with them, a model that does
nothing but sleep for as long as a step takes shows what Triton and the client take by themselves
(`floor/`). Then prompts are sent at once: how many of them the first step begins with, and what
the steps take in all.
"""

import argparse
import asyncio
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tritonclient.grpc.aio as grpc_aio
from tqdm import tqdm

from charonia.launch.server.discovery import default_repository
from charonia.launch.server.run import running_server
from charonia.traces import StepRecord, read_steps
from checkpoint import SHAPES, make_checkpoint
from command_line import add_output, make_parser, positive
from medians import median_interval
from paths import LOADTESTS
from record import circumstances, output_stem, write_record
from report import markdown_table
from triton_side import complete

SHAPE = "llama-135m"
FLOOR = "floor"
WARM_UP = 10


@dataclass(frozen=True)
class Sent:
    """Prompts that were sent at once. Times are in seconds of the monotonic clock."""

    sent_at: float
    received_at: float

    @property
    def ms(self) -> float:
        """Milliseconds from the first one's sending to the last one's token."""
        return 1000 * (self.received_at - self.sent_at)


@dataclass(frozen=True)
class Parts:
    """Parts of the time of one prompt, in milliseconds.

    Attributes:
        before: until its step is handed to the engine. engine: the step. beside: from there until
            the scheduler has the result, without the step. after: until the client has the token.
        floor: time of a request to the model that sleeps, without the sleep.
    """

    before: float
    engine: float
    beside: float
    after: float
    floor: float

    @property
    def front(self) -> float:
        """All but the step."""
        return self.before + self.beside + self.after


class Prompts:
    """Sends prompts of random tokens, for one token each."""

    def __init__(self, client: grpc_aio.InferenceServerClient, num_tokens: int) -> None:
        self._client = client
        self._drawn = random.Random(0)
        self._num_tokens = num_tokens

    async def send(self, model: str, count: int, parameters: dict[str, Any]) -> Sent:
        """Send some at once."""
        prompts = [
            [self._drawn.randrange(10, 1000) for _ in range(self._num_tokens)] for _ in range(count)
        ]
        sent_at, started = time.monotonic(), time.perf_counter()
        traces = await asyncio.gather(
            *(
                complete(self._client, prompt, 1, parameters, started, model=model)
                for prompt in prompts
            )
        )
        return Sent(sent_at, sent_at + max(trace.arrivals[-1] for trace in traces))


async def measure(
    url: str, options: argparse.Namespace
) -> tuple[list[tuple[Sent, float]], list[Sent]]:
    """Send prompts one by one, each with the floor's milliseconds, and then several at once."""
    alone = []
    async with grpc_aio.InferenceServerClient(url) as client:
        await client.is_server_live()
        prompts = Prompts(client, options.length)
        for _ in tqdm(range(WARM_UP + options.prompts), unit="prompt"):
            sent = await prompts.send("scheduler", 1, {})
            asleep_ms = 0.9 * sent.ms  # about as long as the step
            floor = await prompts.send(FLOOR, 1, {"sleep_s": asleep_ms / 1000})
            alone.append((sent, floor.ms - asleep_ms))
        num_waves = WARM_UP + options.prompts // 4
        together = [
            await prompts.send("scheduler", options.at_once, {})
            for _ in tqdm(range(num_waves), unit="wave")
        ]
    return alone[WARM_UP:], together[WARM_UP:]


def steps_of(sent: Sent, steps: Sequence[StepRecord]) -> list[StepRecord]:
    """The steps that computed for what was sent."""
    return [step for step in steps if sent.sent_at < step.submitted_at < sent.received_at]


def parts_of(sent: Sent, floor: float, steps: Sequence[StepRecord]) -> Parts:
    """Cut the time of a prompt; one step computed it."""
    (step,) = steps_of(sent, steps)
    seconds = (
        step.submitted_at - sent.sent_at,
        step.seconds,
        step.ended_at - step.submitted_at - step.seconds,
        sent.received_at - step.ended_at,
    )
    return Parts(*(1000 * each for each in seconds), floor)


def table(values: dict[str, Sequence[float]]) -> str:
    """Medians and their intervals as Markdown."""
    rows = [
        [name, f"{statistics.median(each):.2f} ({median_interval(each)})"]
        for name, each in values.items()
    ]
    return markdown_table(["", "median"], rows)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure on a server of its own; print tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_checkpoint(SHAPES[SHAPE], folder / SHAPE)
        repository = Path(shutil.copytree(default_repository(), folder / "repository"))
        shutil.copytree(LOADTESTS / FLOOR, repository / FLOOR)
        settings = (
            "dtype=bfloat16",
            "enable_prefix_caching=false",
            f"max_model_len={options.length + 1}",
            f"scheduler.record_dir={folder / 'record'}",
        )
        with running_server(model=model, source=repository, settings=settings) as server:
            alone, together = asyncio.run(measure(server.grpc_url, options))
        steps = [step for path in folder.glob("record/steps*") for step in read_steps(path)]
    parts = [parts_of(sent, floor, steps) for sent, floor in alone]
    waves = [(sent.ms, steps_of(sent, steps)) for sent in together]
    names = {
        "before": "until its step is handed to the engine, ms",
        "engine": "the step",
        "beside": "until the scheduler has the result, without the step",
        "after": "until the client has the token",
        "front": "all but the step",
        "floor": "all but the sleep, with a model that sleeps",
    }
    print("One prompt at a time:\n")
    print(table({text: [getattr(each, name) for each in parts] for name, text in names.items()}))
    print(f"\n{options.at_once} prompts at once:\n")
    print(
        table(
            {
                "until the last one's token, ms": [ms for ms, _ in waves],
                "steps": [len(each) for _, each in waves],
                "prompts in the first step": [each[0].num_rows for _, each in waves],
                "the first step, ms": [1000 * each[0].seconds for _, each in waves],
                "all steps, ms": [1000 * sum(step.seconds for step in each) for _, each in waves],
            }
        )
    )
    return {
        "one": [asdict(each) for each in parts],
        "at once": [
            {"ms": ms, "steps": [(step.num_rows, step.seconds) for step in each]}
            for ms, each in waves
        ],
    }


def main() -> None:
    """Measure as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument("--length", type=positive, default=128, metavar="N", help="default: 128")
    parser.add_argument("--prompts", type=positive, default=60, metavar="N", help="default: 60")
    parser.add_argument("--at-once", type=positive, default=8, metavar="N", help="default: 8")
    add_output(parser, "first-token")
    options = parser.parse_args()
    stem = output_stem(options.output, "first-token")
    found = circumstances("first_token_bench.py") | run(options)
    print(f"\n{write_record(stem, found)}")


if __name__ == "__main__":
    main()
