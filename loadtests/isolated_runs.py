"""Runs of one side with nothing else loaded: its fastest launch variant, and a control.

The control is shown beside the figures of the turns: where it is
much faster, the turns do the side an injustice.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from figures import WrongOutputError, figures_of
from systems_under_test import Side, SideError
from vllm_variants import Variant
from workloads import Round

PROBES = 3
"""Repetitions that count each time that a variant is tried."""
NUM_FINALISTS, NUM_FINALS = 3, 2
"""The fastest variants are tried again, so often: the first time one of many is fast by luck."""
Rates = dict[str, list[float]]
"""Tokens per second, by the round's name, repetition by repetition: of the prompts where a round
has but one token behind each, else of the output."""


@dataclass(frozen=True)
class Probe:
    """A variant that was tried; `failure` says why it has no rates."""

    variant: Variant
    rates: Rates = field(default_factory=dict)
    failure: str | None = None

    @property
    def speed(self) -> float:
        """The geometric mean of the median rates; 0 where it failed."""
        if not self.rates:
            return 0.0
        return math.prod(map(statistics.median, self.rates.values())) ** (1 / len(self.rates))

    def joined(self, other: "Probe") -> "Probe":
        """The same variant, tried twice; it has failed if it did once."""
        if other.failure is not None:
            return other
        rates = {name: [*found, *other.rates[name]] for name, found in self.rates.items()}
        return Probe(self.variant, rates)

    def __str__(self) -> str:
        medians = (f"{name} {statistics.median(rates):.1f}" for name, rates in self.rates.items())
        return f"{self.variant.name}: {self.failure or ', '.join(medians)}"

    def as_json(self) -> dict[str, Any]:
        """Return the file's content, without the variables, which hold this machine's paths."""
        return {"way": self.variant.name, "tokens_per_second": self.rates, "failure": self.failure}


@dataclass
class IsolatedRuns:
    """Measurements with nothing else loaded.

    Attributes:
        probes: of the variants of vLLM; the first is taken.
        controls: by side.
    """

    probes: list[Probe] = field(default_factory=list)
    controls: dict[str, Rates] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {"vllm_ways": [each.as_json() for each in self.probes], "controls": self.controls}


def probe(
    start: Callable[[Variant], Side],
    variants: Sequence[Variant],
    rounds: Sequence[Round],
    vocab_size: int,
    say: Callable[[str], None],
    num_finals: int = NUM_FINALS,
) -> list[Probe]:
    """Try each variant in random order, the fastest again, and say what came of it.

    Args:
        num_finals: how often the fastest are tried again; few variants need it less.

    Returns:
        The finalists, the fastest by all their tries first; the others; those that failed.
    """
    shuffler = random.Random(0)

    def tried(variant: Variant) -> Probe:
        try:
            with closing(start(variant)) as side:
                found = Probe(variant, rates_alone(side, rounds, PROBES, vocab_size, seed=0))
        except (SideError, WrongOutputError) as error:
            found = Probe(variant, failure=str(error))
        say(str(found))
        return found

    probes = _by_speed(tried(variant) for variant in shuffler.sample(variants, len(variants)))
    finalists = [each for each in probes[:NUM_FINALISTS] if each.rates]
    for _ in range(num_finals if len(finalists) > 1 else 0):
        for index in shuffler.sample(range(len(finalists)), len(finalists)):
            finalists[index] = finalists[index].joined(tried(finalists[index].variant))
    return _by_speed(finalists) + probes[len(finalists) :]


def _by_speed(probes: Iterable[Probe]) -> list[Probe]:
    return sorted(probes, key=lambda each: each.speed, reverse=True)


def rates_alone(
    side: Side, rounds: Sequence[Round], repetitions: int, vocab_size: int, seed: int
) -> Rates:
    """Do the work of `rounds` greedily, the first repetition of each uncounted.

    Raises:
        SideError: it failed. WrongOutputError: a request had more or fewer tokens.
    """
    shuffler = random.Random(seed)
    rates: Rates = {}
    for round_ in rounds:
        found = []
        for _ in range(1 + repetitions):
            asked = round_.requests(vocab_size, shuffler)
            figures = figures_of(round_.kind, side.run(asked), asked)
            found.append(figures["tokens_per_second"])
        rates[round_.name] = found[1:]
    return rates
