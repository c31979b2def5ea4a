"""Measure what it costs to observe a server: metrics that are read, requests that are traced, logs.

    python loadtests/observing_bench.py                       # the demo model, 1, 8 and 32 at once
    python loadtests/observing_bench.py --models llama-135m --concurrency 8

Four servers (`charonia serve`) with the same model take turns with the same new prompts, in a new
random order:

    unobserved      nobody looks; the log is text, at its usual level
    metrics read    the metrics page is read once a second
    traced          every request is traced, by tritonserver and by the scheduler
    everything      both; metrics also by vLLM's names; the log is JSON, at level debug
    other source    with --source DIR: unobserved, and served by the code of another checkout, such
                    as one without the lines whose cost is in question

A turn is ten seconds of work or more, and all its spans are sent before the next one begins.
Readers, a collector that drops what it gets, and the client share the machine's cores. A ratio is
that of two turns of one repetition, and the first repetition is not counted. Greedy, EOS ignored,
no prefix cache, no speculation.

By default it takes about 22 minutes on an idle machine.
"""

import argparse
import contextlib
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tritonclient.utils import InferenceServerException

from command_line import add_output, exit_on_sigterm, make_parser
from figures import Figures, Ratio, WrongOutputError, decode_figures, ratio
from observed_side import ObservedSide
from record import circumstances, output_stem, write_record
from report import markdown_table
from systems_under_test import SideError, Waves
from thresholds import verdict
from turns import (
    add_turns,
    checkpoint_of,
    draw_waves,
    engine_settings,
    least_waves,
    take_turns,
    write_ratios,
)

OFF, METRICS, TRACES, EVERYTHING = "unobserved", "metrics read", "traced", "everything"
OTHER = "other source"
SIDES = (METRICS, TRACES, EVERYTHING)
GOALS = {METRICS: 0.99}
"""Least ratios of tokens per second to those of `OFF`; the others have none."""
TURN_S = 10.0


@dataclass
class Case:
    """Measurements of one model and one number of requests at once.

    Attributes:
        num_waves: of a turn. figures: of each side that took part, one entry per turn.
        reads, failed_reads: of the metrics of each side.
    """

    num_waves: int
    figures: dict[str, list[Figures]]
    reads: dict[str, int] = field(default_factory=dict)
    failed_reads: dict[str, int] = field(default_factory=dict)

    @property
    def observed(self) -> list[str]:
        """The sides that are compared with the unobserved one."""
        return [name for name in self.figures if name != OFF]

    def rates(self, name: str) -> list[float]:
        """Tokens per second of a side, turn by turn."""
        return [one["tokens_per_second"] for one in self.figures[name]]

    def share(self, name: str) -> Ratio:
        """A side's tokens per second over those of the unobserved one."""
        return ratio(self.rates(name), self.rates(OFF))

    def as_json(self) -> dict[str, Any]:
        """Return its part of the record."""
        shares = {name: self.share(name) for name in self.observed}
        ratios = {
            name: asdict(share)
            | ({"goal": GOALS[name], "verdict": _judged(name, share)} if name in GOALS else {})
            for name, share in shares.items()
        }
        return asdict(self) | {"ratios": ratios}


Results = dict[tuple[str, int], Case]
"""Cases by model and concurrency."""


def main() -> None:
    """Measure as the command line says."""
    options = read_options()
    stem = output_stem(options.output, "observing")
    exit_on_sigterm("observing_bench")
    about = circumstances("observing_bench.py") | {"repetitions": options.repetitions}
    results: Results = {}
    try:
        for model in options.models:
            for count, case in measure(model, options):
                results[model, count] = case
    except (SideError, WrongOutputError, InferenceServerException) as error:
        about["failed"] = str(error)
    if results:
        table = as_markdown(results)
        print(table)
        recorded = {f"{model}, {count}": case.as_json() for (model, count), case in results.items()}
        found = {**about, "results": recorded}
        print(f"\n{write_record(stem, found, draw=partial(write_plot, results), table=table)}")
    if "failed" in about:
        raise SystemExit(f"observing_bench: {about['failed']}")


