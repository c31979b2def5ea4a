"""Measure what metrics cost: `make bench-metrics`.

    python loadtests/metrics_bench.py

On the scheduling thread: what a step of so many decoding rows counts and observes is done again and
again on the metrics and the scheduler of the demo model, between its requests, and is compared with
its whole steps. So is what the engine shows from time to time; a step has its share of that. The
demo model is the smallest that there is: others have longer steps, and lose less. Of all the best
of several repetitions counts, as other work on the machine only adds to them. In a loop they find
their code and data in the processor's caches, and so take less than within a step.

Beside it: the thread that hands the numbers to Triton once a second. Its processor time is read
from the kernel, in a server that does nothing and in one that decodes so many requests at once.
The thread waits for tritonserver's answer to each number. What answering costs is not told apart
from the rest of that process. So all that an idle tritonserver computes is shown, too: answering
is a part of it. The sum of all three is what metrics would cost, were all of it in the way of the
steps; tritonserver's part under load is not in it.

Not in it: scrapes, see `make bench-observing`.
"""

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from charonia import LLM, SamplingParams
from charonia.config import DEMO_CHECKPOINT
from charonia.core.engine_core import SHOW_EVERY_S, EngineCore
from charonia.metrics.triton_page import THREAD
from command_line import add_output, make_parser, positive
from observed_side import ObservedSide
from record import circumstances, output_stem, write_record
from report import markdown_table
from turns import draw_waves, engine_settings

GOAL = 0.01
NUM_TOKENS = 128
LEAST_S = 20.0
"""Shortest measurement, in seconds, of either part beside the scheduling thread."""


@dataclass(frozen=True)
class OfSteps:
    """Times of one step, on the scheduling thread."""

    counting_us: float
    showing_us: float
    step_us: float

    @property
    def metrics_us(self) -> float:
        """Metrics of one step, with its share of what several steps show together."""
        return self.counting_us + self.showing_us * min(self.step_us / (1e6 * SHOW_EVERY_S), 1.0)

    @property
    def share(self) -> float:
        """Share of the step's time that the metrics take."""
        return self.metrics_us / self.step_us


@dataclass(frozen=True)
class Beside:
    """Processor time per second: of the thread that updates Triton's page, and of tritonserver."""

    thread: float
    tritonserver: float


def what_a_step_does(core: EngineCore, rows: int) -> Callable[[], None]:
    """What one step counts and observes, in which each row gets a token."""
    metrics = core.metrics
    plan, step, gaps = (
        metrics.histograms[f"charonia_{name}_seconds"] for name in ("plan", "step", "inter_token")
    )

    def run() -> None:
        plan.observe(0.0003)
        step.observe(0.01)
        for phase in ("transit", "apply", "deliver"):
            metrics.count_phase(phase, 0.0001)
        metrics.count_collectives({})
        for _ in range(rows):
            metrics.count_tokens(1)
            gaps.observe(0.01, 1)

    return run


def seconds_of(run: Callable[[], None], count: int) -> float:
    """Seconds of one call, as the mean of several."""
    began = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - began) / count


def measure_steps(rows: int, repetitions: int) -> OfSteps:
    """Steps of so many rows, and their metrics."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    counting, showing, of_steps = [], [], []
    with LLM(str(DEMO_CHECKPOINT), max_num_seqs=rows) as llm:
        run = what_a_step_does(llm._core, rows)
        histogram = llm.metrics.histograms["charonia_step_seconds"]
        for number in range(repetitions):
            before, began = histogram.count, time.perf_counter()
            llm.generate([[4 + number, 4 + row] for row in range(rows)], sampling, use_tqdm=False)
            of_steps.append((time.perf_counter() - began) / (histogram.count - before))
            counting.append(seconds_of(run, 1000))
            showing.append(seconds_of(llm._core._set_gauges, 1000))
    return OfSteps(*(1e6 * min(seconds) for seconds in (counting, showing, of_steps)))


class ProcessorTime:
    """Processor time of the updating thread and its tritonserver from now on."""

    def __init__(self, server: psutil.Process) -> None:
        self._server = server
        pids = [one.pid for one in server.children(recursive=True)]
        names = [name for pid in pids for name in Path(f"/proc/{pid}/task").glob("*/comm")]
        [self._thread] = [name.parent for name in names if name.read_text().strip() == THREAD]
        self._began, self._before = time.perf_counter(), self._seconds()

    def per_second(self) -> Beside:
        """Measure the processor time per second since then."""
        passed = time.perf_counter() - self._began
        now = self._seconds()
        thread, tritonserver = (
            (after - before) / passed for after, before in zip(now, self._before, strict=True)
        )
        return Beside(thread, tritonserver)

    def _seconds(self) -> tuple[float, float]:
        computed_ns = int((self._thread / "schedstat").read_text().split()[0])
        times = self._server.cpu_times()
        return 1e-9 * computed_ns, times.user + times.system


def measure_beside(rows: int) -> tuple[Beside, Beside]:
    """A server that does nothing, and then one with so many requests at once."""
    settings = engine_settings("demo")
    side = ObservedSide(DEMO_CHECKPOINT, settings, is_traced=False, is_read=False)
    try:
        waves = draw_waves("demo", random.Random(0), rows, 1)
        side.run(waves)
        idle = ProcessorTime(side.server)
        time.sleep(LEAST_S)
        at_rest, busy = idle.per_second(), ProcessorTime(side.server)
        ends_at = time.monotonic() + LEAST_S
        while time.monotonic() < ends_at:
            side.run(waves)
        return at_rest, busy.per_second()
    finally:
        side.close()


def main() -> None:
    """Measure as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=positive, default=32, metavar="N", help="default: 32")
    parser.add_argument("--repetitions", type=positive, default=10, metavar="N", help="default: 10")
    add_output(parser, "metrics")
    options = parser.parse_args()
    stem = output_stem(options.output, "metrics")
    about = circumstances("metrics_bench.py")
    steps = measure_steps(options.rows, options.repetitions)
    at_rest, busy = measure_beside(options.rows)
    together = steps.share + busy.thread + at_rest.tritonserver
    lines = [
        ["metrics of a step, on the scheduling thread", f"{steps.metrics_us:.0f} µs"],
        [
            f"of that, its share of {steps.showing_us:.0f} µs",
            f"{steps.metrics_us - steps.counting_us:.1f} µs",
        ],
        ["a whole step of the demo model", f"{steps.step_us:.0f} µs"],
        ["share", f"{100 * steps.share:.2f} %"],
        ["the updating thread, under load, of one core", f"{100 * busy.thread:.2f} %"],
        ["the updating thread, at rest, of one core", f"{100 * at_rest.thread:.2f} %"],
        ["all of tritonserver, at rest, of one core", f"{100 * at_rest.tritonserver:.2f} %"],
        ["metrics of a step, the thread under load and tritonserver", f"{100 * together:.2f} %"],
        [f"below {100 * GOAL:g} %", "yes" if together < GOAL else "no"],
    ]
    print(markdown_table([f"{options.rows} rows", ""], lines))
    found = {
        "rows": options.rows,
        **asdict(steps),
        "metrics_us": steps.metrics_us,
        "share": steps.share,
        "at_rest": asdict(at_rest),
        "under_load": asdict(busy),
        "together": together,
    }
    print(f"\n{write_record(stem, about | found)}")


if __name__ == "__main__":
    main()
