"""Cases to measure: the engines, their prompts, and the bar that their rates must reach.

Owns the cases and their sizes. Pure; must not know how a side is run.

A group is some engines that are loaded together, and rounds of entries that take turns on them. The
last entry of a round is the contender; it is judged against the best of the others.
"""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import SHAPES
from speculation.prompts import Workload
from workloads import Entry

CASES = ("synthetic", "demo", "copy", "sweep", "adversarial")
OFF = "off"
ADAPTIVE = "adaptive"
DEPTHS = (1, 2, 3, 5, 8)
DEMO_CONCURRENCY = (1, 4, 16, 64)
SHAPE_CONCURRENCY = (1, 4, 16)
TEMPERATURES = (0.0, 1.0)
"""Of `demo`; at 0, which most will try first, its text goes in circles and counts nowhere."""
SAMPLING = {"temperature": 1.0}
"""Sampling of all text that is not copied. At lower temperatures it goes in circles."""
WARM_UP_TOKENS = 500
"""Tokens of each row: some two hundred steps, in which adaptive entries learn their costs."""

DRAFT_SHAPE = SHAPES["llama-135m"] | {
    "hidden_size": 288,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "intermediate_size": 768,
}
"""19.8 M parameters, 14.2 M of them the embedding."""


@dataclass(frozen=True)
class Pair:
    """A model, its draft model, and prompts for it.

    Attributes:
        prompts: to go on with. short_prompts: the same where many are handed over at once, lest
            most of the time be prefill. edits: requests that are mostly copied; None where the
            model can do none.
        turns: for each concurrency in-process, the new tokens of the waves of one turn, a second
            or two of work.
    """

    name: str
    model: Path
    draft: Path
    prompts: Workload
    short_prompts: Workload
    turns: Mapping[int, Sequence[int]]
    edits: Workload | None = None
    max_model_len: int = 1024

    def engine(self, speculative: dict[str, Any] | None = None) -> dict[str, Any]:
        """Arguments of an engine; without a `method`, it is the draft model that guesses."""
        if speculative is not None and "method" not in speculative:
            speculative = {"model": str(self.draft), **speculative}
        return {
            "model": str(self.model),
            "device": "cpu",
            "max_model_len": self.max_model_len,
            "enable_prefix_caching": False,  # entries have the same prompts
            "speculative_config": speculative,
        }


@dataclass(frozen=True)
class Round:
    """Work that several entries do in turns; the last one is the contender.

    Attributes:
        what: is measured, for people.
        new_tokens: of the requests of each wave of a turn.
        bar: what the contender's rate over the best other one's must reach.
    """

    case: str
    what: str
    concurrency: int
    entries: tuple[Entry, ...]
    prompts: Workload
    new_tokens: tuple[int, ...]
    bar: float
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def contender(self) -> str:
        """Label of the entry that is judged."""
        return self.entries[-1].label

    @property
    def num_warm_ups(self) -> int:
        """Repetitions that do not count."""
        return math.ceil(WARM_UP_TOKENS / sum(self.new_tokens))

    def in_turn(self, shuffler: random.Random) -> list[Entry]:
        """The entries in random order, a new one for each repetition."""
        return shuffler.sample(self.entries, len(self.entries))


@dataclass(frozen=True)
class Group:
    """Engines that are loaded together.

    Attributes:
        is_served: by one tritonserver each; otherwise each runs in a process of its own.
        engines: by name, their arguments.
    """

    is_served: bool
    engines: dict[str, dict[str, Any]]
    rounds: tuple[Round, ...]


