"""Measure charonia in this process and behind Triton, in one run, and print what Triton costs.

    python loadtests/bench.py                      # llama-135m shape, random weights
    python loadtests/bench.py --model DIR --concurrency 1 4 --repetitions 5

Both sides are loaded at once and take turns, so that a machine that slows down slows both. Every
repetition has new random prompts; sampling is greedy and EOS is ignored. The median repetition is
reported, with the JSON of all of them and a plot in loadtests/results/.
"""

import argparse
import contextlib
import datetime
import json
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm import tqdm

from checkpoint import make_llama_135m
from sides import InProcess, Side, Trace, over_triton

RESULTS = Path(__file__).parent / "results"
CACHE = Path(tempfile.gettempdir()) / "charonia-bench"


def main() -> None:
    """Run the benchmark as the command line says."""
    options = _parser().parse_args()
    model = options.model or make_llama_135m(CACHE / "llama-135m")
    settings = {"dtype": options.dtype, "enable_prefix_caching": False}
    shuffler = random.Random(options.seed)
    measured: dict[int, dict[str, list[dict[str, float]]]] = {}
    with contextlib.ExitStack() as stack:
        sides = [
            stack.enter_context(contextlib.closing(InProcess(model, settings))),
            stack.enter_context(over_triton(model, settings)),
        ]
        total = len(options.concurrency) * options.repetitions * len(sides)
        progress = stack.enter_context(tqdm(total=total, unit="run"))
        for concurrency in options.concurrency:
            measured[concurrency] = {side.name: [] for side in sides}
            for repetition in range(-1, options.repetitions):
                for side in sides:
                    progress.set_description(f"{side.name}, concurrency {concurrency}")
                    figures = _measure(side, options, concurrency, shuffler)
                    if repetition >= 0:  # the first one warms up
                        measured[concurrency][side.name].append(figures)
                        progress.update()
    report = {"about": _about(options, model), "runs": measured}
    print(_table(measured))
    if options.output is not None:
        _write(report, options.output)


def _measure(
    side: Side, options: argparse.Namespace, concurrency: int, shuffler: random.Random
) -> dict[str, float]:
    count = max(concurrency, options.min_requests)
    prompts = [
        [shuffler.randrange(1, options.vocab) for _ in range(options.prompt_tokens)]
        for _ in range(count)
    ]
    traces = side.run(prompts, options.new_tokens, concurrency)
    return _figures(traces, options.new_tokens)


def _figures(traces: Sequence[Trace], new_tokens: int) -> dict[str, float]:
    """Throughput over the whole run; latencies in milliseconds."""
    num_tokens = sum(sum(trace.num_tokens) for trace in traces)
    if num_tokens != new_tokens * len(traces):
        raise RuntimeError(f"{num_tokens} tokens for {len(traces)} requests of {new_tokens}")
    seconds = max(t.arrivals[-1] for t in traces) - min(t.sent_at for t in traces)
    ttfts = [trace.ttft * 1000 for trace in traces]
    gaps = [gap * 1000 for trace in traces for gap in trace.gaps()]
    return {
        "output_tokens_per_second": num_tokens / seconds,
        "ttft_ms_p50": statistics.median(ttfts),
        "ttft_ms_p95": _quantile(ttfts, 0.95),
        "inter_token_ms_p50": statistics.median(gaps),
        "inter_token_ms_p95": _quantile(gaps, 0.95),
    }


def _quantile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]


def _median_run(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _table(measured: dict[int, dict[str, list[dict[str, float]]]]) -> str:
    """One line per concurrency and side; then the ratios. Where they disagree, it is noise."""
    lines = [
        "| concurrency | side | output tok/s | TTFT p50 | p95 ms | inter-token p50 | p95 ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for concurrency, by_side in measured.items():
        for name, runs in by_side.items():
            row = [f"{value:.1f}" for value in _median_run(runs).values()]
            lines.append(f"| {concurrency} | {name} | {' | '.join(row)} |")
    lines.append("")
    for concurrency, by_side in measured.items():
        ratios = [
            behind["output_tokens_per_second"] / bare["output_tokens_per_second"]
            for bare, behind in zip(by_side["in-process"], by_side["triton"], strict=True)
        ]
        medians = [
            _median_run(by_side[name])["output_tokens_per_second"]
            for name in ("triton", "in-process")
        ]
        lines.append(
            f"concurrency {concurrency}: Triton over in-process throughput: medians "
            f"{medians[0] / medians[1]:.2f}; pair by pair {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    return "\n".join(lines)


def _about(options: argparse.Namespace, model: Path) -> dict[str, object]:
    cpu = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    names = ("Model name", "CPU(s)", "L3 cache")
    machine = {
        line.split(":")[0].strip(): line.split(":")[1].strip()
        for line in cpu.splitlines()
        if line.split(":")[0].strip() in names
    }
    packages = ("charonia", "torch", "numpy", "tritonclient", "nvidia-pytriton")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "loadtests/bench.py", *sys.argv[1:]]),
        "machine": {**machine, "device": "cuda" if torch.cuda.is_available() else "cpu"},
        "versions": {name: version(name) for name in packages}
        | {"python": platform.python_version()},
        "model": model.name,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
    }


def _write(report: dict[str, object], stem: Path) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    _plot(report, stem.with_suffix(".png"))
    print(f"\nwritten: {stem.with_suffix('.json').name}, {stem.with_suffix('.png').name}")


def _plot(report: dict[str, object], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs: dict[int, dict[str, list[dict[str, float]]]] = report["runs"]  # type: ignore[assignment]
    wanted = {
        "output_tokens_per_second": "output tokens/s",
        "ttft_ms_p50": "TTFT p50, ms",
        "inter_token_ms_p50": "inter-token p50, ms",
    }
    figure, axes = pyplot.subplots(1, len(wanted), figsize=(11, 3.4), layout="constrained")
    for axis, (name, title) in zip(axes, wanted.items(), strict=True):
        for offset, side in ((-0.2, "in-process"), (0.2, "triton")):
            values = [[run[name] for run in by_side[side]] for by_side in runs.values()]
            medians = [statistics.median(value) for value in values]
            spread = [
                [median - min(value) for median, value in zip(medians, values, strict=True)],
                [max(value) - median for median, value in zip(medians, values, strict=True)],
            ]
            places = [index + offset for index in range(len(runs))]
            axis.bar(places, medians, 0.4, yerr=spread, capsize=3, label=side)
        axis.set_title(title)
        axis.set_xticks(range(len(runs)), [str(concurrency) for concurrency in runs])
        axis.set_xlabel("concurrent requests")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


def _parser() -> argparse.ArgumentParser:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint; default: llama-135m, random")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--min-requests", type=int, default=4, help="per repetition")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=4096, help="prompt ids are below this")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS / f"{today}-bench",
        help="where to write .json and .png",
    )
    return parser


if __name__ == "__main__":
    main()
