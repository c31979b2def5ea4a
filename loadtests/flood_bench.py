"""Flood a real server with ten times what it can do, from three tenants, and judge what each got.

    python loadtests/flood_bench.py                                  # 2,000 requests by each way in
    python loadtests/flood_bench.py --requests 200 --ways scheduler
    python loadtests/flood_bench.py --model llama-135m               # random weights, longer steps

Tenants of weights 1, 2 and 4 send all their requests at once, under fair shares with priorities
within. When these are in, one tenant also sends a request of high priority every so often, so that
a few of them run at once. Judged is:

- nothing is lost: each request has all its tokens, or was refused with the right error and code;
- the tokens of each tenant, while all three had requests waiting, are in proportion to its weight;
- requests of high priority are in the next plan, and have their first token almost as fast as on an
  idle server;
- memory does not grow from flood to flood.

Times are the scheduler's own, from what it records (`record_dir`): beside so many requests a client
in Python sees everything late.
"""

import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc.aio as grpc_aio
from tritonclient.utils import InferenceServerException

from charonia.core.recording.recorder import REQUESTS, STEPS
from charonia.launch.server.run import running_server
from charonia.traces import StepRecord, TraceRequest, read_requests, read_steps
from checkpoint import SHAPES, make_checkpoint
from command_line import add_output, make_parser
from paths import CACHE
from record import circumstances, output_stem, write_record
from report import markdown_table
from triton_inputs import infer_input

WEIGHTS = {"light": 1.0, "middle": 2.0, "heavy": 4.0}
URGENT = "heavy"
WAYS = ("scheduler", "llm", "generate")
ROWS = 16
MAX_TOKENS = 48
NUM_IDLE = 30
QUEUE = 1024
WAIT_FOR_RECORD_S = 2.5
SENDING_S = 1.0
"""Longest time that the client takes to send a flood, in seconds."""
CLOCKS_DIFFER_S = 1e-3
"""Requests are recorded by the time of day and steps by the monotonic clock, and the former is
corrected meanwhile: so much, and less than lies between two plans."""
SHARE_BAR, NEXT_PLAN_BAR, MEMORY_BAR = 0.10, 0.99, 1.10


@dataclass(frozen=True)
class Verdict:
    """One thing that is judged: what was seen, in words, and whether it is as it should be.

    Attributes:
        is_timed: whether it depends on the machine's speed.
    """

    way: str
    what: str
    seen: str
    is_good: bool
    is_timed: bool = False


@dataclass
class Answer:
    """Answer to one client: its tokens and when they came, or an error."""

    tenant: str
    is_urgent: bool
    num_tokens: int = 0
    error: str = ""


