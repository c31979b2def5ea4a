"""Measure charonia, charonia behind Triton and their peers, in turns, in one run.

    python loadtests/bench.py                                  # llama-135m shape, random weights
    python loadtests/bench.py --shape llama-1b --sides charonia vllm
    python loadtests/bench.py --model DIR --concurrency 1 4 --cases decode
    python loadtests/bench.py --cases traces --traces ../shared/traces

First each way to run vLLM is timed with work of the kinds that are asked for, and charonia and vLLM
in the fastest way decode with nothing else loaded. Then all sides are loaded at once, each in
processes of its own that are stopped while others have their turn. Every repetition has new random
prompts, the same for all sides, and a new random order; the first is not counted. Greedy, EOS
ignored, no caches across requests, no speculation. What the machine can do at most is measured in
the same run. Tables go to stdout, everything to JSON.
"""

import argparse
import contextlib
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench_plot import write_plot
from bench_report import Report, RoundResult, as_markdown
from command_line import add_output, exit_on_sigterm, make_parser, positive
from figures import Figures, WrongOutputError, common_prefix, figures_of
from isolated_runs import IsolatedRuns, Probe, probe, rates_alone
from lifecycle import Launcher, SideSet, start_sides
from limits import Machine, ModelCost
from paths import CACHE, LOADTESTS
from record import circumstances, output_stem, write_record
from systems_under_test import (
    BASE,
    NAMES,
    SPECS,
    VLLM,
    Request,
    Side,
    SideError,
    Waves,
    WaveTrace,
    Worker,
)
from text_repetition import circling_share
from traffic import Traffic, TrafficError, read_traffic
from vllm_variants import Variant, variants_named, vllm_variants, with_budgets
from workloads import CASES, NOT_IN_TRACES, Entry, Round, budget_rounds, make_rounds, probe_rounds

SHAPES = ("llama-135m", "llama-1b")
WAKE_PROMPT_TOKENS, WAKE_TOKENS = 32, 4
Tokens = dict[str, list[list[int]]]
"""Greedy tokens of every request of a repetition, by label."""


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = _parser()
    options = parser.parse_args()
    model = _model(options, parser)
    traffic = _traffic(options, model, parser)
    what = options.model.name if options.model else options.shape
    stem = output_stem(options.output, "bench" if what == SHAPES[0] else f"bench-{what}")
    exit_on_sigterm("bench")
    try:
        report = _run(options, model, traffic)
    except (SideError, WrongOutputError) as error:
        raise SystemExit(f"bench: {error}") from None
    print(as_markdown(report))
    written = write_record(stem, report.as_json(), draw=partial(write_plot, report))
    print(f"\n{written}")


