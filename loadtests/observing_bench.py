"""Measure what it costs to observe a server: metrics that are read, requests that are traced.

    python loadtests/observing_bench.py                       # the demo model, 1, 8 and 32 at once
    python loadtests/observing_bench.py --models llama-135m --concurrency 8

Four servers with the same model take turns with the same new prompts, in a new random order: one
that nobody observes, one whose metrics page is read every second, one of which every request is
traced, by tritonserver and by the scheduler, and one with both. Readers, a collector that drops
what it gets, and the client share the machine's cores. A ratio is that of two turns of one
repetition, and the first repetition is not counted. Greedy, EOS ignored, no prefix cache, no
speculation.
"""

import argparse
import contextlib
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from charonia.config import DEMO_CHECKPOINT
from charonia.launch.server.trace_options import trace_options
from checkpoint import SHAPES, make_checkpoint
from command_line import add_output, make_parser, positive
from figures import Figures, decode_figures, ratio
from paths import CACHE, LOADTESTS
from plot import draw_ratios, make_figure, save
from record import circumstances, output_stem, write_record
from report import markdown_table
from systems_under_test import Request
from thresholds import verdict
from triton_side import TritonSide

OFF, METRICS, TRACES, BOTH = "unobserved", "metrics read", "traced", "both"
SIDES = (OFF, METRICS, TRACES, BOTH)
GOALS = {METRICS: 0.99}
"""Of tokens per second over those of `OFF`; tracing every request has none."""
MODELS = ("demo", "llama-135m")
CONCURRENCY = (1, 8, 32)
PROMPT_TOKENS = 32
NEW_TOKENS = {"demo": 192, "llama-135m": 64}
MIN_REQUESTS = 4
READ_EVERY_S = 1.0

Results = dict[tuple[str, int], dict[str, list[Figures]]]
"""By model and concurrency, then by side; one entry per turn."""


def main() -> None:
    """Measure as the command line says."""
    options = _parser().parse_args()
    stem = output_stem(options.output, "observing")
    about = circumstances("observing_bench.py") | {"repetitions": options.repetitions}
    results: Results = {}
    for model in options.models:
        results |= measure(model, options)
    print(as_markdown(results))
    recorded = {f"{model}, {count}": case for (model, count), case in results.items()}
    written = write_record(stem, {**about, "results": recorded}, draw=partial(write_plot, results))
    print(f"\n{written}")


def measure(model: str, options: argparse.Namespace) -> Results:
    """All concurrencies with one model."""
    drawn = random.Random(f"{options.seed} {model}")
    results: Results = {}
    with contextlib.ExitStack() as stack:
        sides = _start(stack, model)
        for count in options.concurrency:
            case = results[model, count] = {name: [] for name in SIDES}
            turns = tqdm(range(options.repetitions + 1), desc=f"{model}, {count} at once")
            for repetition in turns:
                waves = [
                    [_request(NEW_TOKENS[model], drawn) for _ in range(count)]
                    for _ in range(-(-MIN_REQUESTS // count))
                ]
                for name in drawn.sample(SIDES, len(SIDES)):
                    side = sides[name]
                    with _reading(side) if name in (METRICS, BOTH) else contextlib.nullcontext():
                        traces = side.run(waves)
                    if repetition:
                        case[name].append(decode_figures(traces, waves))
    return results


def _start(stack: contextlib.ExitStack, model: str) -> Mapping[str, TritonSide]:
    if model == "demo":
        checkpoint = DEMO_CHECKPOINT
    else:
        checkpoint = make_checkpoint(SHAPES[model], CACHE / model)
    endpoint = stack.enter_context(_collector())
    sides = {}
    for name in SIDES:
        settings: dict[str, Any] = {
            "dtype": "auto",
            "device": "cpu",
            "max_model_len": PROMPT_TOKENS + NEW_TOKENS[model],
            "enable_prefix_caching": False,
        }
        tritonserver: list[str] = []
        if name in (TRACES, BOTH):
            settings["scheduler.otlp_traces_endpoint"] = endpoint
            tritonserver = trace_options(endpoint, rate=1)
        sides[name] = TritonSide(checkpoint, settings, tritonserver)
        stack.callback(sides[name].close)
    return sides


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """A collector in a process of its own; its endpoint. Triton and charonia must have sent."""
    command = [sys.executable, str(LOADTESTS / "workers" / "otlp_sink.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()
        if (count := int(process.stdout.readline())) < 2:
            raise SystemExit(f"{count} of 2 senders sent spans, so the traced figures mean nothing")


@contextlib.contextmanager
def _reading(side: TritonSide) -> Iterator[None]:
    """Read a server's metrics page every second, as Prometheus does."""
    stop = threading.Event()
    errors: list[httpx.HTTPError] = []

    def read() -> None:
        with httpx.Client() as http:
            while not errors:
                try:
                    http.get(side.metrics_url).raise_for_status()
                except httpx.HTTPError as error:
                    errors.append(error)
                if stop.wait(READ_EVERY_S):
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


def _request(new_tokens: int, drawn: random.Random) -> Request:
    return Request([drawn.randrange(1, 4000) for _ in range(PROMPT_TOKENS)], new_tokens)


def as_markdown(results: Results) -> str:
    """Tokens per second of each side, and its share of what an unobserved server has."""
    rows = []
    for (model, count), case in results.items():
        rates = {name: _rates(turns) for name, turns in case.items()}
        shares = []
        for name in SIDES[1:]:
            share = ratio(rates[name], rates[OFF])
            judged = f", {verdict(share.interval, GOALS[name])}" if name in GOALS else ""
            shares.append(f"{share}{judged}")
        row = [f"{statistics.median(rates[name]):,.0f}" for name in SIDES]
        rows.append([model, str(count), *row, *shares])
    header = [f"tok/s, {name}" for name in SIDES] + [f"{name} / {OFF}" for name in SIDES[1:]]
    return markdown_table(["model", "at once", *header], rows)


def _rates(turns: list[Figures]) -> list[float]:
    return [one["tokens_per_second"] for one in turns]


def write_plot(results: Results, path: Path) -> None:
    """Tokens per second as a share of an unobserved server's; whiskers are all repetitions."""
    figure = make_figure(2.2 * len(results) + 2, 4)
    axis = figure.subplots()
    for place, name in enumerate(SIDES[1:]):
        found = [ratio(_rates(case[name]), _rates(case[OFF])) for case in results.values()]
        places = [index + 0.27 * (place - 1) for index in range(len(found))]
        draw_ratios(axis, places, found, 0.25, name)
    axis.axhline(1.0, color="black", linewidth=0.8, linestyle="dashed")
    axis.set_xticks(range(len(results)), [f"{model}\n{count} at once" for model, count in results])
    axis.set_ylabel("output tokens/s, share of an unobserved server's")
    axis.legend()
    save(figure, path)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["demo"])
    parser.add_argument("--concurrency", nargs="+", type=positive, default=list(CONCURRENCY))
    parser.add_argument("--repetitions", type=positive, default=9, metavar="N", help="default: 9")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts; default: 0")
    add_output(parser, "observing", "png")
    return parser


if __name__ == "__main__":
    main()
