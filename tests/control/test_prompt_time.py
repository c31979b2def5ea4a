"""What prompts take: by their tokens, and by what these look back on."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.estimators.pair_cost import AttentionTime, PairCost
from charonia.control.estimators.prompt_time import PromptTime, num_pairs
from charonia.control.estimators.remaining_time import RemainingTime
from support.stepping import LIMITS, Bench, make_request

BUDGET = 512
TOKEN_S, PAIR_S = 200e-6, 150e-9
"""Seconds of a machine: 0.2 ms a token, and as much for 1,300 tokens that it looks back on."""
PAIRS = AttentionTime(PAIR_S)


def seconds_of(num_tokens: int, num_before: int, attention: AttentionTime = PAIRS) -> float:
    """What such a chunk takes on that machine."""
    return TOKEN_S * num_tokens + attention_of(num_tokens, num_before, attention)


def attention_of(num_tokens: int, num_before: int, attention: AttentionTime) -> float:
    """What such a chunk takes for attention."""
    return attention.of(num_pairs(num_tokens, num_before), num_before + num_tokens)


def chunks_of(length: int, chunk: int) -> list[tuple[int, int]]:
    """Tokens of each chunk of a prompt, and of those before."""
    return [(min(chunk, length - first), first) for first in range(0, length, chunk)]


def learned(
    steps: Iterable[Sequence[tuple[int, int]]],
    noise: float = 0.0,
    attention: AttentionTime = PAIRS,
) -> AttentionTime:
    """What steps of such chunks teach."""
    cost, drawn = PairCost(), random.Random(0)
    for chunks in steps:
        scale = drawn.uniform(1 - noise, 1 + noise)
        cost.observe(
            sum(num_tokens for num_tokens, _ in chunks),
            sum(num_pairs(*chunk) for chunk in chunks),
            sum(map(sum, chunks)),
            scale * sum(seconds_of(*chunk, attention) for chunk in chunks),
        )
    return cost.time


def alone(chunks: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Each in a step of its own."""
    return [[chunk] for chunk in chunks]


def prompt_time(chunks: list[tuple[int, int]], attention: AttentionTime = PAIRS) -> PromptTime:
    time = PromptTime()
    time.start_epoch(replace(LIMITS, max_num_batched_tokens=BUDGET))
    for num_tokens, num_before in chunks:
        pairs, keys = num_pairs(num_tokens, num_before), num_before + num_tokens
        seconds = seconds_of(num_tokens, num_before, attention)
        time.note_step(num_tokens, num_tokens, pairs, keys, seconds)
    return time


