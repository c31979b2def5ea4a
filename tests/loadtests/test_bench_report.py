"""Figures, ratios and tables from what was observed."""

import random
from itertools import permutations

import pytest

from bench_plot import write_plot
from bench_report import Report, RoundResult, as_markdown
from figures import WrongOutputError, decode_figures, median_figures, ratio
from isolated_runs import IsolatedRuns, Probe
from limits import Machine, ModelCost
from systems_under_test import INT8, Q8_0, TRITON, VLLM, Request, Trace, WaveTrace
from traffic import Traffic
from vllm_variants import Variant
from workloads import SAMPLED, budget_rounds, make_rounds, probe_rounds


def rounds(**changes):
    arguments = {
        "cases": ["decode", "prefill", "sampled"],
        "concurrency": [1, 8],
        "sides": ["charonia", "llama.cpp"],
        "prompt_tokens": 4,
        "new_tokens": 3,
        "min_requests": 4,
        "seed": 0,
        "long_concurrency": [1, 4],
    }
    return make_rounds(**(arguments | changes))


def test_all_sides_are_in_all_rounds_and_the_sampled_one_beside_them_in_decoding():
    assert [(r.name, [entry.label for entry in r.entries]) for r in rounds()] == [
        ("decode at concurrency 1", ["charonia", "llama.cpp", SAMPLED]),
        ("decode at concurrency 8", ["charonia", "llama.cpp", SAMPLED]),
        ("prefill at concurrency 1", ["charonia", "llama.cpp"]),
        ("prefill at concurrency 8", ["charonia", "llama.cpp"]),
    ]


def test_long_prompts_have_rounds_of_their_own_with_a_bar_of_their_own():
    sides = ["charonia", VLLM, INT8]
    asked = rounds(cases=["decode", "long"], sides=sides, long_tokens=[1024, 16_384])[2:]
    assert [(r.name, r.size, r.num_waves, r.new_tokens) for r in asked] == [
        ("prefill of 1,024 tokens at concurrency 1", "1 x 1,024", 1, 1),
        ("prefill of 1,024 tokens at concurrency 4", "4 x 1,024", 1, 1),
        ("prefill of 16,384 tokens at concurrency 1", "1 x 16,384", 1, 1),
        ("prefill of 16,384 tokens at concurrency 4", "4 x 16,384", 1, 1),
    ]
    assert {tuple(entry.label for entry in r.entries) for r in asked} == {("charonia", VLLM)}
    assert len(asked[3].requests(100, random.Random(0))[0][3].prompt) == 16_384
    runs = {"charonia": [{"tokens_per_second": 1.05}] * 6, VLLM: [{"tokens_per_second": 1.0}] * 6}
    result = RoundResult(asked[0], runs)
    assert str(result.comparisons()["charonia / vllm"]) == "1.05 (1.05 to 1.05) missed (1.1)"


def test_weights_of_8_bits_are_compared_with_each_other_where_they_are_asked_for():
    sides = ["charonia", "llama.cpp", INT8, Q8_0]
    asked = rounds(cases=["decode", "int8"], sides=sides)
    assert [[entry.label for entry in round_.entries] for round_ in asked] == [sides, sides]
    assert [e.label for e in rounds(cases=["int8"], sides=sides)[0].entries] == [
        "charonia",
        INT8,
        Q8_0,
    ]
    plain = rounds(cases=["decode", "prefill"], sides=sides)
    assert {e.label for round_ in plain for e in round_.entries} == {"charonia", "llama.cpp"}
    result = RoundResult(asked[0], {label: [{"tokens_per_second": 2.0}] * 6 for label in sides})
    assert str(result.comparisons()[f"{INT8} / {Q8_0}"]) == "1.00 (1.00 to 1.00) met (1.0)"


@pytest.mark.parametrize(("at_once", "bar"), [(1, 1.7), (8, 1.5), (32, 1.3), (4, 1.0)])
def test_decoding_is_judged_by_the_bar_over_vllm_at_that_concurrency(at_once: int, bar: float):
    (decode,) = rounds(cases=["decode"], sides=["charonia", VLLM], concurrency=[at_once])
    rates = {"charonia": [bar] * 6, VLLM: [1.0] * 6}
    result = RoundResult(
        decode, {name: [{"tokens_per_second": r} for r in found] for name, found in rates.items()}
    )
    (compared,) = result.comparisons().values()
    assert (compared.bar, compared.verdict) == (bar, "met")


def test_a_low_concurrency_repeats_its_wave():
    waves = rounds()[0].requests(10, random.Random(0))
    assert [[(len(prompt), num) for prompt, num in wave] for wave in waves] == [[(4, 3)]] * 4


