"""What is measured: rounds of entries that take turns.

A round is one kind of work at one concurrency; its entries are the sides, and variants of them
beside their plain selves. Pure; must not know how a side is run.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sides import BASE, QUANTIZED, Request

CASES = ("decode", "prefill", "long", "sampled", "int8")
SAMPLED = "charonia sampled"
SAMPLING = {"temperature": 0.8, "top_p": 0.95}
PREFILL_CONCURRENCY = (1, 8)
LONG_CONCURRENCY = (1, 4)


@dataclass(frozen=True)
class Entry:
    """What one side does in a round; `label` is what tables call it."""

    label: str
    side: str
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """Work that several entries do in turns.

    Attributes:
        kind: "decode" is a prompt and many new tokens, "prefill" a prompt and one.
        num_waves: how often a repetition hands over `concurrency` prompts.
        is_long: whether its prompts are of another length than those of other rounds.
    """

    kind: Literal["decode", "prefill"]
    concurrency: int
    num_waves: int
    prompt_tokens: int
    new_tokens: int
    entries: tuple[Entry, ...]
    is_long: bool = False

    @property
    def name(self) -> str:
        """For people."""
        length = f" of {self.prompt_tokens:,} tokens" if self.is_long else ""
        return f"{self.kind}{length} at concurrency {self.concurrency}"

    @property
    def size(self) -> str:
        """Prompts at once, and their tokens where rounds differ in these."""
        return (
            f"{self.concurrency} x {self.prompt_tokens:,}"
            if self.is_long
            else f"{self.concurrency}"
        )

    def requests(self, vocab_size: int, shuffler: random.Random) -> list[list[Request]]:
        """New random prompts, and how much is to follow each, as waves."""
        return [
            [
                Request(
                    [shuffler.randrange(1, vocab_size) for _ in range(self.prompt_tokens)],
                    self.new_tokens,
                )
                for _ in range(self.concurrency)
            ]
            for _ in range(self.num_waves)
        ]

    def in_turn(self, shuffler: random.Random) -> list[Entry]:
        """The entries in random order, a new one for each repetition."""
        return shuffler.sample(self.entries, len(self.entries))


def make_rounds(
    cases: Sequence[str],
    concurrency: Sequence[int],
    sides: Sequence[str],
    *,
    prompt_tokens: int,
    new_tokens: int,
    min_requests: int,
    seed: int,
    long_tokens: Sequence[int] = (),
) -> list[Round]:
    """All rounds that have an entry.

    Args:
        cases: of CASES. concurrency: of the decode rounds. sides: that are there.
        long_tokens: of the prompts of the rounds of `long`, which has one wave of each.
        min_requests: per repetition; a low concurrency repeats its wave to have as many.
    """

    plain = [Entry(name, name) for name in sides if name not in QUANTIZED]
    variants = []
    if "sampled" in cases and BASE in sides:
        variants.append(Entry(SAMPLED, BASE, {**SAMPLING, "seed": seed}))
    if "int8" in cases:
        variants += [Entry(name, name) for name in sides if name in QUANTIZED]

    def make(kind: Literal["decode", "prefill"], count: int, entries: list[Entry]) -> Round:
        num_waves = -(-min_requests // count)
        tokens = 1 if kind == "prefill" else new_tokens
        return Round(kind, count, num_waves, prompt_tokens, tokens, tuple(entries))

    base = [entry for entry in plain if "decode" in cases or entry.label == BASE]
    rounds = []
    if "decode" in cases or variants:
        rounds += [make("decode", count, [*base, *variants]) for count in concurrency]
    if "prefill" in cases:
        rounds += [make("prefill", count, plain) for count in PREFILL_CONCURRENCY]
    if "long" in cases:
        rounds += [
            Round("prefill", count, 1, length, 1, tuple(plain), is_long=True)
            for length in long_tokens
            for count in LONG_CONCURRENCY
        ]
    return [round_ for round_ in rounds if round_.entries]
