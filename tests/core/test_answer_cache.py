"""Requests that get another one's answer: the same that they would get alone, and nobody else's."""

import pytest

from charonia.config import SchedulerArgs
from charonia.errors import ConfigError
from charonia.protocol import CacheRange
from core.answer_bench import LOTS, OTHER_PROMPT, PROMPT, AnswerBench, alone, content
from support.echo import EchoExecutor


def test_an_equal_request_is_answered_without_a_step_and_the_same():
    bench = AnswerBench()
    bench.ask("a")
    bench.run()
    num_steps = bench.executor.num_steps
    bench.ask("b")
    assert bench.executor.num_steps == num_steps
    assert bench.tokens("b") == alone()
    assert content(bench, "b") == content(bench, "a")
    assert (bench.cached("a"), bench.cached("b")) == (None, "exact")
    assert (bench.misses, bench.hits("exact"), bench.hits("joined")) == (1, 1, 0)
    assert bench.core.metrics.counters["charonia_finished_total", "length"] == 2


def test_a_hit_comes_in_pieces_of_which_the_last_is_final():
    bench = AnswerBench()
    bench.ask("a", max_tokens=200)
    bench.run()
    bench.ask("b", max_tokens=200)
    chunks = bench.chunks["b"]
    assert [chunk.is_final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(chunks) > 4
    assert all(chunk.text and chunk.token_ids for chunk in chunks[:-1])
    assert max(len(chunk.token_ids) for chunk in chunks) < 64


def test_its_timing_says_that_nothing_was_computed_for_it():
    bench = AnswerBench()
    bench.ask("a")
    bench.run()
    bench.ask("b")
    timing = bench.chunks["b"][-1].timing
    assert timing.keys() >= {"queue_seconds", "first_token_seconds", "total_seconds"}
    assert (timing["cached_tokens"], timing["computed_tokens"]) == (0, 0)


def test_without_bytes_for_it_everything_is_computed():
    bench = AnswerBench(answer_cache_bytes=None)
    for key in ("a", "b"):
        bench.ask(key)
        bench.run()
        assert bench.tokens(key) == alone()
    assert bench.num_generated == 40
    assert (bench.misses, bench.hits("exact")) == (0, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "t"},
        {"cache_salt": "s"},
        {"seed": 6},
        {"prompt": OTHER_PROMPT},
        {"prompt": [*PROMPT, 7]},
        {"max_tokens": 19},
        {"stop": ("zzz",)},
        {"temperature": 0.5},
        {"logprobs": 0},
        {"n": 2},
        {"use_answer_cache": False},
        {"speculation": False},
    ],
)
def test_what_differs_is_computed(other):
    bench = AnswerBench()
    bench.ask("a")
    bench.run()
    before = bench.num_generated
    bench.ask("b", **other)
    bench.run()
    assert bench.num_generated > before
    assert bench.cached("b") is None


@pytest.mark.parametrize(
    "other",
    [
        {"deadline_ms": 60_000},
        {"cache_priority": 90, "cache_ttl_s": 5.0},
        {"cache_priority": (CacheRange(end=5, priority=80),)},
        {"timeout_s": 5.0},
        {"draft_ids": [1, 2, 3]},
    ],
)
def test_what_changes_no_token_does_not_count(other):
    bench = AnswerBench()
    bench.ask("a")
    bench.run()
    bench.ask("b", **other)
    assert bench.cached("b") == "exact"


def test_what_is_drawn_at_random_is_drawn_each_time():
    bench = AnswerBench()
    for key in ("a", "b"):
        bench.ask(key, seed=None)
        bench.run()
    assert bench.tokens("a") != bench.tokens("b")
    assert bench.misses == 0


@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"top_k": 1}])
def test_where_the_likeliest_is_taken_no_seed_is_needed_and_none_counts(greedy):
    bench = AnswerBench()
    bench.ask("a", seed=None, **greedy)
    bench.run()
    bench.ask("b", seed=3, **greedy)
    assert bench.cached("b") == "exact"
    assert bench.tokens("b") == bench.tokens("a")


def test_a_request_that_bypasses_the_cache_leaves_nothing_in_it():
    bench = AnswerBench()
    bench.ask("a", use_answer_cache=False)
    bench.run()
    bench.ask("b")
    bench.run()
    assert bench.cached("b") is None
    assert bench.num_generated == 40


def test_a_probe_is_computed():
    bench = AnswerBench()
    for key in ("a", "b"):
        bench.ask(key, is_probe=True)
        bench.run()
    assert bench.cached("b") is None
    assert bench.misses == 0


@pytest.mark.parametrize(
    "params", [{"n": 3}, {"n": 2, "best_of": 4}, {"logprobs": 2}, {"n": 2, "logprobs": 0}]
)
def test_samples_and_log_probabilities_are_kept_whole(params):
    bench = AnswerBench(EchoExecutor(num_blocks=128))
    bench.ask("a", **params)
    bench.run()
    before = bench.num_generated
    bench.ask("b", **params)
    assert bench.num_generated == before
    assert bench.cached("b") == "exact"
    assert content(bench, "b") == content(bench, "a")
    assert bench.chunks["b"][-1].num_open == 0


