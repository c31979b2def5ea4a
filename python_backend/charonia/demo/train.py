"""Trains the demo models on the running interpreter's standard library, in three stages.

`python -m charonia.demo.train` trains the tokenizer, the target and the draft from scratch
(stage library), teaches the target to edit files (stage edits), and then the draft to propose what
the target writes (stage distil). For each model it writes a checkpoint in Hugging Face format, the
figures of its stages (training.json) and a model card. Owns the order of the stages, the figures
and the command. Must not be imported by the server.
"""

import argparse
import copy
import json
import math
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from charonia.demo.batches import held_out_windows
from charonia.demo.card import write_card
from charonia.demo.corpus import count_bytes
from charonia.demo.distil import make_prefixes, sample_texts
from charonia.demo.lessons import (
    DISTIL_RECIPE,
    EDITS_RUNS,
    LIBRARY_RECIPES,
    Data,
    EditsRun,
    distil_lesson,
    edits_lesson,
    library_lesson,
    load_data,
    make_edit_prompts,
)
from charonia.demo.loop import (
    TOKENS_PER_BATCH,
    Lesson,
    Recipe,
    cpu_seconds,
    evaluate,
    run_schedule,
)
from charonia.demo.measure import measure_draft, measure_edits
from charonia.demo.shapes import CONTEXT, SHAPES, build_model, load_model, save_model
from charonia.demo.vocabulary import save_tokenizer

CHECKPOINTS = Path(__file__).parent / "checkpoints"
# Texts that the target writes for the draft: continued files, and edits.
NUM_CONTINUATIONS, NUM_EDITS, NEW_TOKENS = 2400, 800, 256

Figures = dict[str, Any]


@dataclass(frozen=True)
class Workshop:
    """Common inputs of all stages: the data, the folder of the checkpoints and the seed."""

    data: Data
    checkpoints: Path
    seed: int

    def folder(self, kind: str) -> Path:
        """Return the directory of a model's checkpoint; kind is "target" or "draft"."""
        return self.checkpoints / SHAPES[kind].name


class Stopwatch:
    """The time since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), cpu_seconds()

    def figures(self) -> Figures:
        """Minutes of processor time and of wall-clock time."""
        return {
            "cpu_minutes": round((cpu_seconds() - self._cpu) / 60, 1),
            "wall_minutes": round((time.monotonic() - self._wall) / 60, 1),
        }


def train_library(workshop: Workshop, kind: str) -> None:
    """Train a model from scratch on the library's files."""
    watch = Stopwatch()
    torch.manual_seed(workshop.seed)
    model = build_model(SHAPES[kind])
    save_tokenizer(workshop.data.tokenizer, workshop.folder(kind), model_max_length=CONTEXT)
    lesson = library_lesson(workshop.data, seed=workshop.seed)
    figures = train(workshop, kind, model, LIBRARY_RECIPES[kind], lesson)
    record(workshop, kind, {"stage": "library"} | figures | watch.figures())


def train_edits(workshop: Workshop, run: EditsRun, before: LlamaForCausalLM) -> None:
    """Continue training the target, on files and edits of files.

    Args:
        before: the target before this stage, for runs that rehearse what it knew.
    """
    watch = Stopwatch()
    lesson = edits_lesson(
        workshop.data,
        edit_share=run.edit_share,
        seed=workshop.seed + run.seed_offset,
        teacher=before if run.rehearses else None,
    )
    model = load_model(workshop.folder("target"))
    figures = train(workshop, "target", model, run.recipe, lesson, average=run.averages)
    settings = {name: getattr(run, name) for name in ("edit_share", "rehearses", "averages")}
    record(workshop, "target", {"stage": "edits"} | figures | settings | watch.figures())


def train_distil(workshop: Workshop) -> None:
    """Let the target write texts, and continue training the draft towards the target's logits."""
    watch = Stopwatch()
    data, seed = workshop.data, workshop.seed
    prefixes = make_prefixes(data.train, NUM_CONTINUATIONS, seed=seed)
    prefixes += make_edit_prompts(data, NUM_EDITS, seed=seed)
    target = workshop.folder("target")
    samples = sample_texts(target, prefixes, max_tokens=NEW_TOKENS, seed=seed)
    written = sum(map(len, samples)) - sum(map(len, prefixes))
    lesson = distil_lesson(data, samples, load_model(target), seed=seed)
    model = load_model(workshop.folder("draft"))
    figures = train(workshop, "draft", model, DISTIL_RECIPE, lesson)
    figures |= {"sampled_texts": len(samples), "sampled_tokens": written} | watch.figures()
    record(workshop, "draft", {"stage": "distil"} | figures)


