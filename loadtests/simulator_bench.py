"""Compare the simulator with reality: the same traffic on a real Triton and in `charonia simulate`.

    python loadtests/simulator_bench.py                              # the demo model, three loads
    python loadtests/simulator_bench.py --trace ../shared/traces/tenants.jsonl.gz --seconds 30

For each load the server is asked several times, with traffic of as many seeds. What came of every
second one the simulator has to foretell, which sees only when its requests came and how long they
were; from the records of those around them the times of steps are learned, because a machine is
faster now and slower then. Beside that stands what it says with the times of the very steps that it
foretells: how far these two differ is what the machine changed meanwhile. A load is a share of what
the server can do, which is measured before; the last one is all requests at once.
"""

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tritonclient.grpc.aio as grpc_aio
from tqdm import tqdm

from charonia.config import DEMO_CHECKPOINT, EngineArgs, SchedulerArgs
from charonia.core.recording.recorder import REQUESTS, STEPS
from charonia.launch.server.run import running_server
from charonia.simulate.simulator import Setting, Simulation
from charonia.simulate.step_times import StepTimes
from charonia.simulate.workload import Shape, shape
from charonia.traces import TraceRequest, block_length, read_requests, read_steps
from command_line import add_output, make_parser
from record import circumstances, output_stem, write_record
from report import markdown_table
from triton_side import complete

MAX_LENGTH = 1000
LOADS = (0.3, 0.7)
AT_ONCE = "all at once"
NUM_PROBED = 300
BARS = {"tokens per second": 0.03, "time between tokens": 0.03, "TTFT p50": 0.15, "TTFT p99": 0.15}


@dataclass(frozen=True)
class Case:
    """One load: a figure of reality, and what the simulator says.

    Attributes:
        by_own: the same with the times of the very steps that are foretold.
    """

    load: str
    figure: str
    real: float
    simulated: float
    by_own: float

    @property
    def error(self) -> float:
        """Error of the simulator, as a share of reality."""
        return self.simulated / self.real - 1

    @property
    def own_error(self) -> float:
        """The same with the times of the very steps that are foretold."""
        return self.by_own / self.real - 1

    @property
    def is_met(self) -> bool:
        """True if it is within the bar."""
        return abs(self.error) <= BARS[self.figure]


@dataclass(frozen=True)
class Traffic:
    """Requests and the seconds at which they come."""

    arrivals: Sequence[float]
    requests: Sequence[TraceRequest]


def traffic_of(trace: Sequence[TraceRequest], count: int, rate: float, seed: int) -> Traffic:
    """Draw `count` requests of a trace by chance; Poisson's arrivals, or all at once (rate 0)."""
    drawn = random.Random(seed)
    requests = [drawn.choice(trace) for _ in range(count)]
    arrivals, at = [], 0.0
    for _ in requests:
        arrivals.append(at)
        at += drawn.expovariate(rate) if rate else 0.0
    return Traffic(arrivals, requests)


async def replay(url: str, traffic: Traffic, seed: int) -> None:
    """Send it, each request on time and with a prompt of its own."""
    drawn = random.Random(seed)
    async with grpc_aio.InferenceServerClient(url) as client:
        await client.is_server_live()
        started = time.perf_counter()

        async def send(at: float, request: TraceRequest, prompt: Sequence[int]) -> None:
            await asyncio.sleep(max(0.0, at - (time.perf_counter() - started)))
            await complete(client, prompt, request.output_length, {}, started)

        sending = []
        for at, request in zip(traffic.arrivals, traffic.requests, strict=True):
            prompt = [drawn.randrange(10, 1000) for _ in range(request.input_length)]
            sending.append(asyncio.create_task(send(at, request, prompt)))
        await asyncio.gather(*sending)


class Server:
    """A server that records, asked with several traffics one after the other."""

    def __init__(self, url: str, record: Path) -> None:
        self._url = url
        self._record = record

    def ask(self, traffic: Traffic, seed: int, into: Path) -> Path:
        """Send it; returns the folder of its own part of the record."""
        into.mkdir()
        before = {name: self._size(name) for name in (REQUESTS, STEPS)}
        asyncio.run(replay(self._url, traffic, seed))
        time.sleep(2.5)  # the record is written every second
        for name, size in before.items():
            with (self._record / name).open("rb") as file:
                file.seek(size)
                (into / name).write_bytes(file.read())
        return into

    def _size(self, name: str) -> int:
        path = self._record / name
        return path.stat().st_size if path.exists() else 0


def capacity(folder: Path) -> float:
    """Requests per second while all came at once."""
    requests = read_requests(folder / REQUESTS)
    return len(requests) / _seconds(requests)


def simulated(
    folder: Path, times: StepTimes, args: EngineArgs, scheduler_args: SchedulerArgs, blocks: int
) -> list[TraceRequest]:
    """Simulate a recorded traffic."""
    trace = read_requests(folder / REQUESTS)
    setting = Setting(
        engine_args=args,
        scheduler_args=scheduler_args,
        num_blocks=blocks,
        max_model_len=1024,
        step_times=times,
    )
    return list(Simulation(setting, shape(trace, Shape(), 0), block_length(trace)).run().as_trace())


