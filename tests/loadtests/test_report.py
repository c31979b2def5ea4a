"""Figures, ratios and tables from what was observed."""

import random
from itertools import permutations

import pytest

from cases import SAMPLED, make_rounds
from figures import WrongOutputError, decode_figures, ratio
from limits import Machine, ModelCost
from report import Report, RoundResult, as_markdown
from sides import Trace, WaveTrace


def rounds(**changes):
    arguments = {
        "cases": ["decode", "prefill", "sampled"],
        "concurrency": [1, 8],
        "max_concurrency": {"charonia": None, "llama.cpp": 1},
        "prompt_tokens": 4,
        "new_tokens": 3,
        "min_requests": 4,
        "seed": 0,
    }
    return make_rounds(**(arguments | changes))


def test_a_side_is_in_the_rounds_that_it_can_do():
    assert [(r.name, [entry.label for entry in r.entries]) for r in rounds()] == [
        ("decode at concurrency 1", ["charonia", "llama.cpp", SAMPLED]),
        ("decode at concurrency 8", ["charonia", SAMPLED]),
        ("prefill at concurrency 1", ["charonia", "llama.cpp"]),
        ("prefill at concurrency 8", ["charonia"]),
    ]


def test_a_low_concurrency_repeats_its_wave():
    prompts = rounds()[0].prompts(10, random.Random(0))
    assert [[len(prompt) for prompt in wave] for wave in prompts] == [[4]] * 4


def test_every_repetition_has_an_order_of_its_own_which_the_seed_says():
    def orders():
        shuffler = random.Random(0)
        return [[e.label for e in rounds()[0].in_turn(shuffler)] for _ in range(60)]

    found = orders()
    assert found == orders()
    assert {tuple(order) for order in found} == {*permutations(["charonia", "llama.cpp", SAMPLED])}


def test_rates_count_the_whole_wave_and_the_decode_rate_does_not_count_the_prefill():
    wave = WaveTrace(2.0, [Trace([1.0, 1.5, 2.0], [1, 1, 1])])
    figures = decode_figures([wave, wave], new_tokens=3)
    assert figures["tokens_per_second"] == pytest.approx(1.5)
    assert figures["decode_tokens_per_second"] == pytest.approx(2.0)
    assert figures["ttft_ms_p50"] == pytest.approx(1000)
    assert figures["inter_token_ms_p50"] == pytest.approx(500)


def test_a_side_that_gives_too_few_tokens_is_not_timed():
    with pytest.raises(WrongOutputError, match=r"\[2\] tokens; asked for were 3"):
        decode_figures([WaveTrace(1.0, [Trace([0.5, 1.0], [1, 1])])], new_tokens=3)


def test_ratios_are_pairwise_and_have_an_interval_where_there_are_pairs_enough():
    found = ratio([2.0, 6.0, 1.0], [1.0, 2.0, 4.0])
    assert (found.median, found.lowest, found.highest) == (2.0, 0.25, 3.0)
    assert found.interval is None
    assert str(found) == "2.00 (too few pairs)"
    assert str(ratio([2.0] * 6, [1.0] * 5 + [2.0])) == "2.00 (1.00 to 2.00)"


def test_tables_show_rates_ratios_and_shares_of_the_limit():
    result = RoundResult(rounds(cases=["prefill"])[0])
    result.runs = {
        "charonia": [{"tokens_per_second": rate} for rate in [100.0] * 3 + [300.0] * 3],
        "llama.cpp": [{"tokens_per_second": rate} for rate in [50.0] * 3 + [100.0] * 3],
    }
    result.machine = [Machine(read_gb_s=1e9, gemm_gflop_s=2e-6), Machine(1e9, 2e-6)]
    text = as_markdown(
        Report({"left_out": {"vllm": "not installed"}}, ModelCost(1, 0, 0), [result])
    )
    assert "| charonia | 200.0 (100 to 300) |" in text
    assert "| charonia / llama.cpp | 2.50 (2.00 to 3.00) met |" in text
    assert "| limit, tok/s | 1000 |" in text
    assert "| charonia | 0.20 |" in text
    assert "Left out: vllm: not installed" in text
