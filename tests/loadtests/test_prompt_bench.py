"""What grows with a prompt's length: measured on a real server, and linear but for attention."""

import argparse
import random
from collections.abc import Sequence

import pytest

import prompt_bench
from prompt_bench import WAYS, Case
from support.long import long

SHORT, FEW, MANY = 1024, 8192, 65536
MOST = 2.5
"""Times as much that a token of the longest prompt may cost.

With a quadratic part that takes as long as the linear one at `FEW` tokens it would be 4.3, and 7.2
with nothing but a quadratic part.
"""
NOISE_S = 0.01
"""A difference between two prompts that may be chance."""
ROUNDS = 3
"""Measurements at most: what is quadratic shows in each, and other work on the machine ends."""
BESIDE = ("tritonserver", "scheduler")
"""Processes that do what is beside the steps; the engine does little else than these."""


def cost_of_length(cases: Sequence[Case], way: str) -> float:
    """What a token costs beside the steps of the longest prompt, over what it costs at `FEW`.

    It is processor time, which other work on the machine changes little. Of each length the least
    of all repetitions counts, without the least of a short prompt: so there is nothing in it that
    every prompt costs.
    """
    short, few, many = (
        min(
            sum(one.computed_s[role] for role in BESIDE)
            for one in cases
            if (one.way, one.length) == (way, length)
        )
        for length in (SHORT, FEW, MANY)
    )
    return (many - short) / (MANY - SHORT) / (max(few - short, NOISE_S) / (FEW - SHORT))


@long
def test_beside_the_steps_a_long_prompt_takes_time_and_memory_in_proportion_to_its_tokens():
    options = argparse.Namespace(lengths=[SHORT, FEW, MANY], repetitions=5)
    cases: list[Case] = []
    for _ in range(ROUNDS):
        cases += prompt_bench.run(options)
        if all(cost_of_length(cases, way) < MOST for way in WAYS):
            break
    assert len(cases) % (3 * 5 * len(WAYS)) == 0
    for case in cases:
        assert case.num_tokens == pytest.approx(case.length, rel=0.01)
        assert 0 < case.steps_s < case.total_s
        if case.length == SHORT:
            continue  # what it takes is what any first prompt does
        assert case.peaks["engine"] < prompt_bench.kv_mib(case.length) + 24
        assert case.peaks["scheduler"] < 12 + 2 * case.num_tokens / 1024
        assert case.peaks["tritonserver"] < 8 + case.num_tokens / 1024
    for way in WAYS:
        assert cost_of_length(cases, way) < MOST, f"{way}: more than linear"


def made_cases(us_per_token: float, us_per_token_at_few: float, seed: int) -> list[Case]:
    """Five repetitions on a machine that makes each prompt up to half as slow again, by chance.

    Args:
        us_per_token: of the linear part. us_per_token_at_few: of the quadratic one, at `FEW`.
    """
    drawn = random.Random(seed)
    cases = []
    for length in (SHORT, FEW, MANY):
        per_token = us_per_token + us_per_token_at_few * length / FEW
        seconds = 0.02 + length * per_token / 1e6
        for _ in range(5):
            computed = {"tritonserver": 0.01, "scheduler": seconds * drawn.uniform(1.0, 1.5)}
            cases.append(Case("text", length, length, 9.0, 1.0, {}, computed))
    return cases


@pytest.mark.parametrize("us_per_token", [0.6, 3.0, 6.0])
def test_a_quadratic_part_shows_and_noise_does_not_look_like_one(us_per_token):
    for seed in range(100):
        assert cost_of_length(made_cases(us_per_token, 0.0, seed), "text") < MOST
        both = made_cases(us_per_token, us_per_token, seed)
        assert cost_of_length(both, "text") > MOST
