"""What prompts take: by their tokens, and by what these look back on."""

import random
from dataclasses import replace

import pytest

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.estimators.pair_cost import PairCost
from charonia.control.estimators.prompt_time import PromptTime, num_pairs
from charonia.control.estimators.remaining_time import RemainingTime
from support.stepping import LIMITS, Bench, make_request

BUDGET = 512
TOKEN_S, PAIR_S = 200e-6, 150e-9
"""Seconds of a machine: 0.2 ms a token, and as much for 1,300 tokens that it looks back on."""


def seconds_of(num_tokens: int, num_before: int) -> float:
    """What such a chunk takes on that machine."""
    return TOKEN_S * num_tokens + PAIR_S * num_pairs(num_tokens, num_before)


def chunks_of(length: int, chunk: int) -> list[tuple[int, int]]:
    """Tokens of each chunk of a prompt, and of those before."""
    return [(min(chunk, length - first), first) for first in range(0, length, chunk)]


def learned(chunks: list[tuple[int, int]], noise: float = 0.0) -> PairCost:
    cost, drawn = PairCost(), random.Random(0)
    for num_tokens, num_before in chunks:
        scale = drawn.uniform(1 - noise, 1 + noise)
        pairs = num_pairs(num_tokens, num_before)
        cost.observe(num_tokens, pairs, scale * seconds_of(num_tokens, num_before))
    return cost


def prompt_time(chunks: list[tuple[int, int]]) -> PromptTime:
    time = PromptTime()
    time.start_epoch(replace(LIMITS, max_num_batched_tokens=BUDGET))
    for num_tokens, num_before in chunks:
        seconds = seconds_of(num_tokens, num_before)
        time.note_step(num_tokens, num_tokens, num_pairs(num_tokens, num_before), seconds)
    return time


@pytest.mark.parametrize("chunk", [64, 512, 2048])
def test_a_pair_is_learned_along_a_prompt(chunk: int) -> None:
    assert learned([]).seconds == 0.0
    assert learned(chunks_of(8 * chunk, chunk)).seconds == pytest.approx(PAIR_S, rel=0.1)
    noisy = learned(chunks_of(40 * chunk, chunk), noise=0.1)
    assert noisy.seconds == pytest.approx(PAIR_S, rel=0.25)


def test_chunks_of_unlike_sizes_have_their_pairs_in_common() -> None:
    chunks = [
        one for length, chunk in ((8000, 512), (5000, 77)) for one in chunks_of(length, chunk)
    ]
    random.Random(1).shuffle(chunks)
    assert learned(chunks).seconds == pytest.approx(PAIR_S, rel=0.1)


def test_prompts_that_look_at_equally_much_say_nothing_of_a_pair() -> None:
    assert learned([(100, 0)] * 200, noise=0.3).seconds < PAIR_S


def test_a_step_that_stalled_changes_little_and_no_pair_takes_less_than_nothing() -> None:
    cost = learned(chunks_of(16_000, 512))
    before = cost.seconds
    cost.observe(512, num_pairs(512, 15_000), 60.0)
    assert cost.seconds == pytest.approx(before, rel=0.5)
    falling = PairCost()
    for num_before in range(0, 8000, 500):
        falling.observe(500, num_pairs(500, num_before), 10.0 / (num_before + 1))
    assert falling.seconds == 0.0


def test_a_long_prompt_takes_what_its_end_looks_back_on() -> None:
    length = 32 * BUDGET
    time = prompt_time(chunks_of(length, BUDGET) * 3)
    assert time.of(length) == pytest.approx(seconds_of(length, 0), rel=0.15)
    assert time.of(BUDGET) == pytest.approx(seconds_of(BUDGET, 0), rel=0.3)
    at_the_end = time.of(BUDGET, length - BUDGET)
    assert at_the_end == pytest.approx(seconds_of(BUDGET, length - BUDGET), rel=0.15)
    assert at_the_end > 5 * time.of(BUDGET)


def test_rows_that_decode_say_nothing_of_what_prompts_look_at() -> None:
    time = prompt_time(chunks_of(16 * BUDGET, BUDGET))
    before = time.of(BUDGET, 8000) - time.of(BUDGET)
    for num_rows in (20, 200, 400):
        for _ in range(50):
            time.note_step(num_rows, 0, 0, 1.0)
            time.note_step(num_rows, num_rows // 2, 8000 * num_rows, 1.0)
    assert time.of(BUDGET, 8000) - time.of(BUDGET) == pytest.approx(before)


def test_the_rest_of_a_prompt_looks_back_on_what_is_cached_of_it() -> None:
    remaining = RemainingTime(OutputLengths(), prompt_time(chunks_of(16 * BUDGET, BUDGET) * 3))
    remaining.note_step(0.001)
    request = make_request("a", token_ids=[5] * (16 * BUDGET), max_tokens=1)
    end = remaining.of(request, 15 * BUDGET)
    assert end == pytest.approx(seconds_of(BUDGET, 15 * BUDGET), rel=0.2)
    short = make_request("b", token_ids=[5] * BUDGET, max_tokens=1)
    assert end > 3 * remaining.of(short)


def test_a_step_knows_what_its_prompts_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[int, int, int]] = []
    monkeypatch.setattr(PromptTime, "note_step", lambda _, *numbers: noted.append(numbers[:3]))
    bench = Bench(max_num_batched_tokens=32)
    bench.add(make_request("a", token_ids=[5] * 40, max_tokens=2))
    bench.ends()
    assert noted == [(32, 32, num_pairs(32, 0)), (8, 8, num_pairs(8, 32)), (1, 0, 0)]
