"""Every constraint against the most obvious way of writing it."""

import math
import random

import pytest
import torch
from torch import Tensor

from charonia.data.sampling.constraints import (
    DOUBT,
    SampledRow,
    Truncation,
    count_kept,
    edit_logits,
    keep_allowed,
)
from charonia.protocol import RowSampling

VOCAB = 50


def edited_by_hand(logits: list[float], row: SampledRow) -> list[float]:
    """One line, token by token, in the order that vLLM documents."""
    s = row.sampling
    prompt, output = row.token_ids.tolist()[: row.num_prompt], row.token_ids.tolist()
    output = output[row.num_prompt :]
    banned = set()
    if len(output) < s.min_tokens:
        banned |= set(s.stop_ids)
    for *head, last in s.bad_words_ids:
        if output[len(output) - len(head) :] == head and len(head) <= len(output):
            banned.add(last)
    result = []
    for token, logit in enumerate(logits):
        value = -math.inf if token in banned else logit + s.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            value = value / s.repetition_penalty if value > 0 else value * s.repetition_penalty
        value -= s.frequency_penalty * output.count(token)
        value -= s.presence_penalty * (token in output)
        if s.allowed_ids and token not in s.allowed_ids:
            value = -math.inf
        result.append(value)
    return result


def a_row(sampling: RowSampling, prompt: list[int], output: list[int]) -> SampledRow:
    return SampledRow(sampling, torch.tensor(prompt + output, dtype=torch.int32), len(prompt))


def assert_edits(logits: Tensor, rows: list[SampledRow]) -> None:
    expected = [edited_by_hand(line, row) for line, row in zip(logits.tolist(), rows, strict=True)]
    edited = keep_allowed(edit_logits(logits, rows), rows)
    torch.testing.assert_close(edited, torch.tensor(expected))