def figures(parts: Sequence[Sequence[TraceRequest]]) -> dict[str, float]:
    """All figures of several runs together, by name."""
    requests = [one for part in parts for one in part]
    ttft = [one.ttft_ms / 1000 for one in requests if one.ttft_ms is not None]
    gaps = [
        ((one.total_ms - one.ttft_ms) / 1000, one.output_length - 1)
        for one in requests
        if one.total_ms is not None and one.ttft_ms is not None
    ]
    seconds, num_tokens = (sum(values) for values in zip(*gaps, strict=True))
    p50, p99 = np.percentile(ttft, (50, 99))
    found = (
        sum(one.output_length for one in requests) / sum(map(_seconds, parts)),
        seconds / num_tokens,
        float(p50),
        float(p99),
    )
    return dict(zip(BARS, found, strict=True))


def _seconds(requests: Sequence[TraceRequest]) -> float:
    """Return the seconds from the first arrival to the last end."""
    ends = [one.timestamp + one.total_ms for one in requests if one.total_ms is not None]
    return (max(ends) - min(one.timestamp for one in requests)) / 1000


def learned(folders: Sequence[Path]) -> StepTimes:
    """The times of the steps that were recorded in these folders."""
    return StepTimes.fit(
        [step for folder in folders for step in read_steps(folder / STEPS)],
        [request for folder in folders for request in read_requests(folder / REQUESTS)],
    )


def measure(
    trace: Sequence[TraceRequest], seconds: float, repetitions: int, num_seqs: int, blocks: int
) -> list[Case]:
    """Ask the real server, and let the simulator foretell each second traffic."""
    cases: list[Case] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        values = {
            "speculative_config": "null",
            "max_num_seqs": num_seqs,
            "num_gpu_blocks_override": blocks,
            "scheduler.record_dir": folder / "record",
            "scheduler.max_queue_size": 100_000,
            "scheduler.max_queue_bytes": 2**30,
        }
        settings = tuple(f"{name}={value}" for name, value in values.items())
        server = stack.enter_context(running_server(settings=settings))
        real = Server(server.grpc_url, folder / "record")
        real.ask(traffic_of(trace, NUM_PROBED, 0.0, 0), 0, folder / "warm")
        probe = real.ask(traffic_of(trace, NUM_PROBED, 0.0, 1), 1, folder / "probe")
        most = capacity(probe)
        print(f"{most:.1f} requests/s at most")
        args = EngineArgs(model=str(DEMO_CHECKPOINT), max_num_seqs=num_seqs)
        scheduler_args = SchedulerArgs(max_queue_size=100_000)
        for number, share in enumerate((*LOADS, 0.0), start=1):
            load = f"{share:.0%} of capacity" if share else AT_ONCE
            rate = share * most
            count = int(seconds * (rate or most))
            folders = []
            for turn in tqdm(range(2 * repetitions + 1), desc=load, unit="run"):
                seed = 100 * number + turn
                traffic = traffic_of(trace, count, rate, seed)
                folders.append(real.ask(traffic, seed, folder / str(seed)))
            foretold = folders[1::2]
            figures_of = [figures([read_requests(one / REQUESTS) for one in foretold])]
            for times in (learned(folders[::2]), learned(foretold)):
                runs = [simulated(one, times, args, scheduler_args, blocks) for one in foretold]
                figures_of.append(figures(runs))
            cases += [Case(load, name, *(one[name] for one in figures_of)) for name in BARS]
            print(table(cases[-len(BARS) :]))
    return cases


def table(cases: Sequence[Case]) -> str:
    """The cases as Markdown."""
    return markdown_table(
        ["load", "figure", "real", "simulated", "off by", "bar", "verdict", "by its own steps"],
        [
            [
                case.load,
                case.figure,
                f"{case.real:.4g}",
                f"{case.simulated:.4g}",
                f"{case.error:+.1%}",
                f"{BARS[case.figure]:.0%}",
                "met" if case.is_met else "missed",
                f"{case.own_error:+.1%}",
            ]
            for case in cases
        ],
    )


def main() -> None:
    """Measure as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--trace",
        type=Path,
        default=Path("../shared/traces/tenants.jsonl.gz"),
        metavar="FILE",
        help=f"of whose requests those of up to {MAX_LENGTH} tokens are sent",
    )
    parser.add_argument(
        "--seconds", type=float, default=15.0, metavar="S", help="of each run (default: 15)"
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=4,
        metavar="N",
        help="runs of each load that are foretold, between one more (default: 4)",
    )
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="default: 32")
    parser.add_argument("--blocks", type=int, default=4096, metavar="N", help="default: 4096")
    add_output(parser, "simulator")
    options = parser.parse_args()
    stem = output_stem(options.output, "simulator")
    about = circumstances("simulator_bench.py")
    trace = [
        one
        for one in read_requests(options.trace)
        if one.input_length + one.output_length <= MAX_LENGTH and one.output_length
    ]
    cases = measure(trace, options.seconds, options.repetitions, options.rows, options.blocks)
    print(table(cases))
    worst = statistics.fmean(abs(case.error) for case in cases)
    found = about | {"trace": options.trace.name, "mean_error": worst}
    found["cases"] = [asdict(case) | {"is_met": case.is_met} for case in cases]
    print(f"\n{write_record(stem, found)}")


if __name__ == "__main__":
    main()
