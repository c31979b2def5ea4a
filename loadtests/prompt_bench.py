"""Measure what grows with a prompt's length: time beside the model's steps, and memory.

    python loadtests/prompt_bench.py                             # 8,192, 32,768 and 131,072 tokens
    python loadtests/prompt_bench.py --lengths 4096 --repetitions 1

A small model of random weights is served by a real server, without a prefix cache, so that little
is left of a prompt's time but what the product of all its tokens takes. Each prompt is sent as text
and as token ids, and once more as token ids with a log-probability for each of its tokens. Time is
cut into what steps take and what is beside them, and what each process computes is recorded, too.
Memory is the peak of each process while it had the prompt, over what it had before; allocators keep
what the first prompt of a length has taken, so the most of all repetitions counts.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import tritonclient.grpc.aio as grpc_aio
from tokenizers import Tokenizer
from tqdm import tqdm

from charonia.config import DEMO_CHECKPOINT
from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia.traces import StepRecord, read_steps
from checkpoint import SHAPES, make_checkpoint
from command_line import add_output, make_parser, positive
from faults.footprint import ranks_of
from record import circumstances, output_stem, write_record
from report import markdown_table
from triton_inputs import infer_input

LENGTHS = (8192, 32768, 131072)
WARM_UP = 512
ROLES = ("tritonserver", "scheduler", "engine")
WAYS = ("token ids", "text", "token ids, log-probabilities")
MODEL: dict[str, Any] = SHAPES["llama-135m"] | {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 4096,
}
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One prompt.

    Attributes:
        length: tokens that it was to have. num_tokens: that the server counted.
        total_s: until its answer of one token has ended.
        steps_s: of these, in steps of the engine.
        peaks: MiB that each process had at most, more than before.
        computed_s: processor time of each process.
    """

    way: str
    length: int
    num_tokens: int
    total_s: float
    steps_s: float
    peaks: dict[str, float]
    computed_s: dict[str, float]

    @property
    def beside_us(self) -> float:
        """Microseconds per token beside the steps."""
        return 1e6 * (self.total_s - self.steps_s) / self.num_tokens


@dataclass(frozen=True)
class Sent:
    """A prompt that was answered. Times are in seconds of the monotonic clock."""

    way: str
    length: int
    num_tokens: int
    sent_at: float
    received_at: float
    peaks: dict[str, float]
    computed_s: dict[str, float]

    def case(self, steps: Sequence[StepRecord]) -> Case:
        """Make a case of it with the time of its steps."""
        own = [one.seconds for one in steps if self.sent_at < one.submitted_at < self.received_at]
        return Case(
            self.way,
            self.length,
            self.num_tokens,
            self.received_at - self.sent_at,
            sum(own),
            self.peaks,
            self.computed_s,
        )


class Footprint:
    """Peak memory and processor time of a server's processes from now on."""

    def __init__(self, server: TritonServer) -> None:
        processes = (
            [psutil.Process(server.pid)],
            server.model_processes("scheduler"),
            ranks_of(server),
        )
        self._processes = dict(zip(ROLES, processes, strict=True))
        for pid in self._pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
        self._before = self._most()
        self._computed_before = self._computed()

    def computed(self) -> dict[str, float]:
        """Seconds of processor time of each role since then."""
        before = self._computed_before
        return {role: seconds - before[role] for role, seconds in self._computed().items()}

    def grown(self) -> dict[str, float]:
        """MiB of each role since then."""
        return {role: max(most - self._before[role], 0.0) for role, most in self._most().items()}

    def _pids(self) -> list[int]:
        return [one.pid for each in self._processes.values() for one in each]

    def _most(self) -> dict[str, float]:
        return {
            role: sum(_peak_kib(one.pid) for one in each) / 1024
            for role, each in self._processes.items()
        }

    def _computed(self) -> dict[str, float]:
        return {
            role: sum(_computed_s(one.pid) for one in each)
            for role, each in self._processes.items()
        }


def _computed_s(pid: int) -> float:
    """Return the processor seconds of all threads that a process has or had.

    Its clock is that of clock_getcpuclockid(3).
    """
    return time.clock_gettime(~pid << 3 | 2)


def _peak_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