def normal_logits(lines: int, seed: int = 0) -> Tensor:
    return torch.randn(lines, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


PROMPT, OUTPUT = [1, 2, 3, 3], [3, 4, 4, 4, 9]


@pytest.mark.parametrize(
    "sampling",
    [
        RowSampling(seed=0, repetition_penalty=1.7),
        RowSampling(seed=0, repetition_penalty=0.5),
        RowSampling(seed=0, frequency_penalty=0.6),
        RowSampling(seed=0, frequency_penalty=-1.2),
        RowSampling(seed=0, presence_penalty=1.5),
        RowSampling(seed=0, logit_bias={0: 5.0, 49: -100.0, 4: 100.0}),
        RowSampling(seed=0, logit_bias={4: 2.5}, repetition_penalty=2.0),
        RowSampling(seed=0, bad_words_ids=[[7], [7], [8]]),
        RowSampling(seed=0, min_tokens=6, stop_ids=[0, 4, 4]),
        RowSampling(seed=0, min_tokens=5, stop_ids=[0, 4]),
        RowSampling(seed=0, min_tokens=6, stop_ids=[5], logit_bias={5: 100.0}),
        RowSampling(seed=0, allowed_ids=(4,)),
        RowSampling(seed=0, allowed_ids=(49, 0, 7, 7)),
        RowSampling(seed=0, allowed_ids=(3, 8), bad_words_ids=[[8]], logit_bias={3: -2.0, 5: 90.0}),
        RowSampling(seed=0, allowed_ids=tuple(range(VOCAB))),
    ],
    ids=repr,
)
def test_one_constraint_does_what_it_says(sampling: RowSampling) -> None:
    assert_edits(normal_logits(1), [a_row(sampling, PROMPT, OUTPUT)])


def test_repetition_counts_the_prompt_and_the_other_penalties_do_not() -> None:
    logits = torch.full((2, VOCAB), 2.0)
    rows = [
        a_row(RowSampling(seed=0, repetition_penalty=2.0), [5], [6]),
        a_row(RowSampling(seed=0, presence_penalty=0.5, frequency_penalty=0.25), [5], [6, 6]),
    ]
    edited = edit_logits(logits, rows)
    assert edited[0, 5:8].tolist() == [1.0, 1.0, 2.0]
    assert edited[1, 5:8].tolist() == [2.0, 1.0, 2.0]


def test_stops_are_banned_until_min_tokens_are_generated() -> None:
    sampling = RowSampling(seed=0, min_tokens=2, stop_ids=[3])
    rows = [a_row(sampling, PROMPT, [9] * n) for n in range(4)]
    edited = edit_logits(torch.zeros(4, VOCAB), rows)
    assert edited[:, 3].tolist() == [-math.inf, -math.inf, 0.0, 0.0]


@pytest.mark.parametrize(
    ("prompt", "output", "is_banned"),
    [
        ([1], [4, 5], True),
        ([1], [9, 9, 9, 4, 5], True),
        ([1], [4, 5, 9], False),
        ([1], [5], False),
        ([1, 4], [5], False),  # began in the prompt
        ([1, 4, 5], [], False),
    ],
)
def test_a_bad_word_of_several_tokens_cannot_be_completed(
    prompt: list[int], output: list[int], is_banned: bool
) -> None:
    row = a_row(RowSampling(seed=0, bad_words_ids=[[4, 5, 6]]), prompt, output)
    edited = edit_logits(torch.zeros(1, VOCAB), [row])
    assert (edited[0, 6].item() == -math.inf) == is_banned
    assert edited.isinf().sum() == is_banned


def test_bad_words_that_end_alike_are_banned_if_any_of_them_matches() -> None:
    words = [[1, 6], [4, 5, 6], [2, 6], [5, 7], [1, 7]]
    for order in (words, words[::-1]):
        row = a_row(RowSampling(seed=0, bad_words_ids=order), [1], [4, 5])
        assert edit_logits(torch.zeros(1, VOCAB), [row]).isinf().nonzero().tolist() == [
            [0, 6],
            [0, 7],
        ]


def random_row(rng: random.Random) -> SampledRow:
    """Any constraints at once, over a small alphabet so that bad words do match."""
    tokens = [rng.randrange(8) for _ in range(rng.randrange(1, 30))]
    sampling = RowSampling(
        seed=0,
        presence_penalty=rng.choice([0.0, rng.uniform(-2, 2)]),
        frequency_penalty=rng.choice([0.0, rng.uniform(-2, 2)]),
        repetition_penalty=rng.choice([1.0, rng.uniform(0.2, 3)]),
        logit_bias={rng.randrange(VOCAB): rng.uniform(-100, 100) for _ in range(rng.randrange(4))},
        bad_words_ids=[
            [rng.randrange(8) for _ in range(rng.randrange(1, 5))] for _ in range(rng.randrange(9))
        ],
        min_tokens=rng.randrange(20),
        stop_ids=[rng.randrange(VOCAB) for _ in range(rng.randrange(3))],
        allowed_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 9, 60]))),
    )
    num_prompt = rng.randrange(1, len(tokens) + 1)
    return a_row(sampling, tokens[:num_prompt], tokens[num_prompt:])


def test_random_rows_are_edited_as_by_hand_and_as_alone() -> None:
    rng = random.Random(0)
    for trial in range(40):
        rows = [random_row(rng) for _ in range(12)]
        logits = normal_logits(12, trial)
        assert_edits(logits, rows)
        together = keep_allowed(edit_logits(logits, rows), rows)
        for line in (0, 5, 11):
            own = [rows[line]]
            alone = keep_allowed(edit_logits(logits[line : line + 1], own), own)
            assert torch.equal(alone[0], together[line])


