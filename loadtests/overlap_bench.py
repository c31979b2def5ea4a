"""Measure what steps that overlap are worth behind Triton, in turns, in one run.

    python loadtests/overlap_bench.py                        # both models, 1, 8 and 32 at once
    python loadtests/overlap_bench.py --models demo --concurrency 1 --repetitions 3

Three sides with the same model: charonia behind a tritonserver with `async_scheduling` and without
it, asked by gRPC streams from this process, and charonia in a process of its own without Triton,
where the next step begins as soon as the last one is through. In each repetition every side has its
turn with the same new prompts, in a new random order; a ratio is that of two turns of one
repetition, and the first repetition is not counted. Greedy, EOS ignored, no prefix cache, no
speculation. Besides tokens per second it says what processor time went where: with two cores, what
tritonserver, the scheduler and the client take, the engine lacks.
"""

import argparse
import contextlib
import os
import random
import statistics
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from command_line import add_output, exit_on_sigterm, make_parser
from figures import Figures, decode_figures, median_figures, ratio
from record import circumstances, output_stem, write_record
from report import markdown_table
from systems_under_test import BASE, SPECS, Side, Waves, WorkerSide
from thresholds import verdict
from triton_side import TritonSide
from turns import (
    MODELS,
    add_turns,
    checkpoint_of,
    draw_waves,
    engine_settings,
    least_waves,
    take_turns,
    write_ratios,
)

ON, OFF, ALONE = "overlap", "one at a time", "without Triton"
SIDES = (ON, OFF, ALONE)
GOALS = {1: 0.95, 8: 0.92, 32: 0.92}
"""Of `ON` over `ALONE`, by concurrency."""


@dataclass
class Turns:
    """Measurements of one side in one case, turn by turn.

    Attributes:
        figures: see `figures.decode_figures`.
        busy: processor seconds per output token, by process.
    """

    figures: list[Figures] = field(default_factory=list)
    busy: list[dict[str, float]] = field(default_factory=list)

    def all_of(self, name: str) -> list[float]:
        """One figure of each turn."""
        return [one[name] for one in self.figures]


Results = dict[tuple[str, int], dict[str, Turns]]
"""Turns by model and concurrency, then by side."""


def main() -> None:
    """Measure as the command line says."""
    options = _parser().parse_args()
    stem = output_stem(options.output, "overlap")
    exit_on_sigterm("overlap_bench")
    about = circumstances("overlap_bench.py") | {"repetitions": options.repetitions}
    results: Results = {}
    for model in options.models:
        results |= measure(model, options)
    print(as_markdown(results))
    recorded = {
        f"{model}, {count}": {name: vars(turns) for name, turns in case.items()}
        for (model, count), case in results.items()
    }
    found = {**about, "results": recorded}
    written = write_record(stem, found, draw=partial(write_plot, results))
    print(f"\n{written}")


def measure(model: str, options: argparse.Namespace) -> Results:
    """All concurrencies with one model."""
    drawn = random.Random(f"{options.seed} {model}")
    results: Results = {}
    with contextlib.ExitStack() as stack:
        sides = _start(stack, model)
        for count in options.concurrency:
            found = take_turns(
                f"{model}, {count} at once",
                SIDES,
                options.repetitions,
                drawn,
                new_waves=partial(draw_waves, model, drawn, count, least_waves(count)),
                turn=lambda name, waves: _turn(sides[name], waves),
            )
            results[model, count] = {
                name: Turns([figures for figures, _ in turns], [busy for _, busy in turns])
                for name, turns in found.items()
            }
    return results


def _start(stack: contextlib.ExitStack, model: str) -> dict[str, Side]:
    checkpoint, settings = checkpoint_of(model), engine_settings(model)
    sides: dict[str, Side] = {
        name: TritonSide(checkpoint, {**settings, "async_scheduling": name == ON})
        for name in (ON, OFF)
    }
    spec = SPECS[BASE]
    settings |= {"model": str(checkpoint), "async_scheduling": False}
    sides[ALONE] = worker = WorkerSide(ALONE, spec.python, spec.script, settings)
    for side in sides.values():
        stack.callback(side.close)
    worker.pause()
    return sides


def _turn(side: Side, waves: Waves) -> tuple[Figures, dict[str, float]]:
    if isinstance(side, WorkerSide):
        side.resume()
    before = _cpu_seconds(side)
    traces = side.run(waves)
    after = _cpu_seconds(side)
    if isinstance(side, WorkerSide):
        side.pause()
    total = sum(request.max_tokens for wave in waves for request in wave)
    busy = {name: (seconds - before[name]) / total for name, seconds in after.items()}
    return decode_figures(traces, waves), busy


def _cpu_seconds(side: Side) -> dict[str, float]:
    """Processor seconds so far: of the client, of each Triton model's process, of the server."""
    own = os.times()
    found = {"client": own.user + own.system}
    for process in side.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            command, times = " ".join(process.cmdline()), process.cpu_times()
            models = [name for name in ("engine", "scheduler") if f"/{name}/" in command]
            name = models[0] if models else "server and others"
            found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def as_markdown(results: Results) -> str:
    """The ratios, and where processor time went."""
    rows, spent = [], []
    for (model, count), case in results.items():
        rates = {name: turns.all_of("tokens_per_second") for name, turns in case.items()}
        gaps = {name: turns.all_of("inter_token_ms_p50") for name, turns in case.items()}
        against = ratio(rates[ON], rates[ALONE])
        rows.append(
            [
                model,
                str(count),
                *(f"{statistics.median(rates[name]):,.0f}" for name in SIDES),
                *(f"{statistics.median(gaps[name]):.2f}" for name in SIDES),
                str(ratio(rates[ON], rates[OFF])),
                str(ratio(gaps[ON], gaps[OFF])),
                f"{against}, {verdict(against.interval, GOALS.get(count, 0.92))}",
            ]
        )
        for name in (ON, OFF):
            busy = median_figures(case[name].busy)
            parts = [f"{1e3 * busy[part]:.3f}" for part in _PARTS]
            spent.append([model, str(count), name, *parts])
    first = markdown_table(
        [
            *("model", "at once"),
            *(f"tok/s, {name}" for name in SIDES),
            *(f"between tokens, ms, {name}" for name in SIDES),
            f"tok/s, {ON} / {OFF}",
            f"between tokens, {ON} / {OFF}",
            f"tok/s, {ON} / {ALONE}",
        ],
        rows,
    )
    header = ["model", "at once", "side", *(f"{part}, processor ms per token" for part in _PARTS)]
    return f"{first}\n\n{markdown_table(header, spent)}"


_PARTS = ("engine", "scheduler", "server and others", "client")


def write_plot(results: Results, path: Path) -> None:
    """Tokens per second as a share of those without Triton; whiskers are all repetitions."""
    shares = {
        name: [
            ratio(case[name].all_of("tokens_per_second"), case[ALONE].all_of("tokens_per_second"))
            for case in results.values()
        ]
        for name in (OFF, ON)
    }
    label = "output tokens/s behind Triton, share of those without it"
    write_ratios(path, list(results), shares, label)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    add_turns(parser, MODELS)
    add_output(parser, "overlap", "png")
    return parser


if __name__ == "__main__":
    main()
