"""The picture of a run: rates against the machine's limit, latencies, prompts, traces."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_report import Report, RoundResult, limit_of
from plot import machine_and_day, make_figure, open_frame, save

_COLORS = {
    "charonia": "#1f5fa8",
    "triton": "#6aa9e0",
    "transformers": "#b8b8b8",
    "vllm": "#e08a2e",
    "llama.cpp": "#5a9c57",
    "charonia sampled": "#7b5ba6",
    "charonia int8": "#c45c8a",
    "llama.cpp Q8_0": "#2f6b3a",
}


def write_plot(report: Report, path: Path) -> None:
    """Draw up to seven panels: bars are medians, whiskers span the worst to the best repetition."""
    decode = [result for result in report.rounds if result.round.kind == "decode"]
    prefill = [result for result in report.rounds if result.round.kind == "prefill"]
    traces = [result for result in report.rounds if result.round.kind == "traces"]
    panels: list[tuple[str, Sequence[RoundResult], str]] = [
        ("output tokens/s", decode, "tokens_per_second"),
        ("TTFT p50, ms", decode, "ttft_ms_p50"),
        ("inter-token p50, ms", decode, "inter_token_ms_p50"),
        ("prefill: prompt tokens/s", prefill, "tokens_per_second"),
        ("traces: output tokens/s", traces, "tokens_per_second"),
        ("traces: TTFT p50, ms", traces, "ttft_ms_p50"),
        ("traces: TTFT p99, ms", traces, "ttft_ms_p99"),
    ]
    panels = [panel for panel in panels if panel[1]]
    figure = make_figure(3.9 * len(panels), 4.2)
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, (title, results, name) in zip(axes[0], panels, strict=True):
        _draw_panel(axis, title, results, name)
        has_limit = name == "tokens_per_second" and results[0].round.traffic is None
        if report.cost is not None and has_limit:
            limits = [limit_of(result, report.cost) for result in results]
            for place, limit in enumerate(limits):
                axis.hlines(
                    limit, place - 0.44, place + 0.44, "black", "dashed", lw=1, label="limit"
                )
    handles = {}
    for axis in axes[0]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False
    )
    about = report.about
    title = [about["model"]]
    if decode or prefill:
        title.append(f"{about['prompt_tokens']} prompt and {about['new_tokens']} new tokens")
    figure.suptitle(", ".join([*title, machine_and_day(about)]), fontsize=11)
    save(figure, path)


def _draw_panel(axis: Any, title: str, results: Sequence[RoundResult], name: str) -> None:
    labels = [label for label in _COLORS if any(label in result.runs for result in results)]
    width = 0.84 / len(labels)
    for index, label in enumerate(labels):
        places, medians, below, above = [], [], [], []
        for place, result in enumerate(results):
            if label not in result.runs:
                continue
            values = [run[name] for run in result.runs[label] if name in run]
            if not values:
                continue  # no time between tokens where there is one token each
            middle = statistics.median(values)
            places.append(place + (index - (len(labels) - 1) / 2) * width)
            medians.append(middle)
            below.append(middle - min(values))
            above.append(max(values) - middle)
        axis.bar(
            places,
            medians,
            width,
            yerr=[below, above],
            color=_COLORS[label],
            error_kw={"lw": 0.8},
            capsize=2,
            label=label,
        )
    axis.set_title(title, fontsize=10)
    axis.set_xticks(range(len(results)), [result.round.size for result in results])
    axis.set_xlabel("prompts at once")
    open_frame(axis)