def test_every_repetition_has_an_order_of_its_own_which_the_seed_says():
    def orders():
        shuffler = random.Random(0)
        return [[e.label for e in rounds()[0].in_turn(shuffler)] for _ in range(60)]

    found = orders()
    assert found == orders()
    assert {tuple(order) for order in found} == {*permutations(["charonia", "llama.cpp", SAMPLED])}


def test_rates_count_the_whole_wave_and_the_decode_rate_does_not_count_the_prefill():
    wave = WaveTrace(2.0, [Trace([1.0, 1.5, 2.0], [1, 1, 1])])
    figures = decode_figures([wave, wave], [[Request([7], 3)]] * 2)
    assert figures["tokens_per_second"] == pytest.approx(1.5)
    assert figures["decode_tokens_per_second"] == pytest.approx(2.0)
    assert figures["ttft_ms_p50"] == pytest.approx(1000)
    assert figures["inter_token_ms_p50"] == pytest.approx(500)


def test_a_side_that_gives_too_few_tokens_is_not_timed():
    wave = WaveTrace(1.0, [Trace([0.5, 1.0], [1, 1]), Trace([0.5, 1.0], [1, 1])])
    with pytest.raises(WrongOutputError, match="request 2 of 2 had 2 tokens; asked for were 3"):
        decode_figures([wave], [[Request([7], 2), Request([7], 3)]])


def test_requests_of_unlike_lengths_count_with_what_each_of_them_has():
    long, short = Trace([1.0, 1.5, 2.0, 4.0], [1, 1, 1, 2]), Trace([3.0], [1])
    asked = [[Request([7], 5), Request([7, 8], 1)]]
    figures = decode_figures([WaveTrace(4.0, [long, short])], asked)
    assert figures == {
        "tokens_per_second": pytest.approx(1.5),
        "ttft_ms_p50": pytest.approx(2000),
        "ttft_ms_p95": pytest.approx(3000),
        "ttft_ms_p99": pytest.approx(3000),
        "inter_token_ms_p50": pytest.approx(750),
        "inter_token_ms_p95": pytest.approx(1000),
    }


def test_where_all_requests_have_one_token_there_is_no_time_between_tokens():
    alone = decode_figures([WaveTrace(2.0, [Trace([2.0], [1])])], [[Request([7], 1)]])
    assert alone == {
        "tokens_per_second": 0.5,
        "ttft_ms_p50": 2000,
        "ttft_ms_p95": 2000,
        "ttft_ms_p99": 2000,
    }
    pair = decode_figures([WaveTrace(2.0, [Trace([1.0, 2.0], [1, 1])])], [[Request([7], 2)]])
    assert median_figures([alone, pair])["inter_token_ms_p50"] == 1000


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
    result.machine = [Machine(read_gb_s=1e9, gemm_gflop_s=2e-6)] * 3 + [Machine(1e9, 1e-6)] * 3
    report = Report({"left_out": {"vllm": "not installed"}}, ModelCost(1, 0, 0), [result])
    text = as_markdown(report)
    assert "| charonia | 200.0 (100 to 300) |" in text
    assert "| charonia / llama.cpp | 2.50 (2.00 to 3.00) met (1.0) |" in text
    assert "| limit, tok/s | 750 |" in text
    assert "| charonia | 0.35 (0.10 to 0.60) not shown (0.55) |" in text
    assert "| llama.cpp | 0.12 (0.05 to 0.20) |" in text
    (recorded,) = report.as_json()["rounds"]
    assert recorded["shares"]["charonia"]["verdict"] == "not shown"
    assert "Left out: vllm: not installed" in text


def test_of_shares_of_the_limit_charonias_alone_are_judged_and_only_of_usual_prompts():
    sides = ["charonia", VLLM, INT8]
    usual, *_, long = rounds(cases=["prefill", "long"], sides=sides, long_tokens=[1024])
    for asked, bar, said in ((usual, 0.55, "met"), (long, None, None)):
        runs = {label: [{"tokens_per_second": 600.0}] * 6 for label in sides}
        result = RoundResult(asked, runs, machine=[Machine(1e9, 2e-6)] * 6)
        shares = result.shares(ModelCost(1, 0, 0))
        assert list(shares) == ["charonia", VLLM]
        assert shares["charonia"].ratio.median == pytest.approx(0.6)
        assert (shares["charonia"].bar, shares["charonia"].verdict) == (bar, said)
        assert shares[VLLM].verdict is None


