"""Sides that decode the same new prompts in turns.

Owns the models and the prompts of such a run, the order of the turns, the command line and the
picture of its ratios. Must not know which sides there are, or what is noted of a turn.
"""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from charonia.config import DEMO_CHECKPOINT
from checkpoint import SHAPES, make_checkpoint
from command_line import positive
from figures import Ratio
from paths import CACHE
from plot import draw_ratios, make_figure, save
from systems_under_test import Request, Waves

MODELS = ("demo", "llama-135m")
CONCURRENCY = (1, 8, 32)
PROMPT_TOKENS = 32
NEW_TOKENS = {"demo": 192, "llama-135m": 64}
MIN_REQUESTS = 4

Noted = TypeVar("Noted")


def checkpoint_of(model: str) -> Path:
    """The checkpoint of one of `MODELS`; those with random weights are made on the spot."""
    return DEMO_CHECKPOINT if model == "demo" else make_checkpoint(SHAPES[model], CACHE / model)


def engine_settings(model: str) -> dict[str, Any]:
    """Engine arguments of all sides. There is no prefix cache, as every prompt is new."""
    return {
        "dtype": "auto",
        "device": "cpu",
        "max_model_len": PROMPT_TOKENS + NEW_TOKENS[model],
        "enable_prefix_caching": False,
    }


def least_waves(count: int) -> int:
    """Waves of `count` requests that have `MIN_REQUESTS` together."""
    return -(-MIN_REQUESTS // count)


def draw_waves(model: str, drawn: random.Random, count: int, num_waves: int) -> Waves:
    """Waves of `count` requests each, with new random prompts."""
    return [
        [
            Request([drawn.randrange(1, 4000) for _ in range(PROMPT_TOKENS)], NEW_TOKENS[model])
            for _ in range(count)
        ]
        for _ in range(num_waves)
    ]


def take_turns(
    label: str,
    names: Sequence[str],
    repetitions: int,
    drawn: random.Random,
    new_waves: Callable[[], Waves],
    turn: Callable[[str, Waves], Noted],
    after_first: Callable[[], None] = lambda: None,
) -> dict[str, list[Noted]]:
    """Let each side have its turn in each repetition, in a new random order.

    Args:
        label: for the progress bar. names: of the sides.
        repetitions: that count; one more comes before them.
        new_waves: the prompts of a repetition. turn: runs them on a side.
        after_first: called after the repetition that does not count.

    Returns:
        What `turn` returned, by side; entries with the same index are of one repetition.
    """
    found: dict[str, list[Noted]] = {name: [] for name in names}
    for repetition in tqdm(range(repetitions + 1), desc=label):
        waves = new_waves()
        for name in drawn.sample(names, len(names)):
            noted = turn(name, waves)
            if repetition:
                found[name].append(noted)
        if not repetition:
            after_first()
    return found


def write_ratios(
    path: Path, cases: Sequence[tuple[str, int]], ratios: Mapping[str, Sequence[Ratio]], what: str
) -> None:
    """Draw the ratios of each side, one per case; whiskers are all repetitions.

    Args:
        cases: models, and how many requests at once. ratios: by side, in the order of the cases.
        what: they are.
    """
    figure = make_figure((0.4 + 0.6 * len(ratios)) * len(cases) + 2, 4)
    axis = figure.subplots()
    width = 0.8 / len(ratios)
    for index, (name, found) in enumerate(ratios.items()):
        offset = width * (index - (len(ratios) - 1) / 2)
        places = [place + offset for place in range(len(cases))]
        draw_ratios(axis, places, found, 0.95 * width, name)
    axis.axhline(1.0, color="black", linewidth=0.8, linestyle="dashed")
    axis.set_xticks(range(len(cases)), [f"{model}\n{count} at once" for model, count in cases])
    axis.set_ylabel(what)
    axis.legend()
    save(figure, path)


def add_turns(parser: argparse.ArgumentParser, models: Sequence[str]) -> None:
    """Add the options of such a run.

    Args:
        models: those that are measured by default.
    """
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(models))
    parser.add_argument("--concurrency", nargs="+", type=positive, default=list(CONCURRENCY))
    parser.add_argument("--repetitions", type=positive, default=9, metavar="N", help="default: 9")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts; default: 0")