def _run(options: argparse.Namespace, model: Path, traffic: Sequence[Traffic]) -> Report:
    # Prompt and output must fit; the sides size their caches by it.
    lengths = [options.prompt_tokens + options.new_tokens]
    if "long" in options.cases:
        lengths += [length + 1 for length in options.long_tokens]
    lengths += [each.most_tokens for each in traffic]
    max_model_len = -(-max(lengths) // 64) * 64
    settings = {"model": str(model), "dtype": options.dtype, "max_model_len": max_model_len}
    launcher = Launcher(settings, CACHE)
    alone = _alone(launcher, options, model, traffic)
    with contextlib.ExitStack() as stack:
        found = start_sides(
            stack, options.sides, launcher, with_int8="int8" in options.cases, say=_say
        )
        limits = Worker("limits", Path(sys.executable), "limits_worker.py", {})
        stack.callback(limits.close)
        limits.pause()
        rounds = _rounds(options, options.cases, list(found.sides), traffic)
        if not rounds:
            raise SideError("none of the sides can do any of the cases")
        report = Report(_about(options, model, found, limits), _cost(model), alone=alone)
        _measure(report, rounds, found, limits, options)
        report.idle = {name: asdict(times) for name, times in found.idleness.items()}
    return report


def _alone(
    launcher: Launcher, options: argparse.Namespace, model: Path, traffic: Sequence[Traffic]
) -> IsolatedRuns:
    """Take the fastest way to run vLLM, and have it and charonia alone on the machine."""
    alone = IsolatedRuns()
    vocab_size = min(options.vocab, _vocab_size(model))
    rounds = _rounds(options, options.cases, [BASE], traffic)
    rounds = rounds or _rounds(options, ["decode"], [BASE])  # with quantized sides alone
    decode = [round_ for round_ in rounds if round_.kind == "decode"]
    for name in (BASE, VLLM):
        if options.sides is not None and name not in options.sides:
            continue
        if SPECS[name].missing():
            continue  # start_sides says so
        if name == VLLM:
            alone.probes = _probes(launcher, rounds, vocab_size, options.vllm_ways)
            if alone.probes[0].failure is not None:
                continue  # it fails in every way; start_sides says why
            launcher.variants[VLLM] = alone.probes[0].variant
        if not decode:
            continue
        _say(f"alone on the machine: {name}")
        try:
            with contextlib.closing(launcher.start(name)) as side:
                alone.controls[name] = rates_alone(
                    side, decode, options.repetitions, vocab_size, options.seed
                )
        except (SideError, WrongOutputError) as error:
            _say(f"{name} alone on the machine: {error}")
    return alone


def _probes(
    launcher: Launcher, rounds: Sequence[Round], vocab_size: int, names: Sequence[str] | None
) -> list[Probe]:
    """Time the ways to run vLLM, the fastest first; with long prompts also other step sizes.

    Args:
        names: of the ways to choose from; a single one is not timed. None for all.

    Raises:
        SideError: there is no way of one of these names.
    """

    def start(variant: Variant) -> Side:
        return launcher.start(VLLM, variant)

    ways = vllm_variants(SPECS[VLLM].python.parents[1])
    if names is not None:
        try:
            ways = variants_named(ways, names)
        except ValueError as error:
            raise SideError(f"--vllm-ways: {error}") from None
        if len(ways) == 1:
            return [Probe(ways[0])]
    _say(f"alone on the machine: {VLLM}")
    if names is not None:
        rounds = budget_rounds(rounds) or probe_rounds(rounds)
        return probe(start, ways, rounds, vocab_size, _say, num_finals=0)
    found = probe(start, ways, probe_rounds(rounds), vocab_size, _say)
    if not found[0].rates or not (large := budget_rounds(rounds)):
        return found
    best = found[0].variant
    with_other = probe(start, [best, *with_budgets(best)], large, vocab_size, _say, num_finals=0)
    return [*with_other, *found] if with_other[0].rates else found


def _rounds(
    options: argparse.Namespace,
    cases: Sequence[str],
    sides: Sequence[str],
    traffic: Sequence[Traffic] = (),
) -> list[Round]:
    return make_rounds(
        cases,
        options.concurrency,
        sides,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        min_requests=options.min_requests,
        seed=options.seed,
        long_tokens=options.long_tokens,
        long_concurrency=options.long_concurrency,
        traffic=traffic,
        trace_requests=options.trace_requests,
    )


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


def _measure(
    report: Report,
    rounds: list[Round],
    found: SideSet,
    limits: Worker,
    options: argparse.Namespace,
) -> None:
    """Fill in the report's rounds and agreement."""
    shuffler, orders = random.Random(options.seed), random.Random(f"orders {options.seed}")
    vocab_size = min(options.vocab, report.about["vocab_size"])
    seen: list[Tokens] = []
    total = (options.repetitions + 1) * sum(len(round_.entries) for round_ in rounds)
    with tqdm(total=total, unit="turn", smoothing=0) as progress:
        for round_ in rounds:
            result = RoundResult(round_, {entry.label: [] for entry in round_.entries})
            report.rounds.append(result)
            for repetition in range(-1, options.repetitions):
                asked = round_.requests(vocab_size, shuffler)
                tokens: Tokens = {}
                order = round_.in_turn(orders)
                for entry in order:
                    progress.set_description(f"{round_.name}, {entry.label}")
                    waves = _turn(found, entry, asked)
                    tokens[entry.label] = [r.tokens for wave in waves for r in wave.requests]
                    figures = _figures(entry, round_, waves, asked)
                    if repetition >= 0:  # the first one warms up
                        result.runs[entry.label].append(figures)
                    progress.update()
                if repetition >= 0:
                    result.orders.append([entry.label for entry in order])
                    result.machine.append(_reading(limits))
                    if round_.kind == "decode":
                        seen.append(tokens)
    report.agreement = _agreement(seen, options.new_tokens)
    report.circling = circling_share([text for tokens in seen for text in tokens.get(BASE, [])])


def _turn(found: SideSet, entry: Entry, asked: Waves) -> list[WaveTrace]:
    """A short completion that does not count, because the side was stopped; then the work."""

    def work(side: Side) -> list[WaveTrace]:
        prompt = asked[0][0].prompt[::-1]
        side.run([[Request(prompt[:WAKE_PROMPT_TOKENS], WAKE_TOKENS)]], entry.sampling)
        return side.run(asked, entry.sampling)

    return found.turn(entry.side, work)


def _figures(entry: Entry, round_: Round, waves: list[WaveTrace], asked: Waves) -> Figures:
    try:
        return figures_of(round_.kind, waves, asked)
    except WrongOutputError as error:
        raise WrongOutputError(f"{entry.label}, {round_.name}: {error}") from None


def _reading(limits: Worker) -> Machine:
    limits.resume()
    try:
        return Machine(**limits.ask({}))
    finally:
        limits.pause()


def _agreement(seen: list[Tokens], new_tokens: int) -> dict[str, Any]:
    """Compare the sides' greedy tokens by their mean common prefix, in tokens, with one side.

    Samples, and labels without tokens, are left out.
    """
    labels = {label for tokens in seen for label, lists in tokens.items() if all(lists)}
    labels = {label for label in labels if label in NAMES}
    reference = "transformers" if "transformers" in labels else BASE
    if reference not in labels or len(labels) < 2:
        return {}
    means = {}
    for label in sorted(labels - {reference}):
        prefixes = [
            common_prefix(left, right)
            for tokens in seen
            if label in tokens and reference in tokens
            for left, right in zip(tokens[label], tokens[reference], strict=True)
        ]
        means[label] = statistics.mean(prefixes)
    return {"reference": reference, "new_tokens": new_tokens, "mean_common_prefix": means}


def _model(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Path:
    """The checkpoint; a process of its own makes one of a shape, and then frees its memory."""
    if options.model is not None:
        if not (options.model / "config.json").is_file():
            parser.error(f"--model: there is no config.json in {options.model}")
        return options.model.resolve()
    directory = CACHE / options.shape
    subprocess.run(
        [sys.executable, str(LOADTESTS / "checkpoint.py"), options.shape, str(directory)],
        check=True,
    )
    return directory


def _traffic(
    options: argparse.Namespace, model: Path, parser: argparse.ArgumentParser
) -> list[Traffic]:
    """Read the recorded traffic of each file, if the case "traces" is asked for."""
    if "traces" not in options.cases:
        return []
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    most_tokens = min(options.trace_tokens, config.get("max_position_embeddings", math.inf))
    try:
        return [
            read_traffic(
                options.traces,
                name,
                most_tokens=most_tokens,
                num_requests=options.trace_requests,
            )
            for name in options.trace_files
        ]
    except TrafficError as error:
        parser.error(str(error))


def _vocab_size(model: Path) -> int:
    return json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]


def _cost(model: Path) -> ModelCost | None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return ModelCost.of_llama(model) if config["model_type"] == "llama" else None


def _about(
    options: argparse.Namespace, model: Path, found: SideSet, limits: Worker
) -> dict[str, Any]:
    left_out = dict(found.left_out)
    if "traces" in options.cases:
        left_out |= {f"{n} in traces": why for n, why in NOT_IN_TRACES.items() if n in found.sides}
    return {
        **circumstances("bench.py"),
        "versions": {name: side.versions for name, side in found.sides.items()},
        "notes": {name: side.notes for name, side in found.sides.items()}
        | {"limits": limits.notes},
        "left_out": left_out,
        "model": model.name,
        "vocab_size": _vocab_size(model),
        "dtype": options.dtype,
        "repetitions": options.repetitions,
        "seed": options.seed,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
    }


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    number = {"type": positive, "metavar": "N"}
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, metavar="DIR", help="measure this checkpoint")
    model.add_argument(
        "--shape",
        choices=SHAPES,
        default=SHAPES[0],
        help="measure random weights of this shape (default: %(default)s)",
    )
    parser.add_argument("--sides", nargs="+", choices=NAMES, help="default: all that are installed")
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=["decode", "prefill", "sampled"],
        help="decode: all sides, greedily; prefill: 1 and 8 prompts, one token; long: prompts of "
        "many tokens, one token; sampled: charonia with temperature 0.8 and top-p 0.95 beside "
        "itself; int8: charonia with int8 weights and llama.cpp with Q8_0 beside all others; "
        "traces: prompts and answers as long as recorded ones (default: decode prefill sampled)",
    )
    parser.add_argument(
        "--concurrency",
        nargs="+",
        default=[1, 8, 32],
        help="prompts handed over at once (default: 1 8 32)",
        **number,
    )
    parser.add_argument("--repetitions", default=9, help="counted ones (default: 9)", **number)
    parser.add_argument(
        "--min-requests",
        default=4,
        help="a repetition with fewer prompts at once hands them over several times, one after the "
        "other (default: 4)",
        **number,
    )
    parser.add_argument("--prompt-tokens", default=128, help="of a prompt (default: 128)", **number)
    parser.add_argument(
        "--long-tokens",
        nargs="+",
        default=[512, 1024, 2048, 4096, 7000, 16384],
        help="of the prompts of `long` (default: 512 1024 2048 4096 7000 16384)",
        **number,
    )
    parser.add_argument(
        "--long-concurrency",
        nargs="+",
        default=[1, 4],
        help="prompts of `long` handed over at once (default: 1 4)",
        **number,
    )
    parser.add_argument("--new-tokens", default=64, help="of a completion (default: 64)", **number)
    _add_trace_options(parser, number)
    parser.add_argument("--dtype", default="bfloat16", help="of weights (default: bfloat16)")
    parser.add_argument(
        "--vocab", default=4096, help="prompts' token ids are below this (default: 4096)", **number
    )
    parser.add_argument(
        "--vllm-ways",
        nargs="+",
        metavar="NAME",
        help="ways to run vLLM, by the names that another run shows: of several the fastest is "
        "taken (default: all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and orders (default: 0)")
    add_output(parser, "bench[-MODEL]", "png")
    return parser


def _add_trace_options(parser: argparse.ArgumentParser, number: dict[str, Any]) -> None:
    parser.add_argument(
        "--traces",
        type=Path,
        default=Path("../shared/traces"),
        metavar="DIR",
        help="where the files of `traces` are (default: %(default)s)",
    )
    parser.add_argument(
        "--trace-files",
        nargs="+",
        default=["azure_code.csv.gz", "conversation.jsonl.gz"],
        metavar="NAME",
        help="of `traces`, a round each (default: azure_code.csv.gz conversation.jsonl.gz)",
    )
    parser.add_argument(
        "--trace-requests",
        default=16,
        help="consecutive requests of a trace that are handed over at once (default: 16)",
        **number,
    )
    parser.add_argument(
        "--trace-tokens",
        default=16384,
        help="of prompt and answer, as far as the model goes; longer requests of a trace are left "
        "out (default: 16384)",
        **number,
    )


if __name__ == "__main__":
    main()
