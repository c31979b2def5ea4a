"""Measure what metrics cost a step on the scheduling thread: `make bench-metrics`.

    python loadtests/metrics_bench.py

What a step of so many decoding rows counts, observes and shows is done again and again on the
metrics and the scheduler of the demo model, between its requests, and is compared with its whole
steps. The demo model is the smallest that there is: others have longer steps, and lose less. Of
both the best of several repetitions counts, as other work on the machine only adds to them.

Not in it: the thread that hands the numbers to Triton twice a second, and scrapes.
"""

import time
from collections.abc import Callable

from charonia import LLM, SamplingParams
from charonia.config import DEMO_CHECKPOINT
from charonia.core.engine_core import EngineCore
from command_line import add_output, make_parser, positive
from record import circumstances, output_stem, write_record
from report import markdown_table

GOAL = 0.01
NUM_TOKENS = 128


def what_a_step_does(core: EngineCore, rows: int) -> Callable[[], None]:
    """The calls of one step, in which each row gets a token."""
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
            metrics.count("charonia_generation_tokens_total", 1)
            gaps.observe(0.01, 1)
        core._set_gauges()

    return run


def seconds_of(run: Callable[[], None], count: int) -> float:
    """Seconds of one call, as the mean of several."""
    began = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - began) / count


def main() -> None:
    """Measure as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=positive, default=32, metavar="N", help="default: 32")
    parser.add_argument("--repetitions", type=positive, default=10, metavar="N", help="default: 10")
    add_output(parser, "metrics")
    options = parser.parse_args()
    stem = output_stem(options.output, "metrics")
    about = circumstances("metrics_bench.py")
    rows, sampling = options.rows, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    of_metrics, of_steps = [], []
    with LLM(str(DEMO_CHECKPOINT), max_num_seqs=rows) as llm:
        run = what_a_step_does(llm._core, rows)
        histogram = llm.metrics.histograms["charonia_step_seconds"]
        for number in range(options.repetitions):
            before, began = histogram.count, time.perf_counter()
            llm.generate([[4 + number, 4 + row] for row in range(rows)], sampling, use_tqdm=False)
            of_steps.append((time.perf_counter() - began) / (histogram.count - before))
            of_metrics.append(seconds_of(run, 1000))
    metrics_us, step_us = 1e6 * min(of_metrics), 1e6 * min(of_steps)
    share = metrics_us / step_us
    lines = [
        ["metrics of a step", f"{metrics_us:.0f} µs"],
        ["a whole step of the demo model", f"{step_us:.0f} µs"],
        ["share", f"{100 * share:.2f} %"],
        [f"below {100 * GOAL:g} %", "yes" if share < GOAL else "no"],
    ]
    print(markdown_table([f"{rows} rows", "best of repetitions"], lines))
    found = {"rows": rows, "metrics_us": metrics_us, "step_us": step_us, "share": share}
    print(f"\n{write_record(stem, about | found)}")


if __name__ == "__main__":
    main()