def test_what_was_measured_alone_is_shown_beside_the_turns_and_the_ways_with_the_fastest_first():
    result = RoundResult(rounds(cases=["decode"], concurrency=[8])[0])
    result.runs = {"charonia": [{"tokens_per_second": 200.0}]}
    result.machine = [Machine(1e9, 2e-6)]
    ways = [
        Probe(Variant("two", {}), {"decode at concurrency 8": [30.0, 50.0, 40.0]}),
        Probe(Variant("one", {}), failure="no"),
    ]
    alone = IsolatedRuns(ways, {"charonia": {"decode at concurrency 8": [210.0, 230.0, 220.0]}})
    report = Report({"left_out": {}}, None, [result], alone=alone)
    report.rounds[0].runs["charonia"][0] |= dict.fromkeys(
        ("ttft_ms_p50", "inter_token_ms_p50", "inter_token_ms_p95"), 1.0
    )
    text = as_markdown(report)
    assert "| side | decode 8 |\n| --- | --- |\n| charonia | 220.0 / 200.0 |" in text
    assert (
        "| way | decode at concurrency 8 |\n| --- | --- |\n| two | 40.0 |\n| one (failed: no) |  |"
        in text
    )
    assert report.as_json()["alone"]["vllm_ways"][1] == {
        "way": "one",
        "tokens_per_second": {},
        "failure": "no",
    }


TRAFFIC = Traffic("calls", ((3, 1), (5, 4), (2, 7), (9, 2)), most_tokens=16, share_left_out=0.25)


def trace_rounds(sides):
    return rounds(cases=["traces"], sides=sides, traffic=[TRAFFIC], trace_requests=2)


def test_ways_are_tried_with_some_of_each_kind_of_work_and_step_sizes_with_the_longest():
    found = rounds(
        cases=["decode", "prefill", "long", "traces"],
        concurrency=[1, 8],
        sides=["charonia"],
        long_tokens=[4096, 1024, 16384],
        traffic=[TRAFFIC],
        trace_requests=3,
    )
    tried = probe_rounds(found)
    assert [round_.name for round_ in tried] == [
        "decode at concurrency 1",
        "decode at concurrency 8",
        "prefill at concurrency 1",
        "prefill at concurrency 8",
        "prefill of 4,096 tokens at concurrency 1",
        "traces of calls at concurrency 1",
    ]
    assert [round_.name for round_ in budget_rounds(found)] == [
        "prefill of 16,384 tokens at concurrency 1",
        "traces of calls at concurrency 3",
    ]
    short = rounds(cases=["decode", "prefill"], concurrency=[1], sides=["charonia"])
    assert probe_rounds(short) == short
    assert budget_rounds(short) == []


def test_recorded_requests_are_consecutive_ones_and_their_place_is_drawn_each_time():
    (asked,) = trace_rounds(["charonia", TRITON, "transformers", VLLM, INT8])
    assert (asked.name, asked.size) == ("traces of calls at concurrency 2", "2 x calls")
    assert [entry.label for entry in asked.entries] == ["charonia", TRITON, VLLM]

    def draw(seed):
        shuffler = random.Random(seed)
        return [asked.requests(9, shuffler) for _ in range(40)]

    assert draw(1) == draw(1) != draw(2)
    found = set()
    for (wave,) in draw(1):
        found.add(tuple((len(request.prompt), request.max_tokens) for request in wave))
        assert all(0 < token < 9 for request in wave for token in request.prompt)
    assert found == {TRAFFIC.lengths[start : start + 2] for start in range(3)}


def test_recorded_requests_are_judged_by_a_bar_of_their_own_and_have_no_limit(tmp_path):
    (asked,) = trace_rounds(["charonia", TRITON, VLLM])
    latency = {"ttft_ms_p50": 30.0, "ttft_ms_p95": 40.0, "ttft_ms_p99": 50.0}
    rates = {"charonia": 115.0, TRITON: 105.0, VLLM: 100.0}
    runs = {name: [{"tokens_per_second": r, **latency}] * 6 for name, r in rates.items()}
    result = RoundResult(asked, runs, machine=[Machine(1e9, 2e-6)])
    about = {"left_out": {}, "model": "m", "date": "2026-11-27", "machine": {}}
    report = Report(about, ModelCost(1, 0, 0), [result])
    text = as_markdown(report)
    assert "| calls | 4 | 25.0% (more than 16 tokens) | 5 | 4 |" in text
    assert "| triton | 105.0 (105 to 105) |" in text
    assert "| traces 2 x calls | triton | 30.0 | 50.0 |  |  |" in text
    assert "| charonia / vllm | 1.15 (1.15 to 1.15) met (1.1) |" in text
    assert "| triton / vllm | 1.05 (1.05 to 1.05) missed (1.1) |" in text
    assert "limit, tok/s" not in text
    assert "Recorded requests have no such limit" in text
    (recorded,) = report.as_json()["rounds"]
    assert recorded["traffic"]["share_left_out"] == 0.25
    assert recorded["ratios"]["triton / vllm"]["verdict"] == "missed"
    write_plot(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 0