def train(
    workshop: Workshop,
    kind: str,
    model: Any,
    recipe: Recipe,
    lesson: Lesson,
    *,
    average: bool = False,
) -> Figures:
    """Train a model, save its bfloat16 checkpoint and return the figures of the run.

    Args:
        average: save the mean of the weights before and after the training.
    """
    folder = workshop.folder(kind)
    rescue = folder / "unfinished.pt"
    before = copy.deepcopy(model)
    history = run_schedule(model.train(), recipe, lesson, rescue=rescue)
    if average:
        take_mean(model, before)
    save_model(model, folder)
    rescue.unlink()
    return {
        "seed": workshop.seed,
        "steps": recipe.last_step,
        "phases": [[phase.length, round(recipe.steps * phase.until)] for phase in recipe.phases],
        "learning_rate": recipe.learning_rate,
        "trained_tokens": recipe.last_step * TOKENS_PER_BATCH,
        **describe_data(workshop.data),
        **measure_loss(folder, workshop.data),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "history": history,
    }


@torch.no_grad()
def take_mean(model: LlamaForCausalLM, other: LlamaForCausalLM) -> None:
    """Set the model's weights to the mean of both models'."""
    for weight, before in zip(model.parameters(), other.parameters(), strict=True):
        weight.lerp_(before, 0.5)


def describe_data(data: Data) -> Figures:
    """The size of the corpus and of what is held out of it."""
    return {
        "corpus_files": data.corpus.num_files,
        "corpus_bytes": data.corpus.num_bytes,
        "corpus_tokens": sum(map(len, data.train)),
        "held_out_files": len(data.held_out),
        "held_out_tokens": sum(map(len, data.held_out)),
    }


def measure_loss(folder: Path, data: Data) -> Figures:
    """The held-out loss of the checkpoint as loaded from disk."""
    loss = evaluate(load_model(folder), held_out_windows(data.held_out, CONTEXT))
    bits = loss / math.log(2) * sum(map(len, data.held_out))
    return {
        "held_out_nats_per_token": round(loss, 4),
        "held_out_bits_per_byte": round(bits / count_bytes(data.corpus.held_out), 4),
    }


def record(workshop: Workshop, kind: str, stage: Figures) -> None:
    """Add a stage to a model's training.json, measure the model, and write the card."""
    data, path = workshop.data, workshop.folder(kind) / "training.json"
    from_scratch = stage["stage"] == "library"
    earlier = [] if from_scratch else json.loads(path.read_text(encoding="utf-8"))["stages"]
    target, draft = workshop.folder("target"), workshop.folder("draft")
    measured: Figures = {}
    if stage["stage"] == "edits":
        measured = {"edits": measure_edits(target, data.tokenizer, data.corpus.held_out)}
    if stage["stage"] == "distil":
        measured = {
            "agreement": measure_draft(
                target, draft, data.tokenizer, data.corpus.held_out, data.held_out
            )
        }
    figures = {
        "model": SHAPES[kind].name,
        "parameters": load_model(path.parent).num_parameters(),
        **measured,
        "stages": [*earlier, stage],
    }
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    write_card(path.parent, figures, kind=kind)
    print(
        f"{SHAPES[kind].name}, stage {stage['stage']}: "
        f"held-out loss {stage['held_out_nats_per_token']} nats/token, "
        f"{stage['held_out_bits_per_byte']} bits/byte, {stage['cpu_minutes']} CPU minutes"
    )
    for name, figure in measured.items():
        print(f"{name}: {figure}")


def main() -> None:
    """Train what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m charonia.demo.train",
        description="Train the demo models on the running interpreter's standard library and "
        "write their checkpoints, figures and model cards.",
    )
    parser.add_argument(
        "--stage",
        choices=["library", "edits", "distil", "all"],
        default="all",
        help="library: both models from scratch; edits: the target goes on, learning to edit "
        "files; distil: the draft goes on, learning from the target (all, in this order)",
    )
    parser.add_argument(
        "--model", choices=[*SHAPES, "both"], default="both", help="of stage library (both)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument(
        "--folder", type=Path, default=CHECKPOINTS, help="of the checkpoints (beside this module)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    workshop = Workshop(load_data(), args.folder, args.seed)
    if args.stage in ("library", "all"):
        for kind in SHAPES:
            if args.model in (kind, "both"):
                train_library(workshop, kind)
    if args.stage in ("edits", "all"):
        before = load_model(workshop.folder("target"))
        for run in EDITS_RUNS:
            train_edits(workshop, run, before)
    if args.stage in ("distil", "all"):
        train_distil(workshop)


if __name__ == "__main__":
    main()
