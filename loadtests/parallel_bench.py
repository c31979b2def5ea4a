"""Measure what a second rank is worth on this machine's cores, in turns, in one run.

    python loadtests/parallel_bench.py                       # 1, 8 and 32 at once, 9 repetitions
    python loadtests/parallel_bench.py --concurrency 8 --repetitions 3

All engines hold the same random weights of the llama-125m shape in bfloat16, each in processes of
its own that are stopped between their turns. In each repetition every engine has its turn with the
same new prompts, in a new random order; a ratio is that of two turns of one repetition. Timed are
output tokens per second, prefill included.

  TP 1        one rank with one thread: what the others are measured by
  TP 2        tensor parallelism: two ranks with one thread each
  2 threads   one rank with two threads: the same cores without exchanges between processes
  PP 2        pipeline parallelism: two ranks with one thread each and half of the layers
"""

import argparse
import contextlib
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from checkpoint import SHAPES, make_checkpoint
from command_line import add_output, exit_on_sigterm, make_parser, positive
from figures import Ratio, ratio
from paths import CACHE
from plot import draw_ratios, machine_and_day, make_figure, open_frame, save
from record import circumstances, output_stem, write_record
from report import markdown_table
from systems_under_test import Request, SideError, Worker
from thresholds import verdict

SHAPE = "llama-125m"
GOAL = 1.7
PROMPT_TOKENS = 64
NEW_TOKENS = {1: 128, 8: 96, 32: 64}
BASE, CONTENDER = "TP 1", "TP 2"
ENGINES: dict[str, dict[str, Any]] = {
    BASE: {},
    CONTENDER: {"tensor_parallel_size": 2},
    "2 threads": {"cpu_threads": 2},
    "PP 2": {"pipeline_parallel_size": 2},
}


@dataclass
class Turns:
    """Measurements of one engine at one concurrency, turn by turn.

    Attributes:
        rates: output tokens per second.
        spent: seconds of its first rank in each kind of operation, and in "all".
    """

    rates: list[float] = field(default_factory=list)
    spent: list[dict[str, float]] = field(default_factory=list)

    def share(self, phase: str) -> float:
        """Median share of a turn that the first rank spent so."""
        return statistics.median(one.get(phase, 0.0) / one["all"] for one in self.spent)


Results = dict[int, dict[str, Turns]]
"""Turns by concurrency and engine."""


def main() -> None:
    """Run the benchmark as the command line says."""
    options = _parser().parse_args()
    stem = output_stem(options.output, "parallel")
    exit_on_sigterm("parallel_bench")
    asked = {"repetitions": options.repetitions, "seed": options.seed, "orders": {}}
    about = circumstances("parallel_bench.py") | asked
    try:
        results = measure(options, about)
    except SideError as error:
        raise SystemExit(f"parallel_bench: {error}") from None
    print(as_markdown(results))
    recorded = {
        str(count): {name: vars(turns) for name, turns in row.items()}
        for count, row in results.items()
    }
    found = {**about, "results": recorded}
    written = write_record(stem, found, draw=partial(write_plot, results, about))
    print(f"\n{written}")


def measure(options: argparse.Namespace, about: dict[str, Any]) -> Results:
    """Load all engines, and let them take turns."""
    model = make_checkpoint(SHAPES[SHAPE], CACHE / SHAPE)
    seeds, orders = random.Random(options.seed), random.Random(f"orders {options.seed}")
    results: Results = {}
    names = list(options.engines)
    with contextlib.ExitStack() as stack:
        engines = {name: _start(stack, name, model) for name in names}
        about["versions"] = engines[names[0]].versions
        num_turns = len(options.concurrency) * (options.repetitions + 1) * len(names)
        progress = stack.enter_context(tqdm(total=num_turns, unit="turn", smoothing=0))
        for count in options.concurrency:
            results[count] = {name: Turns() for name in names}
            about["orders"][count] = []
            for repetition in range(-1, options.repetitions):
                prompts = _prompts(count, seeds)
                order = orders.sample(names, len(names))
                for name in order:
                    progress.set_description(f"{name}, {count} at once")
                    rate, spent = _turn(engines[name], prompts, NEW_TOKENS[count])
                    if repetition >= 0:
                        results[count][name].rates.append(rate)
                        results[count][name].spent.append(spent)
                    progress.update()
                if repetition >= 0:
                    about["orders"][count].append(order)
    return results


def _start(stack: contextlib.ExitStack, name: str, model: Path) -> Worker:
    settings = {
        "model": str(model),
        "device": "cpu",
        "cpu_threads": 1,
        "max_model_len": 512,
        "enable_prefix_caching": False,  # all have the same prompts
        **ENGINES[name],
    }
    engine = Worker(name, Path(sys.executable), "parallel_worker.py", settings)
    stack.callback(engine.close)
    engine.pause()
    return engine