def test_prompt_log_probabilities_are_kept_too():
    bench = AnswerBench()
    bench.ask("a", prompt_logprobs=1)
    bench.run()
    bench.ask("b", prompt_logprobs=1)
    assert bench.cached("b") == "exact"
    assert content(bench, "b") == content(bench, "a")
    assert bench.chunks["b"][0].prompt_logprobs == bench.chunks["a"][0].prompt_logprobs


def test_an_answer_without_sums_of_log_probabilities_does_not_serve_who_wants_them():
    bench = AnswerBench()
    bench.ask("without")
    bench.run()
    bench.ask("with", return_cumulative_logprob=True)
    bench.run()
    assert bench.cached("with") is None
    assert bench.chunks["with"][-1].cumulative_logprob == -10.0
    bench.ask("with again", return_cumulative_logprob=True)
    assert bench.cached("with again") == "exact"
    assert bench.chunks["with again"][-1].cumulative_logprob == -10.0
    bench.ask("without again")
    assert bench.cached("without again") == "exact"
    assert bench.chunks["without again"][-1].cumulative_logprob is None


def test_an_answer_with_log_probabilities_does_not_give_its_place_to_one_without():
    bench = AnswerBench(EchoExecutor(max_num_seqs=1), scheduling_policy="priority")
    bench.ask("before", OTHER_PROMPT, max_tokens=60)
    bench.run(3)
    bench.ask("patient", priority=5)
    bench.ask("urgent", priority=1, return_cumulative_logprob=True)
    bench.run()
    assert bench.ended_at["urgent"] < bench.ended_at["patient"]
    bench.ask("with", return_cumulative_logprob=True)
    assert bench.cached("with") == "exact"
    assert bench.chunks["with"][-1].cumulative_logprob == -10.0
    bench.ask("without")
    assert bench.cached("without") == "exact"


def test_an_answer_that_failed_is_not_kept():
    bench = AnswerBench()
    bench.ask("a", deadline_ms=50)
    bench.run()
    assert bench.error("a").kind == "timeout"
    bench.ask("b")
    bench.run()
    assert bench.cached("b") is None
    assert bench.tokens("b") == alone()


# ---------------------------------------------------------------------- bounds


def test_answers_are_kept_for_their_time():
    bench = AnswerBench(answer_cache_ttl_s=100.0)
    bench.ask("a")
    bench.run()
    bench.now += 99.0
    bench.step()
    bench.ask("b")
    assert bench.cached("b") == "exact"
    bench.now += 1.0
    bench.ask("c")
    bench.run()
    assert bench.cached("c") is None
    assert bench.core.metrics.counters["charonia_answer_cache_evicted_total", "age"] == 1
    bench.now += 101.0
    bench.step()
    assert bench.core.metrics.counters["charonia_answer_cache_evicted_total", "age"] == 2
    assert bench.core.metrics.gauges["charonia_answer_cache_bytes", ""] == 0
    assert bench.core.metrics.gauges["charonia_answer_cache_answers", ""] == 0


def test_the_least_recently_used_answer_goes_first_when_bytes_run_out():
    bench = AnswerBench(answer_cache_bytes=3000)
    for seed in (1, 2, 3):
        bench.ask(f"first {seed}", seed=seed)
        bench.run()
    bench.ask("again", seed=1)
    assert bench.cached("again") == "exact"
    bench.ask("new", seed=4)
    bench.run()
    assert bench.core.metrics.counters["charonia_answer_cache_evicted_total", "bytes"] == 1
    bench.step()
    assert 0 < bench.core.metrics.gauges["charonia_answer_cache_bytes", ""] <= 3000
    for seed, cached in ((1, "exact"), (3, "exact"), (4, "exact"), (2, None)):
        bench.ask(f"then {seed}", seed=seed)
        bench.run()
        assert bench.cached(f"then {seed}") == cached


def test_an_answer_larger_than_all_may_be_is_not_kept():
    bench = AnswerBench(answer_cache_bytes=900)
    for key in ("a", "b"):
        bench.ask(key, max_tokens=100)
        bench.run()
        assert bench.cached(key) is None
        assert bench.tokens(key) == alone(max_tokens=100)


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"answer_cache_bytes": "0"}, "answer_cache_bytes"),
        ({"answer_cache_bytes": "many"}, "answer_cache_bytes"),
        ({"answer_cache_bytes": "813"}, "must be an integer from 814 to 2147483647 or null"),
        ({"answer_cache_ttl_s": "60"}, "= 60.0 has no effect without answer_cache_bytes"),
        ({"answer_cache_ttl_s": "0"}, "answer_cache_ttl_s"),
    ],
)
def test_a_wrong_setting_is_named(values, says):
    with pytest.raises(ConfigError, match=says):
        SchedulerArgs.from_parameters(values)


def test_settings_are_read_from_text():
    args = SchedulerArgs.from_parameters({"answer_cache_bytes": str(LOTS)})
    assert (args.answer_cache_bytes, args.answer_cache_ttl_s) == (LOTS, 3600.0)
    assert SchedulerArgs.from_parameters({}).answer_cache_bytes is None
