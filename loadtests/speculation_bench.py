"""Measure what speculative decoding gains and what it never costs, in turns, in one run.

    python loadtests/speculation_bench.py                      # all cases, 9 repetitions
    python loadtests/speculation_bench.py --cases demo copy --repetitions 11
    python loadtests/speculation_bench.py --cases sweep --concurrency 1 4

Timed are output tokens per second of a whole turn, a second or two of work. In each repetition all
entries of a round have their turn with the same new prompts, in a new random order; a ratio is that
of two turns of one repetition. Before what counts, each row completes 500 tokens. EOS is ignored
and nothing is cached across requests. Text that goes in circles counts nowhere
(text_repetition.py).

  synthetic    llama-135m's shape and a small random draft model over Triton, drafts accepted with
               probability 0.8, against the same server asked not to speculate
  demo         the demo model and its draft model over Triton, on files it was not trained on
  copy         the demo model over Triton, edits of such files, drafts copied from the text
  sweep        all depths and the adaptive one in-process, against the best of the others
  adversarial  drafts that are always wrong in-process, against no speculation at all
"""

import argparse
import contextlib
import random
import sys
from functools import partial
from pathlib import Path

from tqdm import tqdm

from charonia.config import DEMO_CHECKPOINT, DEMO_DRAFT_CHECKPOINT
from checkpoint import SHAPES, make_checkpoint
from command_line import add_output, exit_on_sigterm, make_parser, positive
from figures import WrongOutputError, check_counts
from lifecycle import SideSet
from paths import CACHE
from record import circumstances, output_stem, write_record
from speculation.prompts import HeldOutFiles, random_prompts
from speculation.served import ServedSide, ServedTrace
from speculation.speculation_plot import write_plot
from speculation.speculation_report import EntryResult, Report, RoundResult, as_markdown
from speculation.trials import CASES, DEMO_CONCURRENCY, DRAFT_SHAPE, Group, Pair, Round, make_groups
from systems_under_test import Request, Side, SideError, WaveTrace, WorkerSide
from workloads import Entry

WAKE_TOKENS = 4
PROMPT_TOKENS, SHORT_PROMPT_TOKENS = 128, 64
DEMO_TURNS = {1: (192,) * 5, 4: (192,) * 3, 16: (192,), 64: (96,)}
SHAPE_TURNS = {1: (96, 96), 4: (96,), 16: (64,), 64: (32,)}


def main() -> None:
    """Run the benchmark as the command line says."""
    options = _parser().parse_args()
    stem = output_stem(options.output, "speculation")
    exit_on_sigterm("speculation_bench")
    about = circumstances("speculation_bench.py")
    report = Report(
        {**about, "versions": {}, "repetitions": options.repetitions, "seed": options.seed}
    )
    groups = make_groups(options.cases, *_pairs(options.seed), options.concurrency)
    num_turns = sum(
        _num_turns(each, options.repetitions) for group in groups for each in group.rounds
    )
    try:
        with tqdm(total=num_turns, unit="turn", smoothing=0) as progress:
            for group in groups:
                _measure(report, group, options, progress)
    except (SideError, WrongOutputError) as error:
        raise SystemExit(f"speculation_bench: {error}") from None
    print(as_markdown(report))
    written = write_record(stem, report.as_json(), draw=partial(write_plot, report))
    print(f"\n{written}")


def _measure(report: Report, group: Group, options: argparse.Namespace, progress: tqdm) -> None:
    """Load a group's engines and let its rounds' entries take turns."""
    seeds, orders = random.Random(options.seed), random.Random(f"orders {options.seed}")
    with contextlib.ExitStack() as stack:
        progress.set_description("loading")
        found = _start_sides(stack, group)
        versions = {name: side.versions for name, side in found.sides.items()}
        report.about["versions"] |= {k: v for each in versions.values() for k, v in each.items()}
        for round_ in group.rounds:
            result = RoundResult(round_, {e.label: EntryResult() for e in round_.entries})
            new_tokens = [min(num, options.max_new_tokens) for num in round_.new_tokens]
            for repetition in range(-round_.num_warm_ups, options.repetitions):
                waves = [_wave(round_, num, seeds.getrandbits(32)) for num in new_tokens]
                order = round_.in_turn(orders)
                for entry in order:
                    progress.set_description(f"{round_.case}, {entry.label}")
                    traces = _turn(found, entry, round_, waves)
                    if repetition >= 0:
                        _add(result.entries[entry.label], traces)
                    progress.update()
                if repetition >= 0:
                    result.orders.append([entry.label for entry in order])
            report.rounds.append(result)