def _turn(
    engine: Worker, prompts: list[list[int]], new_tokens: int
) -> tuple[float, dict[str, float]]:
    """A short completion that does not count, because the engine has slept; then the work."""
    engine.resume()
    try:
        _ask(engine, [Request(prompts[0][::-1], 4)])
        answer = _ask(engine, [Request(prompt, new_tokens) for prompt in prompts])
    finally:
        engine.pause()
    num_tokens = sum(len(request["tokens"]) for request in answer["wave"]["requests"])
    if num_tokens != new_tokens * len(prompts):
        raise SideError(f"{engine.name}: {num_tokens} tokens; {len(prompts)} times {new_tokens}")
    return num_tokens / answer["wave"]["seconds"], answer["spent"]


def _ask(engine: Worker, requests: list[Request]) -> dict[str, Any]:
    return engine.ask({"requests": [request._asdict() for request in requests]})


def _prompts(count: int, seeds: random.Random) -> list[list[int]]:
    vocab_size = SHAPES[SHAPE]["vocab_size"]
    return [[seeds.randrange(1, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def gains(row: dict[str, Turns]) -> dict[str, Ratio]:
    """Each engine's rate over that of one rank with one thread, pair by pair."""
    return {
        name: ratio(turns.rates, row[BASE].rates) for name, turns in row.items() if name != BASE
    }


def as_markdown(results: Results) -> str:
    """The table of a run."""
    head = ["at once", "engine", "tok/s", "over TP 1: median (its interval)", "efficiency"]
    head += [f"reaches {GOAL}", "in exchanges"]
    rows = []
    for count, row in results.items():
        gained = gains(row)
        for name, turns in row.items():
            over = gained.get(name)
            gain = [str(over), f"{over.median / 2:.0%}"] if over else ["1", ""]
            said = verdict(over.interval, GOAL) if over and name == CONTENDER else ""
            rate = f"{statistics.median(turns.rates):.1f}"
            share = f"{turns.share('exchange'):.1%}"
            rows.append([str(count), name, rate, *gain, said, share])
    return markdown_table(head, rows)


def write_plot(results: Results, about: dict[str, Any], path: Path) -> None:
    """Draw the gains beside the goal, and the parts of the first rank's time."""
    figure = make_figure(12, 4.4)
    left, right = figure.subplots(1, 2)
    names = [name for name in next(iter(results.values())) if name != BASE]
    width = 0.8 / max(len(names), 1)
    for index, name in enumerate(names):
        places = [at + (index - (len(names) - 1) / 2) * width for at in range(len(results))]
        gained = [gains(row)[name] for row in results.values()]
        draw_ratios(left, places, gained, width * 0.92, name)
    left.axhline(1.0, color="black", lw=0.6, ls="dashed")
    left.axhline(GOAL, color="#c0392b", lw=0.8, ls="dotted", label=f"goal of TP 2: {GOAL}")
    left.set_xticks(range(len(results)), [f"{count} at once" for count in results])
    left.set_title("output tokens/s over those of one rank with one thread\n(lines: all pairs)")
    left.set_ylim(top=left.get_ylim()[1] * 1.15)
    left.legend(frameon=False, fontsize=8, loc="upper center", ncols=len(names) + 1)
    _draw_phases(right, results)
    for axis in (left, right):
        open_frame(axis)
    figure.suptitle(f"{SHAPE}, bfloat16, {machine_and_day(about)}", fontsize=11)
    save(figure, path)


def _draw_phases(axis: Any, results: Results) -> None:
    """Milliseconds of the first rank per token and row, by kind of operation."""
    labels: list[str] = []
    bars: list[dict[str, float]] = []
    for count, row in results.items():
        for name, turns in row.items():
            rate = statistics.median(turns.rates)
            labels.append(f"{name}, {count}")
            phases = sorted({phase for one in turns.spent for phase in one} - {"all"})
            shares = {phase: turns.share(phase) for phase in phases}
            shares["the rest"] = 1 - sum(shares.values())
            bars.append({phase: 1000 * count / rate * share for phase, share in shares.items()})
    starts = [0.0] * len(bars)
    for phase in dict.fromkeys(phase for bar in bars for phase in bar):
        lengths = [bar.get(phase, 0.0) for bar in bars]
        axis.barh(range(len(bars)), lengths, left=starts, label=phase)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("ms per step, of the first rank")
    axis.set_title("where its time goes (engine, number at once)")
    axis.legend(frameon=False, fontsize=7)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    counts: Sequence[int] = tuple(NEW_TOKENS)
    parser.add_argument(
        "--concurrency", nargs="+", type=int, choices=counts, default=counts, help="default: all"
    )
    parser.add_argument(
        "--engines", nargs="+", choices=tuple(ENGINES), default=tuple(ENGINES), help="default: all"
    )
    parser.add_argument(
        "--repetitions", type=positive, metavar="N", default=9, help="counted ones (default: 9)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and orders (default: 0)")
    add_output(parser, "parallel", "png")
    return parser


if __name__ == "__main__":
    main()