class Flood:
    """Requests of one way in, at one server."""

    def __init__(self, url: str, way: str, seed: int) -> None:
        self._url = url
        self._way = way
        self._drawn = random.Random(seed)
        self.answers: list[Answer] = []

    async def run(self, count: int, num_urgent: int = 0, every_s: float = 0.0) -> None:
        """Send all at once; when they are in, send urgent ones until the others are over.

        Requests come in in the order in which they are sent, so the flood is in when one urgent
        request has its answer. Others that are sent before that come in all at once behind the
        flood: more than the share of their tenant, so that fair shares let most of them wait.

        Args:
            every_s: so often, in the mean.
        """
        async with grpc_aio.InferenceServerClient(self._url) as client:
            await client.is_server_live()
            tenants = [tenant for tenant in WEIGHTS for _ in range(count // len(WEIGHTS))]
            self._drawn.shuffle(tenants)
            flood = [asyncio.create_task(self._send(client, tenant)) for tenant in tenants]
            await asyncio.sleep(SENDING_S)
            urgent = []
            if num_urgent:
                await self._send(client, URGENT, is_urgent=True)
            for _ in range(num_urgent - 1):
                urgent.append(asyncio.create_task(self._send(client, URGENT, is_urgent=True)))
                await asyncio.sleep(self._drawn.uniform(0.4, 1.6) * every_s)
                if all(task.done() for task in flood):
                    break
            await asyncio.gather(*flood, *urgent)

    async def idle(self, count: int) -> None:
        """One urgent request after the other."""
        async with grpc_aio.InferenceServerClient(self._url) as client:
            for _ in range(count):
                await self._send(client, URGENT, is_urgent=True)

    async def _send(
        self, client: grpc_aio.InferenceServerClient, tenant: str, *, is_urgent: bool = False
    ) -> None:
        answer = Answer(tenant, is_urgent)
        self.answers.append(answer)
        sampling = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0}
        sampling |= {"tenant": tenant, "priority": -1 if is_urgent else 0}
        try:
            await self._ask(client, json.dumps(sampling), answer)
        except InferenceServerException as error:
            answer.error = f"{error.status()}: {error.message()}"

    def _prompt(self) -> grpc_aio.InferInput:
        if self._way == "scheduler":
            ids = [self._drawn.randrange(10, 1000) for _ in range(20)]
            return infer_input("input_ids", "INT32", ids)
        text = "".join(self._drawn.choice("abcdefgh ") for _ in range(20))
        return infer_input("text_input", "BYTES", [text])

    async def _ask(
        self, client: grpc_aio.InferenceServerClient, sampling: str, answer: Answer
    ) -> None:
        inputs = [
            self._prompt(),
            infer_input("sampling_parameters", "BYTES", [sampling]),
            infer_input("return_num_output_tokens", "BOOL", [True]),
        ]
        if self._way == "generate":
            result = await client.infer("generate", inputs)
            answer.num_tokens = int(result.as_numpy("num_output_tokens")[0])
            return
        inputs.append(infer_input("stream", "BOOL", [True]))

        async def requests():
            yield {"model_name": self._way, "inputs": inputs}

        async for result, error in client.stream_infer(requests()):
            if error is not None:
                raise error
            answer.num_tokens += int(result.as_numpy("num_output_tokens")[0])


class Record:
    """The server's own records, part by part."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_requests = self._num_steps = 0

    def take(self) -> tuple[list[TraceRequest], list[StepRecord]]:
        """All since the last call."""
        time.sleep(WAIT_FOR_RECORD_S)
        requests = read_requests(self._folder / REQUESTS)
        steps = read_steps(self._folder / STEPS)
        fresh = requests[self._num_requests :], steps[self._num_steps :]
        self._num_requests, self._num_steps = len(requests), len(steps)
        return fresh


def judge_answers(way: str, answers: Sequence[Answer]) -> list[Verdict]:
    """Judge whether each has an end, and the right one."""
    ends: Counter[str] = Counter()
    wrong = []
    for answer in answers:
        # On a stream there is no code beside the text; elsewhere there is.
        refused = "[charonia:queue_full]" in answer.error
        refused &= answer.error.startswith(("None: ", "StatusCode.UNAVAILABLE: "))
        if not answer.error and answer.num_tokens == MAX_TOKENS:
            ends["answered"] += 1
        elif refused and not answer.num_tokens:
            ends["refused: the queue is full"] += 1
        else:
            wrong.append(f"{answer.num_tokens} tokens, {answer.error!r}")
    seen = ", ".join(f"{count:,} {end}" for end, count in sorted(ends.items()))
    seen += f", {len(wrong)} wrong ({wrong[0]})" if wrong else ""
    return [Verdict(way, "each is answered or refused", seen, not wrong)]


def judge_shares(way: str, requests: Sequence[TraceRequest]) -> list[Verdict]:
    """Tokens of each tenant while all had requests waiting, by the scheduler's own times."""
    begin, end = _while_all_wait(requests)
    served = [one for one in requests if one.outcome == "length" and one.queue_ms is not None]
    came = {tenant: [one for one in served if one.tenant == tenant] for tenant in WEIGHTS}
    tokens = {
        tenant: sum(one.output_length * _share_within(one, begin, end) for one in of_tenant)
        for tenant, of_tenant in came.items()
    }
    total, weights = sum(tokens.values()), sum(WEIGHTS.values())
    off = {
        tenant: tokens[tenant] / total / (weight / weights) - 1
        for tenant, weight in WEIGHTS.items()
    }
    seen = ", ".join(f"{tenant} {tokens[tenant]:,.0f} ({off[tenant]:+.1%})" for tenant in WEIGHTS)
    is_good = all(abs(value) <= SHARE_BAR for value in off.values())
    return [Verdict(way, f"tokens by weight, within {SHARE_BAR:.0%}", seen, is_good)]


def _while_all_wait(requests: Sequence[TraceRequest]) -> tuple[float, float]:
    """Return the time, in milliseconds, in which all tenants have requests of the flood waiting."""
    waits: dict[str, list[TraceRequest]] = {tenant: [] for tenant in WEIGHTS}
    for one in requests:
        if one.outcome == "length" and one.priority == 0:
            waits[one.tenant].append(one)
    begin = max(min(one.timestamp for one in of_tenant) for of_tenant in waits.values())
    return begin, min(max(map(_started_ms, of_tenant)) for of_tenant in waits.values())


def _started_ms(one: TraceRequest) -> float:
    return one.timestamp + (one.queue_ms or 0.0)


def _taken_in_ms(one: TraceRequest) -> float:
    return one.timestamp + (one.intake_ms or 0.0)


def _share_within(one: TraceRequest, begin: float, end: float) -> float:
    """Return the share of a request's tokens in this time; they come evenly from start to end."""
    start, over = _started_ms(one), one.timestamp + (one.total_ms or 0.0)
    return max(0.0, min(over, end) - max(start, begin)) / max(over - start, 1e-9)


def judge_urgent(
    way: str,
    requests: Sequence[TraceRequest],
    steps: Sequence[StepRecord],
    idle: Sequence[TraceRequest],
) -> list[Verdict]:
    """Judge whether they were in the next plan, and how soon they had a token.

    Only the time in which all tenants have requests waiting counts: then they may displace others
    by their priority, and not only when it is their tenant's turn. A plan while urgent ones have
    all rows passes nobody. Requests that come while the flood comes in are left out: Triton gives
    requests to the models one after the other, so it makes them wait.
    """
    _, end = _while_all_wait(requests)
    burst_end = max(_taken_in_ms(one) for one in requests if one.priority == 0)
    all_urgent = [one for one in requests if one.priority < 0 and one.outcome == "length"]
    urgent = [one for one in all_urgent if burst_end < one.timestamp and _taken_in_ms(one) <= end]
    offset = time.time() - time.monotonic()
    sent = np.array([step.submitted_at for step in steps])
    starts = np.array([_started_ms(one) / 1000 - offset for one in all_urgent])
    ends = np.array([(one.timestamp + (one.total_ms or 0.0)) / 1000 - offset for one in all_urgent])
    num_urgent = np.array([np.count_nonzero((starts <= at) & (ends > at)) for at in sent])
    passed = 0
    for one in urgent:
        started = _started_ms(one) / 1000 - offset
        taken_in = _taken_in_ms(one) / 1000 - offset
        is_between = (sent > taken_in) & (sent < started - CLOCKS_DIFFER_S)
        passed += bool(np.any(is_between & (num_urgent < ROWS)))
    share = 1 - passed / max(1, len(urgent))
    full = [step.seconds for step in steps if step.num_rows == ROWS]
    idle_ms = float(np.percentile([one.ttft_ms for one in idle], 50))
    bar_ms = idle_ms + 2000 * statistics.median(full)
    ttft_ms = [one.ttft_ms for one in urgent]
    p99 = float(np.percentile(ttft_ms, 99)) if ttft_ms else math.inf
    seen = f"{_spread(ttft_ms)} ms; idle p50 {idle_ms:.1f} ms"
    seen += f", full step {_spread([1000 * s for s in full])} ms"
    parts = {
        "until it is taken in": [one.intake_ms for one in urgent],
        "until its plan": [one.queue_ms - one.intake_ms for one in urgent],
        "from there on": [one.ttft_ms - one.queue_ms for one in urgent],
    }
    seen += "".join(f"; {name} {_spread(values)} ms" for name, values in parts.items())
    return [
        Verdict(
            way,
            f"urgent ones in the next plan, {NEXT_PLAN_BAR:.0%}",
            f"{share:.1%} of {len(urgent)}",
            bool(urgent) and share >= NEXT_PLAN_BAR,
            is_timed=True,
        ),
        Verdict(
            way,
            "their TTFT p99 at most idle and two full steps",
            seen,
            p99 <= bar_ms,
            is_timed=True,
        ),
    ]


def _spread(values: Sequence[float]) -> str:
    """The median and the 99th percentile, in words."""
    p50, p99 = np.percentile(values, (50, 99)) if values else (math.nan, math.nan)
    return f"p50 {p50:.1f}, p99 {p99:.1f}"


def memory(pid: int) -> int:
    """Resident bytes of the server and its models' processes."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])


def flood(ways: Sequence[str], count: int, num_urgent: int, model: Path | None) -> list[Verdict]:
    """Flood one server by each way in, one after the other."""
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tenants = {tenant: {"weight": weight} for tenant, weight in WEIGHTS.items()}
        (folder / "tenants.json").write_text(json.dumps({"tenants": tenants}), encoding="utf-8")
        settings = (
            "speculative_config=null",
            f"max_num_seqs={ROWS}",
            "scheduling_policy=priority",
            "scheduler.priority_aging_s=0",
            "scheduler.fair_share=true",
            f"scheduler.max_queue_size={QUEUE}",
            f"scheduler.tenants_file={folder / 'tenants.json'}",
            f"scheduler.record_dir={folder / 'record'}",
        )
        with running_server(model=model, settings=settings) as server:
            record = Record(folder / "record")

            def run(way: str, go: Callable[[Flood], Coroutine[Any, Any, None]]) -> list[Answer]:
                one = Flood(server.grpc_url, way, 0)
                asyncio.run(go(one))
                return one.answers

            for way in ways:
                run(way, lambda one: one.run(count))  # memory grows to what a flood takes
                record.take()
                before = memory(server.pid)
                run(way, lambda one: one.idle(NUM_IDLE))
                idle, _ = record.take()
                every_s = statistics.median(one.total_ms for one in idle) / 1000
                answers = run(
                    way, partial(Flood.run, count=count, num_urgent=num_urgent, every_s=every_s)
                )
                requests, steps = record.take()
                verdicts += judge_answers(way, answers)
                verdicts += judge_shares(way, requests)
                verdicts += judge_urgent(way, requests, steps, idle)
                after = memory(server.pid)
                seen = f"{before / 2**20:,.0f} MiB before, {after / 2**20:,.0f} MiB after"
                is_good = after <= MEMORY_BAR * before
                verdicts.append(Verdict(way, "memory stays", seen, is_good))
                print(table(verdicts[-5:]), flush=True)
    return verdicts


def table(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as Markdown."""
    return markdown_table(
        ["way in", "what", "seen", "verdict"],
        [[one.way, one.what, one.seen, "good" if one.is_good else "BAD"] for one in verdicts],
    )


def main() -> int:
    """Flood as the command line says; returns whether anything was bad."""
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="default: 2000")
    parser.add_argument("--urgent", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--model", choices=["demo", *SHAPES], default="demo")
    add_output(parser, "flood")
    options = parser.parse_args()
    stem = output_stem(options.output, "flood")
    about = circumstances("flood_bench.py")
    model = None
    if options.model != "demo":
        model = make_checkpoint(SHAPES[options.model], CACHE / options.model)
    verdicts = flood(options.ways, options.requests, options.urgent, model)
    found = about | {"model": options.model} | {"verdicts": [asdict(one) for one in verdicts]}
    print(f"\n{write_record(stem, found)}")
    return int(not all(one.is_good for one in verdicts))


if __name__ == "__main__":
    sys.exit(main())
