"""What verification emits, against the target's distribution; how much it accepts, against theory.

A "model" here is a table: the logits behind each last token. So every probability can be written
down, and the sampler, its noise and the comparison with drafts are the real ones.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from charonia.data.sampling.native_draw import NativeDraw
from charonia.data.sampling.sampler import SampledRow, Sampler
from charonia.data.sampling.verify import num_accepted, num_accepted_synthetically
from charonia.protocol import RowSampling
from support.chi_square import assert_drawn_from
from support.kernels import ISAS, kernels_for

VOCAB, NUM_REQUESTS, NUM_DRAFTS = 6, 2000, 2
PROMPT = [0, 1]


def table(kind: str, seed: int) -> Tensor:
    """[VOCAB, VOCAB] logits."""
    normal = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    is_low = torch.arange(VOCAB) < VOCAB // 2
    match kind:
        case "low half":
            return normal.masked_fill(~is_low, -40.0)
        case "high half":
            return normal.masked_fill(is_low, -40.0)
        case "spiky":
            return normal * 0.3 + 5 * torch.eye(VOCAB).roll(seed, 1)
        case _:
            return normal * {"normal": 1.5, "flat": 0.1}[kind]


PAIRS = {
    "unlike": (table("normal", 1), table("normal", 2)),
    "alike": (table("normal", 1), table("normal", 1) + 0.3 * table("normal", 3)),
    "equal": (table("normal", 1), table("normal", 1)),
    "disjoint": (table("low half", 1), table("high half", 2)),
    "both spiky, elsewhere": (table("spiky", 1), table("spiky", 2)),
    "a spiky draft of a flat target": (table("flat", 1), table("spiky", 2)),
    "a flat draft of a spiky target": (table("spiky", 1), table("flat", 2)),
}
CUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "top-p": {"top_p": 0.8, "temperature": 1.3},
    "top-k": {"top_k": 3},
    "penalties": {
        "repetition_penalty": 1.6,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.5,
    },
    "all": {
        "temperature": 0.8,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
}


def probabilities(model: Tensor, history: list[int], cut: dict[str, Any]) -> list[float]:
    """The distribution of the next token, by the book."""
    logits = model[history[-1]].double().tolist()
    output = history[len(PROMPT) :]
    for token_id in set(history):
        penalty = cut.get("repetition_penalty", 1.0)
        logits[token_id] *= penalty if logits[token_id] <= 0 else 1 / penalty
    for token_id in set(output):
        logits[token_id] -= cut.get("presence_penalty", 0.0)
        logits[token_id] -= cut.get("frequency_penalty", 0.0) * output.count(token_id)
    weights = [math.exp(logit / cut.get("temperature", 1.0)) for logit in logits]
    order = sorted(range(VOCAB), key=lambda i: -weights[i])[: cut.get("top_k", VOCAB)]
    total = sum(weights[i] for i in order)
    kept, share = [], 0.0
    for i in order:
        kept.append(i)
        share += weights[i] / total
        if share >= cut.get("top_p", 2.0):
            break
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(VOCAB)]


@dataclass
class Trial:
    """What many requests, which differ in their seeds alone, were given."""

    outputs: list[list[int]]
    num_first_accepted: int


def speculate(target: Tensor, draft: Tensor, cut: dict[str, Any], num_tokens: int) -> Trial:
    """Generate for all requests at once, round after round of drafts and verification."""
    sampler = Sampler(VOCAB, "cpu", NativeDraw(kernels_for(ISAS[0])))
    samplings = [RowSampling(seed=seed, **cut) for seed in range(NUM_REQUESTS)]
    known = [list(PROMPT) for _ in samplings]
    num_first_accepted = None
    while min(map(len, known)) < len(PROMPT) + num_tokens:
        guessed = [list(tokens) for tokens in known]
        for _ in range(NUM_DRAFTS):
            lines = draft[[tokens[-1] for tokens in guessed]]
            rows = [
                SampledRow(sampling, torch.tensor(tokens), len(PROMPT))
                for sampling, tokens in zip(samplings, guessed, strict=True)
            ]
            for tokens, token_id in zip(guessed, sampler.draw(lines, rows), strict=True):
                tokens.append(token_id)
        rows, last = [], []
        for sampling, tokens in zip(samplings, guessed, strict=True):
            for end in range(len(tokens) - NUM_DRAFTS, len(tokens) + 1):
                rows.append(SampledRow(sampling, torch.tensor(tokens[:end]), len(PROMPT)))
                last.append(tokens[end - 1])
        sampled = [one.token_id for one in sampler.sample(target[last], rows)]
        counts = []
        for index, tokens in enumerate(known):
            places = sampled[index * (NUM_DRAFTS + 1) : (index + 1) * (NUM_DRAFTS + 1)]
            count = num_accepted(guessed[index][len(tokens) :], places)
            tokens += places[: count + 1]
            counts.append(count)
        if num_first_accepted is None:
            num_first_accepted = sum(count > 0 for count in counts)
    outputs = [tokens[len(PROMPT) :][:num_tokens] for tokens in known]
    return Trial(outputs, num_first_accepted or 0)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("pair", PAIRS)
def test_what_is_emitted_has_the_targets_distribution(pair: str, cut: str) -> None:
    target, draft = PAIRS[pair]
    trial = speculate(target, draft, CUTS[cut], num_tokens=2)
    pairs = list(itertools.product(range(VOCAB), repeat=2))
    first = probabilities(target, PROMPT, CUTS[cut])
    expected = [
        first[a] * probabilities(target, [*PROMPT, a], CUTS[cut])[b] if first[a] else 0.0
        for a, b in pairs
    ]
    emitted = [tuple(output) for output in trial.outputs]
    assert_drawn_from([emitted.count(pair) for pair in pairs], expected)

    # Daliri, Musco, Suresh 2024, theorem 3; and no coupling can do better than 1 - TV.
    guesses = probabilities(draft, PROMPT, CUTS[cut])
    distance = sum(abs(p - q) for p, q in zip(first, guesses, strict=True)) / 2
    share = trial.num_first_accepted / NUM_REQUESTS
    slack = 4 * math.sqrt(0.25 / NUM_REQUESTS)
    assert (1 - distance) / (1 + distance) - slack <= share <= 1 - distance + slack
    if pair == "equal":
        assert share == 1.0


def test_a_draft_changes_no_token() -> None:
    cut = CUTS["all"]
    outputs = [
        speculate(PAIRS[pair][0], PAIRS[pair][1], cut, 5).outputs for pair in ("unlike", "equal")
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("drafts", "sampled", "accepted"),
    [
        ([], [1], 0),
        ([1], [1, 2], 1),
        ([1], [2, 2], 0),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 9, 3], [1, 2, 3, 4], 1),
    ],
)
def test_drafts_are_accepted_up_to_the_first_that_differs(
    drafts: list[int], sampled: list[int], accepted: int
) -> None:
    assert num_accepted(drafts, sampled) == accepted


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_synthetic_acceptance_keeps_its_rate_at_every_place(rate: float) -> None:
    counts = [
        num_accepted_synthetically(4, rate, seed, position)
        for seed in (0, 1, 2**64 - 1)
        for position in range(3000)
    ]
    expected = [rate**place * (1 - rate if place < 4 else 1) for place in range(5)]
    assert_drawn_from([counts.count(place) for place in range(5)], expected)