@pytest.mark.parametrize("chunk", [16, 64, 512, 2048])
def test_a_pair_is_learned_along_a_prompt(chunk: int) -> None:
    assert learned([]) == (0.0, 0.0)
    num_chunks = max(8, 8000 // chunk)
    exact = learned(alone(chunks_of(num_chunks * chunk, chunk)))
    assert exact.pair_s == pytest.approx(PAIR_S, rel=0.1)
    noisy = learned(alone(chunks_of(5 * num_chunks * chunk, chunk)), noise=0.1)
    assert noisy.pair_s == pytest.approx(PAIR_S, rel=0.25)
    assert noisy.key_s < chunk * PAIR_S / 100


def test_chunks_of_unlike_sizes_have_their_pairs_in_common() -> None:
    chunks = chunks_of(8000, 512) + chunks_of(5000, 77)
    random.Random(1).shuffle(chunks)
    found = learned(alone(chunks))
    assert found.pair_s == pytest.approx(PAIR_S, rel=0.1)
    assert found.key_s < 3 * PAIR_S


READING = AttentionTime(PAIR_S, 30 * PAIR_S)
MIXED = chunks_of(32_000, 512) + chunks_of(4000, 32)


def of_several() -> Iterator[list[tuple[int, int]]]:
    """Steps of one to eight small chunks, and of large ones by themselves."""
    drawn = random.Random(2)
    for num_chunks in (1, 4, 8) * 40:
        yield [(64, drawn.randrange(4000)) for _ in range(num_chunks)]
    yield from alone(chunks_of(16_000, 2048) * 3)


@pytest.mark.parametrize("steps", [alone(MIXED), [*of_several()]], ids=["one", "several"])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_what_reading_the_keys_takes_is_seen_by_small_chunks_beside_large_ones(
    steps: list[list[tuple[int, int]]], noise: float
) -> None:
    random.Random(1).shuffle(steps)
    found = learned(steps, noise, READING)
    for num_tokens in (16, 32, 64, 512, 2048):
        expected = attention_of(num_tokens, 8000, READING)
        assert attention_of(num_tokens, 8000, found) == pytest.approx(expected, rel=0.3)


def test_chunks_of_nearly_one_size_say_little_of_reading() -> None:
    chunks = chunks_of(40_000, 362) + chunks_of(40_000, 512)
    random.Random(1).shuffle(chunks)
    found = learned(alone(chunks), noise=0.1)
    for num_tokens in (64, 512):
        expected = attention_of(num_tokens, 8000, PAIRS)
        assert attention_of(num_tokens, 8000, found) == pytest.approx(expected, rel=0.5)


def test_a_prompt_reads_its_keys_once_for_each_chunk() -> None:
    time = prompt_time((chunks_of(16 * BUDGET, BUDGET) + chunks_of(4000, 32)) * 3, READING)
    for length in (5 * BUDGET, 5 * BUDGET + 7):
        chunks = [(num, 900 + before) for num, before in chunks_of(length, BUDGET)]
        expected = sum(attention_of(*chunk, time.attention) for chunk in chunks)
        found = time.of(length, 900) - sum(time._cost.at(num) for num, _ in chunks)
        assert found == pytest.approx(expected)


def test_prompts_that_look_at_equally_much_say_nothing_of_a_pair() -> None:
    assert learned([[(100, 0)]] * 200, noise=0.3).pair_s < PAIR_S


def test_a_step_that_stalled_changes_little_and_no_pair_takes_less_than_nothing() -> None:
    cost = PairCost()
    for num_tokens, num_before in chunks_of(16_000, 512):
        pairs, keys = num_pairs(num_tokens, num_before), num_before + num_tokens
        cost.observe(num_tokens, pairs, keys, seconds_of(num_tokens, num_before))
    before = cost.time.pair_s
    cost.observe(512, num_pairs(512, 15_000), 15_512, 60.0)
    assert cost.time.pair_s == pytest.approx(before, rel=0.5)
    falling = PairCost()
    for num_before in range(0, 8000, 500):
        pairs = num_pairs(500, num_before)
        falling.observe(500, pairs, num_before + 500, 10.0 / (num_before + 1))
    assert falling.time == (0.0, 0.0)


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
            time.note_step(num_rows, 0, 0, 0, 1.0)
            time.note_step(num_rows, num_rows // 2, 8000 * num_rows, 8000, 1.0)
    assert time.of(BUDGET, 8000) - time.of(BUDGET) == pytest.approx(before)


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_steps_without_prompts_soon_tell_that_the_machine_is_slower(num_rows: int) -> None:
    time = prompt_time(chunks_of(16 * BUDGET, BUDGET) * 3)
    before, step_s = time.of(BUDGET), seconds_of(num_rows, 0)
    for _ in range(max(300, round(2.0 / step_s))):
        time.note_step(num_rows, 0, 0, 0, step_s)
    assert time.of(num_rows) == pytest.approx(step_s, rel=0.05)
    assert time.of(BUDGET) == pytest.approx(before, rel=0.05)
    for _ in range(max(60, round(0.5 / (3 * step_s)))):
        time.note_step(num_rows, 0, 0, 0, 3 * step_s)
    assert time.of(num_rows) == pytest.approx(3 * step_s, rel=0.1)
    assert time.of(BUDGET) == pytest.approx(3 * before, rel=0.25)


@pytest.mark.parametrize("long_s", [0.003, 0.006])
def test_of_quick_steps_the_long_ones_are_not_learned_from_more_often(long_s: float) -> None:
    time, drawn = prompt_time([]), random.Random(3)
    for _ in range(20_000):
        time.note_step(1, 0, 0, 0, long_s if drawn.random() < 0.05 else 250e-6)
    assert time.of(1) == pytest.approx(250e-6, rel=0.1)


def test_what_a_prompt_takes_is_known_however_long_there_was_none() -> None:
    time = prompt_time(chunks_of(16 * BUDGET, BUDGET) * 3)
    before = time.of(BUDGET)
    for _ in range(3000):
        time.note_step(64, 0, 0, 0, seconds_of(64, 0))
    assert time.of(BUDGET) == pytest.approx(before, rel=0.05)


def test_the_rest_of_a_prompt_looks_back_on_what_is_cached_of_it() -> None:
    remaining = RemainingTime(OutputLengths(), prompt_time(chunks_of(16 * BUDGET, BUDGET) * 3))
    remaining.note_step(0.001)
    request = make_request("a", token_ids=[5] * (16 * BUDGET), max_tokens=1)
    end = remaining.of(request, 15 * BUDGET)
    assert end == pytest.approx(seconds_of(BUDGET, 15 * BUDGET), rel=0.2)
    short = make_request("b", token_ids=[5] * BUDGET, max_tokens=1)
    assert end > 3 * remaining.of(short)


def test_a_step_knows_what_its_prompts_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[int, int, int, int]] = []
    monkeypatch.setattr(PromptTime, "note_step", lambda _, *numbers: noted.append(numbers[:4]))
    bench = Bench(max_num_batched_tokens=32)
    bench.add(make_request("a", token_ids=[5] * 40, max_tokens=2))
    bench.ends()
    assert noted == [
        (32, 32, num_pairs(32, 0), 32),
        (8, 8, num_pairs(8, 32), 40),
        (1, 0, 0, 0),
    ]