def make_groups(
    cases: Collection[str], shape: Pair, demo: Pair, concurrency: Collection[int] | None = None
) -> list[Group]:
    """All groups of the cases.

    Args:
        shape: random weights. demo: weights that were trained.
        concurrency: of the sweep; None is DEMO_CONCURRENCY and SHAPE_CONCURRENCY.
    """
    groups = []
    if "synthetic" in cases:
        for name, depth in (_ADAPTIVE, _named_fixed(5)):
            groups.append(_synthetic(shape, name, {**depth, "synthetic_acceptance_rate": 0.8}))
    if "demo" in cases:
        groups += [_demo(demo, name, depth) for name, depth in (_ADAPTIVE, _named_fixed(4))]
    if "copy" in cases:
        groups += [_copy(demo, method) for method in ("ngram", "suffix")]
    if "sweep" in cases:
        groups.append(_sweep(demo, concurrency or DEMO_CONCURRENCY, {}))
        rate = {"synthetic_acceptance_rate": 0.6}
        groups.append(_sweep(shape, concurrency or SHAPE_CONCURRENCY, rate))
    if "adversarial" in cases:
        groups += [_adversarial(pair) for pair in (shape, demo)]
    return groups


_ADAPTIVE: tuple[str, dict[str, Any]] = (ADAPTIVE, {})


def _fixed(depth: int) -> dict[str, Any]:
    return {"num_speculative_tokens": depth, "adaptive": False}


def _named_fixed(depth: int) -> tuple[str, dict[str, Any]]:
    return f"depth {depth}", _fixed(depth)


def _on_and_off(name: str) -> tuple[Entry, ...]:
    """Two entries of one server; as two tenants, lest one's drafts come from the other's text."""
    return (
        Entry(OFF, name, {"speculation": False, "tenant": "off"}),
        Entry(name, name, {"tenant": "on"}),
    )


def _synthetic(pair: Pair, name: str, speculative: dict[str, Any]) -> Group:
    round_ = Round(
        case="synthetic",
        what=f"{pair.name}, 4 of 5 drafts accepted",
        concurrency=1,
        entries=_on_and_off(name),
        prompts=pair.prompts,
        new_tokens=(64, 192),
        bar=2.0,
        sampling=SAMPLING,
    )
    return Group(True, {name: pair.engine(speculative)}, (round_,))


def _demo(pair: Pair, name: str, speculative: dict[str, Any]) -> Group:
    rounds = tuple(
        Round(
            case="demo",
            what=f"{pair.name}, temperature {temperature:g}",
            concurrency=1,
            entries=_on_and_off(name),
            prompts=pair.prompts,
            new_tokens=(192,) * 4,
            bar=1.6,
            sampling={"temperature": temperature},
        )
        for temperature in TEMPERATURES
    )
    return Group(True, {name: pair.engine(speculative)}, rounds)


def _copy(pair: Pair, method: str) -> Group:
    assert pair.edits is not None
    round_ = Round(
        case="copy",
        what=f"{pair.name}, edits",
        concurrency=1,
        entries=_on_and_off(method),
        prompts=pair.edits,
        new_tokens=(200,) * 4,
        bar=2.0,
    )
    return Group(True, {method: pair.engine({"method": method})}, (round_,))


def _sweep(pair: Pair, concurrency: Collection[int], speculative: dict[str, Any]) -> Group:
    engines = {"depth 0": pair.engine()}
    for depth in DEPTHS:
        engines[f"depth {depth}"] = pair.engine({**_fixed(depth), **speculative})
    deepest = {"num_speculative_tokens": max(DEPTHS)}
    engines[ADAPTIVE] = pair.engine({**deepest, **speculative})
    return _in_process("sweep", pair, engines, concurrency, 0.97)


def _adversarial(pair: Pair) -> Group:
    engines = {
        "depth 0": pair.engine(),
        ADAPTIVE: pair.engine({"synthetic_acceptance_rate": 0.0}),
    }
    return _in_process("adversarial", pair, engines, (1, 4, 16), 0.95)


def _in_process(
    case: str,
    pair: Pair,
    engines: dict[str, dict[str, Any]],
    concurrency: Collection[int],
    bar: float,
) -> Group:
    rounds = tuple(
        Round(
            case=case,
            what=pair.name,
            concurrency=count,
            entries=tuple(Entry(name, name) for name in engines),
            prompts=pair.short_prompts,
            new_tokens=tuple(pair.turns[count]),
            bar=bar,
            sampling=SAMPLING,
        )
        for count in concurrency
    )
    return Group(False, engines, rounds)
