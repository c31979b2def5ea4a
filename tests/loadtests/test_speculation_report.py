"""What is measured of speculation, and the tables and the picture of it, without any engine."""

import json
import random
from pathlib import Path

import pytest

from speculation.speculation_plot import write_plot
from speculation.speculation_report import EntryResult, Report, RoundResult, as_markdown
from speculation.trials import ADAPTIVE, CASES, WARM_UP_TOKENS, Pair, Round, make_groups
from workloads import Entry


def no_prompts(count):
    return [[1, 2]] * count


def pair(name):
    turns = {1: (96, 96), 4: (96,), 16: (64,), 64: (32,)}
    folder = Path(name)
    return Pair(name, folder, folder / "draft", no_prompts, no_prompts, turns, no_prompts)


def groups(cases=CASES, concurrency=None):
    return make_groups(cases, pair("shape"), pair("demo"), concurrency)


def result_of(round_, *, timing=None, outputs=((1, 2, 3, 4, 5, 6),)):
    """Every entry is twice as fast as the one before it."""
    timings = [timing] if timing else []
    entries = {
        entry.label: EntryResult([2.0**place] * 6, outputs, 2, timings)
        for place, entry in enumerate(round_.entries)
    }
    return RoundResult(round_, entries)


def test_every_entry_has_an_engine():
    for group in groups():
        for round_ in group.rounds:
            assert {entry.side for entry in round_.entries} <= set(group.engines)


def test_a_server_is_its_own_baseline_and_its_two_entries_are_two_tenants():
    for group in groups(["synthetic", "demo", "copy"]):
        for round_ in group.rounds:
            off, on = round_.entries
            assert off.side == on.side
            assert off.sampling == {"speculation": False, "tenant": "off"}
            assert on.sampling == {"tenant": "on"}


def test_the_adaptive_side_of_the_sweep_may_go_as_deep_as_any_other():
    for group in groups(["sweep"]):
        depths = {
            name: engine["speculative_config"]["num_speculative_tokens"]
            for name, engine in group.engines.items()
            if engine["speculative_config"]
        }
        assert depths.pop(ADAPTIVE) == max(depths.values())
        assert group.engines["depth 0"]["speculative_config"] is None
        assert all(round_.contender == ADAPTIVE for round_ in group.rounds)


def test_the_sweep_can_be_cut_to_some_concurrencies():
    found = groups(["sweep"], [4])
    assert [[round_.concurrency for round_ in group.rounds] for group in found] == [[4], [4]]


def test_short_turns_warm_up_more_often():
    rounds = groups(["sweep"])[0].rounds
    assert len({round_.num_warm_ups for round_ in rounds}) > 1
    for round_ in rounds:
        tokens = sum(round_.new_tokens)
        assert round_.num_warm_ups * tokens >= WARM_UP_TOKENS > (round_.num_warm_ups - 1) * tokens


def test_every_repetition_has_an_order_of_its_own():
    (group, _) = groups(["copy"])
    shuffler = random.Random(0)
    orders = [[e.label for e in group.rounds[0].in_turn(shuffler)] for _ in range(20)]
    assert {tuple(order) for order in orders} == {("off", "ngram"), ("ngram", "off")}


def test_a_missing_method_is_that_of_the_draft_model():
    assert pair("demo").engine({})["speculative_config"] == {"model": "demo/draft"}
    assert pair("demo").engine({"method": "ngram"})["speculative_config"] == {"method": "ngram"}


def test_acceptance_is_the_share_of_the_drafts_made_at_each_position():
    timings = [
        {"drafted_at_position": [4, 2], "accepted_at_position": [3, 1]},
        {"drafted_at_position": [4], "accepted_at_position": [1]},
        {"drafted_tokens": 0},
    ]
    assert EntryResult(timings=timings).acceptance() == [0.5, 0.5]


def test_the_tables_show_rates_ratio_bar_and_verdict():
    round_ = Round("demo", "pair", 1, (Entry("off", "x"), Entry("on", "x")), no_prompts, (6,), 1.6)
    timing = {"drafted_at_position": [4], "accepted_at_position": [3]}
    text = as_markdown(Report({}, [result_of(round_, timing=timing)]))
    assert "| on | 2.0 | off | 1.0 | 2.00 (2.00 to 2.00) | 97 % | 1.60 | met | 3.00 | 0 % |" in text
    assert "| demo | pair | on | 0.75 |" in text


def test_a_side_whose_text_goes_in_circles_makes_its_round_count_nowhere():
    round_ = groups(["copy"])[0].rounds[0]
    circles = result_of(round_, outputs=[[7] * 10])
    assert "| 2.00 | counts nowhere |" in as_markdown(Report({}, [circles]))
    fine = result_of(round_)
    fine.entries["off"] = circles.entries["off"]
    assert fine.judgement().verdict == "counts nowhere"


def test_all_but_copies_is_sampled_and_greedy_text_is_only_that_of_the_demo_and_of_copies():
    greedy = {
        round_.case
        for group in groups()
        for round_ in group.rounds
        if not round_.sampling.get("temperature")
    }
    assert greedy == {"demo", "copy"}


@pytest.fixture(scope="module")
def report():
    rounds = [result_of(round_) for group in groups() for round_ in group.rounds]
    about = {"date": "2026-11-21T00:00:00", "machine": {"CPU(s)": "2"}}
    return Report(about, rounds)


def test_the_sweep_has_a_table_with_its_best_side_marked(report):
    text = as_markdown(report)
    assert "| model | at once | depth 0 | depth 1 | depth 2 | depth 3 | depth 5 | depth 8 |" in text
    assert "| demo | 64 | 1.0 | 2.0 | 4.0 | 8.0 | 16.0 | 32.0 | **64.0** |" in text


def test_all_of_a_run_can_be_written(report, tmp_path):
    judged = json.loads(json.dumps(report.as_json()))["rounds"][0]
    assert judged["judgement"]["ratio"]["median"] == 2.0
    assert (judged["bar"], judged["judgement"]["verdict"]) == (2.0, "met")
    assert judged["circling"] == {"off": 0.0, "adaptive": 0.0}
    write_plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0