def test_the_logits_given_are_never_written_to_nor_copied_in_vain() -> None:
    logits = normal_logits(1)
    before = logits.clone()
    edit_logits(logits, [a_row(RowSampling(seed=0, logit_bias={1: 5.0}), PROMPT, OUTPUT)])
    keep_allowed(logits, [a_row(RowSampling(seed=0, allowed_ids=(1,)), PROMPT, OUTPUT)])
    assert torch.equal(logits, before)
    # A penalty of no effect, stops after min_tokens: nothing to edit.
    plain = RowSampling(seed=0, temperature=0.3, top_k=5, min_tokens=1, stop_ids=[2])
    rows = [a_row(plain, PROMPT, OUTPUT)]
    assert edit_logits(logits, rows) is logits
    assert keep_allowed(logits, rows) is logits


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_no_logit_brings_back_a_token_that_is_not_allowed(value: float) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = value
    rows = [a_row(RowSampling(seed=0, allowed_ids=ids), PROMPT, OUTPUT) for ids in ((), (6, 7))]
    kept = keep_allowed(logits, rows)
    assert torch.equal(kept[0], logits[0]) == (not math.isnan(value))
    assert kept[1].isfinite().nonzero().flatten().tolist() == [6, 7]
    assert (kept[1] == -math.inf).sum() == VOCAB - 2


def kept_by_hand(relative: list[float], min_p: float, top_k: int, top_p: float) -> int:
    """Probabilities in a list; min-p, then top-k, then top-p on what is left."""
    weights = [math.exp(value) for value in relative]
    weights = [w for w in weights if w >= min_p][:top_k]
    mass = 0.0
    for count, weight in enumerate(weights, 1):
        mass += weight
        if top_p < 1 and mass >= top_p * math.fsum(weights) * (1 - 1e-12):
            return count
    return len(weights)


def random_truncation(rng: random.Random, lines: int) -> tuple[Truncation, list[tuple]]:
    rows = [
        (
            rng.choice([0.0, 0.0, rng.uniform(0, 0.2), 1.0]),
            rng.choice([VOCAB, rng.randrange(1, VOCAB)]),
            rng.choice([1.0, rng.uniform(0.01, 1), 0.999]),
        )
        for _ in range(lines)
    ]
    real = torch.tensor(rows, dtype=torch.float64)
    ones = torch.ones(lines, dtype=torch.float64)
    return Truncation(ones, real[:, 0], real[:, 1].long(), real[:, 2]), rows


def test_what_is_kept_is_what_min_p_top_k_and_top_p_keep_one_after_the_other() -> None:
    rng = random.Random(1)
    for trial in range(60):
        ranked = normal_logits(20, trial).double().mul(rng.choice([0.01, 0.5, 2])).sort(-1, True)
        relative = ranked.values - ranked.values[:, :1]
        cut, rows = random_truncation(rng, 20)
        expected = [
            kept_by_hand(line, *row) for line, row in zip(relative.tolist(), rows, strict=True)
        ]
        # The list is the whole vocabulary, so that nothing hangs on the total.
        certain, possible, is_final = count_kept(relative, cut, VOCAB, torch.zeros(20).double())
        assert certain.tolist() == possible.tolist() == expected
        assert is_final.all()


def test_a_short_list_gives_the_same_count_or_says_that_it_is_too_short() -> None:
    rng = random.Random(2)
    num_final = num_beyond = num_doubtful = 0
    for trial in range(60):
        ranked = normal_logits(20, trial).double().mul(rng.choice([0.1, 0.5, 2])).sort(-1, True)
        relative = ranked.values - ranked.values[:, :1]
        cut, rows = random_truncation(rng, 20)
        total = relative.exp().sum(-1)
        width = rng.randrange(1, VOCAB)
        # Any total within the doubt must leave the right count among the possible ones.
        total *= 1 + DOUBT * rng.uniform(-0.99, 0.99)
        certain, possible, is_final = count_kept(relative[:, :width], cut, VOCAB, total)
        for line, row in enumerate(rows):
            expected = kept_by_hand(relative[line].tolist(), *row)
            if is_final[line]:
                assert certain[line] <= expected <= possible[line]
                num_final += 1
                num_doubtful += bool(certain[line] != possible[line])
            else:
                # Only what ends beyond the list, or cannot be known from it, is left open.
                assert expected > width or (row[1] > width and (row[0] > 0 or row[1] < VOCAB))
                num_beyond += 1
    assert num_final > 300
    assert num_doubtful < num_final / 50
    assert num_beyond > 100