def _start_sides(stack: contextlib.ExitStack, group: Group) -> SideSet:
    """Start a group's engines one after the other; `stack` closes them."""
    found = SideSet()
    for name, settings in group.engines.items():
        side: Side
        if group.is_served:
            side = ServedSide(settings)
        else:
            side = WorkerSide(name, Path(sys.executable), "charonia_worker.py", settings)
        stack.callback(side.close)
        if isinstance(side, WorkerSide):
            side.pause()
        found.sides[name] = side
    return found


Wave = tuple[list[Request], int]
"""Requests, seed."""


def _wave(round_: Round, new_tokens: int, seed: int) -> Wave:
    prompts = round_.prompts(round_.concurrency)
    return [Request(prompt, new_tokens) for prompt in prompts], seed


def _turn(found: SideSet, entry: Entry, round_: Round, waves: list[Wave]) -> list[WaveTrace]:
    """A short completion that does not count, because the side may have slept; then the work."""
    sampling = {**round_.sampling, **entry.sampling}

    def work(side: Side) -> list[WaveTrace]:
        first, _ = waves[0]
        side.run([[Request(first[0].prompt[::-1], WAKE_TOKENS)]], sampling)
        traces = []
        for requests, seed in waves:
            traces += side.run([requests], {**sampling, "seed": seed})
            check_counts(traces[-1:], [requests])
        return traces

    try:
        return found.turn(entry.side, work)
    except WrongOutputError as error:
        raise WrongOutputError(f"{entry.label}: {error}") from None


def _add(result: EntryResult, traces: list[WaveTrace]) -> None:
    """Add one turn to what an entry did."""
    requests = [request for trace in traces for request in trace.requests]
    num_tokens = sum(len(request.tokens) for request in requests)
    result.rates.append(num_tokens / sum(trace.seconds for trace in traces))
    result.outputs += [request.tokens for request in requests]
    result.num_chunks += sum(len(request.counts) for request in requests)
    result.timings += [request.timing for request in requests if isinstance(request, ServedTrace)]


def _num_turns(round_: Round, repetitions: int) -> int:
    return (round_.num_warm_ups + repetitions) * len(round_.entries)


def _pairs(seed: int) -> tuple[Pair, Pair]:
    """The shape with random weights, made on the spot, and the demo pair."""
    shape = Pair(
        name="llama-135m",
        model=make_checkpoint(SHAPES["llama-135m"], CACHE / "llama-135m"),
        draft=make_checkpoint(DRAFT_SHAPE, CACHE / "llama-135m-draft", seed=1),
        prompts=random_prompts(PROMPT_TOKENS, seed),
        short_prompts=random_prompts(SHORT_PROMPT_TOKENS, seed),
        turns=SHAPE_TURNS,
        max_model_len=384,
    )
    files = HeldOutFiles(DEMO_CHECKPOINT)
    demo = Pair(
        name="demo",
        model=DEMO_CHECKPOINT,
        draft=DEMO_DRAFT_CHECKPOINT,
        prompts=files.stretches(PROMPT_TOKENS, seed),
        short_prompts=files.stretches(SHORT_PROMPT_TOKENS, seed),
        turns=DEMO_TURNS,
        edits=files.edits(seed),
    )
    return shape, demo


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=CASES, help="what to measure (default: all)"
    )
    parser.add_argument(
        "--repetitions", type=positive, metavar="N", default=9, help="counted ones (default: 9)"
    )
    parser.add_argument(
        "--concurrency",
        nargs="+",
        type=int,
        choices=DEMO_CONCURRENCY,
        help="of the sweep (default: all for the demo pair, up to 16 for llama-135m)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        default=200,
        help="of any completion, to see quickly whether all works (default: 200, which cuts none)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and orders (default: 0)")
    add_output(parser, "speculation", "png")
    return parser


if __name__ == "__main__":
    main()
