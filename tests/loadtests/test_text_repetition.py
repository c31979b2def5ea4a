"""Which text goes in circles."""

import random

import pytest

from charonia import LLM, SamplingParams
from charonia.config import DEMO_CHECKPOINT
from speculation.prompts import HeldOutFiles
from support.parity import ONE_THREAD
from text_repetition import MOST_CIRCLING, circling_share


def test_a_token_counts_where_the_four_before_it_say_which_comes_next() -> None:
    circle = [1, 2, 3, 4] * 3  # the first four, and the four that no earlier ones foretell
    assert circling_share([circle]) == 4 / 12
    assert circling_share([[7] * 10]) == 5 / 10
    assert circling_share([[1, 2, 3, 4, 5, 1, 2, 3, 4, 6]]) == 0.0


def test_the_last_time_decides_and_texts_know_nothing_of_each_other() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3, 4, 6]
    assert circling_share([text]) == pytest.approx(1 / 15)
    assert circling_share([text[:5], text[:5]]) == 0.0


def test_long_texts_weigh_more_and_no_text_does_not_circle() -> None:
    assert circling_share([[7] * 10, list(range(40))]) == 5 / 50
    assert circling_share([]) == circling_share([[]]) == 0.0


def test_random_text_never_circles() -> None:
    shuffler = random.Random(0)
    assert circling_share([[shuffler.randrange(4096) for _ in range(200)]]) == 0.0


def test_the_demo_model_circles_greedily_and_neither_sampling_nor_people_do() -> None:
    draw = HeldOutFiles(DEMO_CHECKPOINT).stretches(128, seed=0)

    def written(temperature: float) -> list[list[int]]:
        params = [
            SamplingParams(max_tokens=128, temperature=temperature, seed=seed, ignore_eos=True)
            for seed in range(12)
        ]
        return [list(each.outputs[0].token_ids) for each in llm.generate(draw(12), params)]

    with LLM(model=str(DEMO_CHECKPOINT), device="cpu", max_model_len=512, **ONE_THREAD) as llm:
        assert circling_share(written(0.0)) > 0.5
        assert circling_share(written(1.0)) < MOST_CIRCLING
    assert circling_share(draw(50)) < MOST_CIRCLING