class Prompts:
    """Sends prompts of random tokens, for one token each."""

    def __init__(self, client: grpc_aio.InferenceServerClient) -> None:
        self._client = client
        self._tokenizer = Tokenizer.from_file(str(DEMO_CHECKPOINT / "tokenizer.json"))
        self._drawn = random.Random(0)

    async def send(self, way: str, length: int, server: TritonServer) -> Sent:
        """Send one in one of WAYS."""
        ids = [self._drawn.randrange(10, MODEL["vocab_size"]) for _ in range(length)]
        parameters: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
        if way == "text":
            content = infer_input("text_input", "BYTES", [self._text(ids)])
        else:
            content = infer_input("input_ids", "INT32", ids)
        if way.endswith("log-probabilities"):
            parameters["prompt_logprobs"] = 1
        inputs = [
            content,
            infer_input("sampling_parameters", "BYTES", [json.dumps(parameters)]),
            infer_input("return_num_input_tokens", "BOOL", [True]),
        ]
        names = ["text_output", "num_input_tokens", "prompt_logprobs"]
        outputs = [grpc_aio.InferRequestedOutput(name) for name in names]

        async def requests():
            yield {"model_name": "scheduler", "inputs": inputs, "outputs": outputs}

        footprint = Footprint(server)
        sent_at = time.monotonic()
        async for result, error in self._client.stream_infer(requests()):
            if error is not None:
                raise error
            counted = int(result.as_numpy("num_input_tokens")[0])
        received_at = time.monotonic()
        computed = footprint.computed()
        return Sent(way, length, counted, sent_at, received_at, footprint.grown(), computed)

    def _text(self, ids: list[int]) -> str:
        """Return a text of as many tokens as `ids`.

        The text of these ids, twice, may have more, and is cut.
        """
        text = self._tokenizer.decode([*ids, *ids])
        return text[: self._tokenizer.encode(text).offsets[len(ids) - 1][1]]


async def measure(server: TritonServer, options: argparse.Namespace) -> list[Sent]:
    """Send all prompts, one after the other."""
    turns = [
        (way, length)
        for _ in range(options.repetitions)
        for length in sorted(options.lengths)
        for way in WAYS
    ]
    async with grpc_aio.InferenceServerClient(server.grpc_url) as client:
        await client.is_server_live()
        prompts = Prompts(client)
        for way in WAYS:
            await prompts.send(way, WARM_UP, server)
        return [await prompts.send(*turn, server) for turn in tqdm(turns, unit="prompt")]


def kv_mib(num_tokens: int) -> float:
    """MiB of the K and V of a prompt, which the engine touches as it computes them."""
    heads = MODEL["num_hidden_layers"] * MODEL["num_key_value_heads"]
    return num_tokens * heads * 2 * 2 * MODEL["head_dim"] / MIB


def table(cases: Sequence[Case]) -> str:
    """Medians of each length and way as Markdown, and the most memory."""
    rows = []
    for way in WAYS:
        for length in sorted({case.length for case in cases}):
            group = [case for case in cases if (case.way, case.length) == (way, length)]
            rows.append(
                [
                    way,
                    f"{group[0].num_tokens:,}",
                    f"{statistics.median(case.total_s for case in group):.2f}",
                    f"{statistics.median(case.steps_s for case in group):.2f}",
                    f"{statistics.median(case.beside_us for case in group):.1f}",
                    *(f"{max(case.peaks[role] for case in group):.0f}" for role in ROLES),
                    f"{kv_mib(length):.0f}",
                ]
            )
    header = ["sent as", "tokens", "answered after, s", "in steps, s", "beside, us per token"]
    header += [f"{role}, MiB" for role in ROLES]
    return markdown_table([*header, "of the engine's: K and V"], rows)


def run(options: argparse.Namespace) -> list[Case]:
    """Measure on a server of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        longest = max(options.lengths) + WARM_UP
        model = make_checkpoint(MODEL | {"max_position_embeddings": longest}, folder / "small")
        settings = (
            "dtype=bfloat16",
            f"tokenizer={DEMO_CHECKPOINT}",
            "enable_prefix_caching=false",
            f"max_model_len={longest}",
            f"num_gpu_blocks_override={longest // 16 + 8}",
            f"scheduler.record_dir={folder / 'record'}",
        )
        with running_server(model=model, settings=settings) as server:
            sent = asyncio.run(measure(server, options))
        steps = [step for path in folder.glob("record/steps*") for step in read_steps(path)]
    return [one.case(steps) for one in sent]


def main() -> None:
    """Measure as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", type=positive, nargs="+", default=LENGTHS, metavar="N")
    parser.add_argument("--repetitions", type=positive, default=3, metavar="N", help="default: 3")
    add_output(parser, "prompt")
    options = parser.parse_args()
    stem = output_stem(options.output, "prompt")
    about = circumstances("prompt_bench.py")
    cases = run(options)
    print(table(cases))
    found = about | {"model": MODEL, "cases": [asdict(case) for case in cases]}
    print(f"\n{write_record(stem, found)}")


if __name__ == "__main__":
    main()