def measure(model: str, options: argparse.Namespace) -> Iterator[tuple[int, Case]]:
    """All concurrencies with one model, one after the other.

    Raises:
        SideError, WrongOutputError, InferenceServerException: a side cannot be started, or failed.
    """
    drawn = random.Random(f"{options.seed} {model}")
    with contextlib.ExitStack() as stack:
        sides = _start(stack, model, options)
        for count in options.concurrency:
            prompts = partial(draw_waves, model, drawn, count)
            num_waves = _waves_of_a_turn(sides[OFF], prompts, count, options.turn_seconds)
            before = {name: (side.reads, side.failed_reads) for name, side in sides.items()}
            figures = take_turns(
                f"{model}, {count} at once, {num_waves} waves",
                tuple(sides),
                options.repetitions,
                drawn,
                new_waves=partial(prompts, num_waves),
                turn=lambda name, waves: decode_figures(sides[name].run(waves), waves),
                after_first=lambda: _check_senders(sides),
            )
            reads = {name: side.reads - before[name][0] for name, side in sides.items()}
            failed = {name: side.failed_reads - before[name][1] for name, side in sides.items()}
            yield count, Case(num_waves, figures, reads, failed)


def _start(
    stack: contextlib.ExitStack, model: str, options: argparse.Namespace
) -> dict[str, ObservedSide]:
    checkpoint, settings = checkpoint_of(model), engine_settings(model)
    sides = {}
    for name in options.sides:
        is_everything = name == EVERYTHING
        names = {"scheduler.REPORT_CUSTOM_METRICS": "yes"} if is_everything else {}
        side = sides[name] = ObservedSide(
            checkpoint,
            settings | names,
            is_traced=name in (TRACES, EVERYTHING),
            is_read=name in (METRICS, EVERYTHING),
            options=["--log-format=json", "--log-level=debug"] if is_everything else [],
            source=options.source if name == OTHER else None,
        )
        stack.callback(side.close)
    return sides


def _waves_of_a_turn(
    side: ObservedSide, prompts: Callable[[int], Waves], count: int, turn_s: float
) -> int:
    """Return the number of waves of so many seconds on this side, by shorter turns before."""
    num_waves = least_waves(count)
    for seconds in (turn_s / 4, turn_s):
        traces = side.run(prompts(num_waves))
        per_wave = sum(wave.seconds for wave in traces) / num_waves
        num_waves = max(num_waves, math.ceil(seconds / per_wave))
    return num_waves


def _check_senders(sides: dict[str, ObservedSide]) -> None:
    for side in sides.values():
        side.check_senders()


def _judged(name: str, share: Ratio) -> str:
    return verdict(share.interval, GOALS[name])


def as_markdown(results: Results) -> str:
    """Tokens per second of each side, and its share of what an unobserved server has."""
    rates, shares = [], []
    first = next(iter(results.values()))
    are_read = [name for name in (METRICS, EVERYTHING) if name in first.figures]
    for (model, count), case in results.items():
        medians = [f"{statistics.median(case.rates(name)):,.0f}" for name in case.figures]
        reads = [f"{case.failed_reads[name]} of {case.reads[name]}" for name in are_read]
        rates.append([model, str(count), *medians, *reads])
        for name in case.observed:
            share, goal = case.share(name), GOALS.get(name)
            interval = share.interval
            shares.append(
                [
                    *(model, str(count), name),
                    f"{share.median:.3f}",
                    f"{interval.low:.3f} to {interval.high:.3f}" if interval else "too few pairs",
                    *(["none", ""] if goal is None else [f"{goal:g}", _judged(name, share)]),
                ]
            )
    head = ["model", "at once", *(f"tok/s, {name}" for name in first.figures)]
    head += [f"failed reads, {name}" for name in are_read]
    second = ["model", "at once", "side", f"tok/s over {OFF}", "interval", "goal", "verdict"]
    return f"{markdown_table(head, rates)}\n\n{markdown_table(second, shares)}\n"


def write_plot(results: Results, path: Path) -> None:
    """Tokens per second as a share of an unobserved server's; whiskers are all repetitions."""
    cases = list(results.values())
    shares = {name: [case.share(name) for case in cases] for name in cases[0].observed}
    write_ratios(path, list(results), shares, "output tokens/s, share of an unobserved server's")


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    add_turns(parser, ["demo"])
    parser.add_argument(
        "--sides",
        nargs="*",
        choices=SIDES,
        default=list(SIDES),
        help=f"which are compared with the one that is {OFF}; all by default",
    )
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="another checkout, to compare its code as well"
    )
    parser.add_argument(
        "--turn-seconds",
        type=float,
        default=TURN_S,
        metavar="S",
        help="about how long a turn of the unobserved side is; default: %(default)g",
    )
    add_output(parser, "observing", "png", "md")
    options = parser.parse_args(arguments)
    if options.source is not None and not (options.source / "python_backend/charonia").is_dir():
        parser.error(f"--source {options.source} is no checkout of charonia")
    options.sides = [OFF, *options.sides, *([OTHER] if options.source else [])]
    return options


if __name__ == "__main__":
    main()
