"""The workloads that are measured: rounds of entries that take turns.

A round is one kind of work at one concurrency; its entries are the sides, and variants of them
beside their plain selves. Pure; must not know how a side is run.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from systems_under_test import BASE, QUANTIZED, Request
from traffic import Traffic

CASES = ("decode", "prefill", "long", "sampled", "int8", "traces")
SAMPLED = "charonia sampled"
SAMPLING = {"temperature": 0.8, "top_p": 0.95}
PREFILL_CONCURRENCY = (1, 8)
NOT_IN_TRACES = {
    "transformers": "all sequences of a batch of `generate` run until its longest answer ends"
}
"""Sides that cannot be asked for requests of unlike lengths, and why."""
Kind = Literal["decode", "prefill", "traces"]


@dataclass(frozen=True)
class Entry:
    """Work of one side in a round; `label` is its name in tables."""

    label: str
    side: str
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """Work that several entries do in turns.

    Attributes:
        kind: "decode" is a prompt and many new tokens, "prefill" a prompt and one, "traces" both
            as they were recorded.
        num_waves: how often a repetition hands over `concurrency` prompts.
        prompt_tokens, new_tokens: of each request; None where `traffic` has them.
        is_long: whether its prompts are of another length than those of other rounds.
        traffic: whose lengths the requests have.
    """

    kind: Kind
    concurrency: int
    num_waves: int
    prompt_tokens: int | None
    new_tokens: int | None
    entries: tuple[Entry, ...]
    is_long: bool = False
    traffic: Traffic | None = None

    @property
    def has_long_prompts(self) -> bool:
        """True if its prompts may be longer than a step."""
        return self.is_long or self.traffic is not None

    @property
    def name(self) -> str:
        """Name for people."""
        what = f" of {self.prompt_tokens:,} tokens" if self.is_long else ""
        if self.traffic is not None:
            what = f" of {self.traffic.name}"
        return f"{self.kind}{what} at concurrency {self.concurrency}"

    @property
    def size(self) -> str:
        """Prompts at once, and their tokens or traffic where rounds differ in these."""
        if self.traffic is not None:
            return f"{self.concurrency} x {self.traffic.name}"
        return (
            f"{self.concurrency} x {self.prompt_tokens:,}"
            if self.is_long
            else f"{self.concurrency}"
        )

    def requests(self, vocab_size: int, shuffler: random.Random) -> list[list[Request]]:
        """New random prompts, and how much is to follow each, as waves."""
        return [
            [
                Request([shuffler.randrange(1, vocab_size) for _ in range(prompt_tokens)], num)
                for prompt_tokens, num in self._lengths(shuffler)
            ]
            for _ in range(self.num_waves)
        ]

    def in_turn(self, shuffler: random.Random) -> list[Entry]:
        """The entries in random order, a new one for each repetition."""
        return shuffler.sample(self.entries, len(self.entries))

    def _lengths(self, shuffler: random.Random) -> Sequence[tuple[int, int]]:
        """Draw the lengths of one wave's prompts, and of their completions."""
        if self.traffic is not None:
            return self.traffic.stretch(self.concurrency, shuffler)
        assert self.prompt_tokens is not None
        assert self.new_tokens is not None
        return [(self.prompt_tokens, self.new_tokens)] * self.concurrency


def probe_rounds(rounds: Sequence[Round]) -> list[Round]:
    """Enough of these rounds to tell which of several ways to run a side is the fastest.

    Of the long prompts, which take the longest, the middle length and one at a time; of a trace an
    eighth of its requests.
    """
    alone = _long_alone(rounds)
    traces = [each for each in rounds if each.traffic is not None]
    return [
        *(each for each in rounds if not each.has_long_prompts),
        *alone[len(alone) // 2 :][:1],
        *(replace(each, concurrency=-(-each.concurrency // 8)) for each in traces),
    ]


def budget_rounds(rounds: Sequence[Round]) -> list[Round]:
    """Enough of these rounds to tell how many tokens a step is to have at most.

    These are the longest prompt by itself, which takes several steps, and all requests of a trace.
    """
    return [*_long_alone(rounds)[-1:], *(each for each in rounds if each.traffic is not None)]


def _long_alone(rounds: Sequence[Round]) -> list[Round]:
    """The rounds of one long prompt at once, the shortest first."""
    alone = [each for each in rounds if each.is_long and each.concurrency == 1]
    return sorted(alone, key=lambda each: each.prompt_tokens or 0)


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
    long_concurrency: Sequence[int] = (),
    traffic: Sequence[Traffic] = (),
    trace_requests: int = 1,
) -> list[Round]:
    """All rounds that have an entry.

    Args:
        cases: of CASES. concurrency: of the decode rounds. sides: that are there.
        long_tokens, long_concurrency: of the prompts of the rounds of `long`, which has one wave of
            each length and concurrency.
        traffic: a round of `traces` each. trace_requests: of its one wave.
        min_requests: per repetition; a low concurrency repeats its wave to have as many.
    """

    plain = [Entry(name, name) for name in sides if name not in QUANTIZED]
    variants = []
    if "sampled" in cases and BASE in sides:
        variants.append(Entry(SAMPLED, BASE, {**SAMPLING, "seed": seed}))
    if "int8" in cases:
        variants += [Entry(name, name) for name in sides if name in QUANTIZED]

    def make(kind: Kind, count: int, entries: list[Entry]) -> Round:
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
            for count in long_concurrency
        ]
    if "traces" in cases:
        able = tuple(entry for entry in plain if entry.side not in NOT_IN_TRACES)
        rounds += [
            Round("traces", trace_requests, 1, None, None, able, traffic=each) for each in traffic
        ]
    return [round_ for round_ in rounds if round_.entries]
