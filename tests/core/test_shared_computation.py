"""Requests that are computed once for several clients, and samples that some do without."""

import pytest

from charonia.config import EngineArgs
from core.answer_bench import OTHER_PROMPT, AnswerBench, alone, content
from support.echo import EchoExecutor
from support.events import events


def test_equal_requests_that_run_at_once_are_computed_once():
    bench = AnswerBench()
    keys = ["a", "b", "c"]
    for key in keys:
        bench.ask(key)
    bench.run(10)
    assert 0 < len(bench.tokens("a")) < 20
    bench.ask("late")
    assert bench.tokens("late") == bench.tokens("a")
    bench.run()
    for key in [*keys, "late"]:
        assert bench.tokens(key) == alone()
        assert content(bench, key) == content(bench, "a")
        assert bench.chunks[key][-1].is_final
    assert bench.num_generated == 20
    assert (bench.misses, bench.hits("joined")) == (1, 3)
    assert [bench.cached(key) for key in ("a", "b", "late")] == [None, "joined", "joined"]
    assert bench.joined == ["b", "c", "late"]
    assert bench.core.metrics.counters["charonia_finished_total", "length"] == 4
    assert bench.core.metrics.counters["charonia_tenant_generation_tokens_total", "other"] == 20


def test_who_came_first_may_leave_and_the_others_get_all():
    bench = AnswerBench()
    bench.ask("a")
    bench.ask("b")
    bench.run(8)
    bench.cancel("a")
    assert bench.error("a").kind == "cancelled"
    bench.ask("c")
    bench.run()
    assert bench.tokens("a") == alone()[: len(bench.tokens("a"))]
    for key in ("b", "c"):
        assert bench.tokens(key) == alone()
    assert bench.num_generated == 20
    counters = bench.core.metrics.counters
    assert counters["charonia_finished_total", "cancelled"] == 1
    assert counters["charonia_cancellations_total", ""] == 1
    bench.ask("d")
    assert bench.cached("d") == "exact"


@pytest.mark.parametrize(("leaves", "pays"), [(None, "a"), ("a", "b"), ("b", "a")])
def test_the_cost_is_in_one_timing_also_where_who_came_first_leaves(leaves, pays):
    bench = AnswerBench()
    for key in "abc":
        bench.ask(key)
    bench.run(8)
    if leaves is not None:
        bench.cancel(leaves)
    bench.run()
    costs = {key: bench.chunks[key][-1].timing["engine_seconds"] for key in "abc"}
    steps = bench.core.metrics.histograms["charonia_step_seconds"]
    assert costs.pop(pays) == pytest.approx(steps.sum)
    assert set(costs.values()) == {0}


def test_a_key_may_come_again_while_what_it_began_is_computed_for_others():
    bench = AnswerBench()
    bench.ask("a")
    bench.ask("b")
    bench.run(8)
    bench.cancel("a")
    num_before = len(bench.tokens("a"))
    bench.ask("a", max_tokens=19)
    bench.run()
    assert bench.tokens("b") == alone()
    assert bench.tokens("a")[num_before:] == alone()[:19]


def test_the_computation_ends_with_the_last_who_wants_it():
    bench = AnswerBench()
    bench.ask("a", max_tokens=500)
    bench.ask("b", max_tokens=500)
    bench.run(8)
    bench.cancel("b")
    bench.run(2)
    bench.cancel("a")
    bench.cancel("a")
    bench.run()
    assert not bench.core.has_requests
    assert {bench.error(key).kind for key in "ab"} == {"cancelled"}
    assert bench.core.metrics.counters["charonia_cancellations_total", ""] == 2
    bench.ask("c", max_tokens=500)
    bench.run()
    assert bench.cached("c") is None
    assert bench.tokens("c") == alone(max_tokens=500)


def cancelled(bench: AnswerBench) -> list[tuple[str, str, int]]:
    """Key, request id and tokens of each that the log tells of."""
    found = events(bench.lines, "request_cancelled")
    return [(one["key"], one["request_id"], int(one["tokens"])) for one in found]


def test_who_cancels_last_is_logged_and_not_who_came_first():
    bench = AnswerBench()
    for key in "abc":
        bench.ask(key, max_tokens=50)
    bench.run(8)
    for key in "acb":
        bench.cancel(key)
        bench.run(2)
    assert cancelled(bench) == [(key, f"id-{key}", len(bench.tokens(key))) for key in "acb"]
    assert bench.tokens("b")
    assert bench.core.metrics.counters["charonia_cancellations_total", ""] == 3


def test_who_does_without_the_last_sample_is_logged_however_it_got_there():
    bench = sample_bench()
    for key in ("a", "b"):
        bench.ask(key, n=2, max_tokens=50)
    bench.run(6)
    bench.cancel_samples("b", [0])
    bench.cancel("a")
    bench.cancel_samples("b", [1])
    bench.run()
    assert [one[:2] for one in cancelled(bench)] == [("a", "id-a"), ("b", "id-b")]
    counters = bench.core.metrics.counters
    assert counters["charonia_cancellations_total", ""] == 2
    assert counters["charonia_finished_total", "cancelled"] == 2


def test_each_has_its_own_time():
    bench = AnswerBench()
    bench.ask("a", deadline_ms=80)
    bench.ask("b")
    bench.ask("c", deadline_ms=60)
    bench.run()
    assert {bench.error(key).kind for key in "ac"} == {"timeout"}
    assert bench.ended_at["c"] < bench.ended_at["a"] < bench.ended_at["b"]
    assert bench.tokens("b") == alone()
    assert bench.core.metrics.counters["charonia_deadline_missed_total", "other"] == 2


def test_two_limits_that_are_over_at_once_are_one_end():
    bench = AnswerBench(EchoExecutor(max_num_seqs=1))
    bench.ask("before", OTHER_PROMPT, max_tokens=60)
    bench.run(3)
    bench.ask("a", deadline_ms=50, timeout_s=0.05)
    bench.ask("b", deadline_ms=50, timeout_s=0.05)
    bench.ask("c", deadline_ms=50, timeout_s=0.05, seed=6)
    bench.now += 1.0
    bench.step()
    for key in "abc":
        assert [chunk.error.kind for chunk in bench.chunks[key]] == ["timeout"]
    bench.run()
    assert bench.num_generated == 60


def test_a_time_until_the_first_step_counts_no_longer_for_who_joins_after_it():
    bench = AnswerBench(EchoExecutor(max_num_seqs=1))
    bench.ask("before", OTHER_PROMPT, max_tokens=60)
    bench.run(3)
    bench.ask("a")
    bench.ask("waits", timeout_s=0.05)
    bench.run()
    assert bench.error("waits").kind == "timeout"
    assert bench.tokens("a") == alone()
    bench.ask("x", seed=9)
    bench.run(3)
    bench.ask("y", seed=9, timeout_s=0.02)
    bench.run()
    assert bench.tokens("y") == alone(seed=9)


def test_the_last_who_waits_runs_out_of_time_and_nothing_is_computed_for_nobody():
    bench = AnswerBench(EchoExecutor(max_num_seqs=1))
    bench.ask("before", OTHER_PROMPT, max_tokens=60)
    bench.run(3)
    bench.ask("a", timeout_s=0.05)
    bench.run()
    assert bench.error("a").kind == "timeout"
    assert bench.num_generated == 60
    assert bench.core.metrics.counters["charonia_cancellations_total", ""] == 0


def test_who_is_more_urgent_does_not_wait_behind_who_is_less():
    bench = AnswerBench(EchoExecutor(max_num_seqs=1))
    bench._engine_args = EngineArgs(model="echo", scheduling_policy="priority")
    bench.restart_scheduler()
    bench.core.step()
    bench.ask("before", OTHER_PROMPT, max_tokens=60)
    bench.run(3)
    bench.ask("patient", priority=5)
    bench.ask("patient, too", priority=7)
    bench.ask("urgent", priority=1)
    bench.run()
    assert [bench.cached(key) for key in ("patient", "patient, too", "urgent")] == [
        None,
        "joined",
        None,
    ]
    assert bench.ended_at["urgent"] < bench.ended_at["patient"]


def test_where_deadlines_say_who_is_next_a_request_with_one_is_computed_by_itself():
    bench = AnswerBench()
    bench._engine_args = EngineArgs(model="echo", scheduling_policy="deadline")
    bench.restart_scheduler()
    bench.core.step()
    for key in ("a", "b"):
        bench.ask(key, deadline_ms=60_000)
    bench.ask("c")
    bench.run()
    assert [bench.cached(key) for key in "abc"] == [None, None, None]
    bench.ask("d", deadline_ms=60_000)
    assert bench.cached("d") == "exact"
    assert {tuple(bench.tokens(key)) for key in "abcd"} == {tuple(alone())}


@pytest.mark.parametrize("threshold", [None, 0.9])
@pytest.mark.parametrize(
    ("scheduling_policy", "late_requests", "kind"),
    [
        ("deadline", "reject", "late"),
        ("deadline", "demote", "timeout"),
        ("fcfs", "reject", "timeout"),
    ],
)
def test_who_has_not_started_at_its_deadline_is_told_what_it_would_be_told_alone(
    scheduling_policy, late_requests, kind, threshold
):
    """Also while a similar prompt is looked for."""
    bench = AnswerBench(
        scheduling_policy=scheduling_policy,
        late_requests=late_requests,
        semantic_cache_threshold=threshold,
    )
    bench.ask("a", deadline_ms=50)
    bench.ask("b", timeout_s=0.05)
    bench.now += 0.1
    bench.step()
    assert (bench.error("a").kind, bench.error("b").kind) == (kind, "timeout")
    assert str(bench.error("a")).startswith("deadline_ms has passed")
    bench.ask("c", max_tokens=100, deadline_ms=500)
    bench.run()
    assert bench.error("c").kind == "timeout", "it has started"


def test_all_samples_of_a_request_are_joined():
    bench = AnswerBench(EchoExecutor(num_blocks=128))
    bench.ask("a", n=3)
    bench.run(8)
    bench.ask("b", n=3)
    bench.run(3)
    bench.cancel("a")
    bench.ask("c", n=3)
    bench.run()
    for key in ("b", "c"):
        assert [one[2] for one in content(bench, key)] == [alone(seed=5 + i) for i in range(3)]
        assert [chunk.is_final for chunk in bench.chunks[key]].count(True) == 1
    finals = [chunk for chunk in bench.chunks["a"] if chunk.error is not None]
    assert [chunk.num_open for chunk in finals] == [2, 1, 0]


# ---------------------------------------------------------------------- single samples


def sample_bench() -> AnswerBench:
    return AnswerBench(EchoExecutor(num_blocks=256))


def reasons(bench: AnswerBench, key: str) -> list[str | None]:
    """Why each of three samples ended."""
    ends = {one.index: one.finish_reason for one in bench.chunks[key] if one.ends_sample}
    return [ends[index] for index in range(3)]


def sample_tokens(bench: AnswerBench, key: str, index: int) -> list[int]:
    own = [one for one in bench.chunks[key] if one.index == index]
    return [token_id for one in own for token_id in one.token_ids]


def test_one_of_several_clients_may_do_without_a_sample():
    bench = sample_bench()
    bench.ask("a", n=3)
    bench.ask("b", n=3)
    bench.run(8)
    bench.cancel_samples("b", [1, 7])
    num_before = len(sample_tokens(bench, "b", 1))
    bench.run()
    assert reasons(bench, "a") == ["length"] * 3
    assert reasons(bench, "b") == ["length", "cancelled", "length"]
    assert len(sample_tokens(bench, "b", 1)) == num_before
    for key, indexes in (("a", (0, 1, 2)), ("b", (0, 2))):
        for index in indexes:
            assert sample_tokens(bench, key, index) == alone(seed=5 + index)
        assert [chunk.is_final for chunk in bench.chunks[key]].count(True) == 1
    bench.ask("c", n=3)
    assert bench.cached("c") == "exact"
    assert reasons(bench, "c") == ["length"] * 3


def test_what_one_client_alone_does_without_is_not_computed_for_others():
    bench = sample_bench()
    bench.ask("a", n=3)
    bench.run(8)
    bench.cancel_samples("a", [2])
    bench.ask("b", n=3)
    bench.run()
    assert reasons(bench, "a") == ["length", "length", "cancelled"]
    assert reasons(bench, "b") == ["length"] * 3
    assert [bench.cached(key) for key in "ab"] == [None, None]
    for index in range(3):
        assert sample_tokens(bench, "b", index) == alone(seed=5 + index)


def test_who_does_without_all_samples_has_left_and_others_go_on():
    bench = sample_bench()
    for key in "abc":
        bench.ask(key, n=3)
    bench.run(8)
    bench.cancel_samples("b", [0])
    bench.cancel_samples("b", [1, 2])
    bench.cancel_samples("a", [0, 1, 2])
    assert reasons(bench, "b") == reasons(bench, "a") == ["cancelled"] * 3
    bench.cancel_samples("b", [0, 1, 2])
    bench.run()
    assert reasons(bench, "c") == ["length"] * 3
    counters = bench.core.metrics.counters
    assert counters["charonia_finished_total", "cancelled"] == 2
    assert counters["charonia_finished_total", "length"] == 1
    assert counters["charonia_cancellations_total", ""] == 2
    assert all(bench.chunks[key][-1].error is None for key in "abc")


def test_the_best_of_several_are_not_known_before_the_end():
    bench = sample_bench()
    for key in "ab":
        bench.ask(key, n=2, best_of=3)
    bench.run(8)
    bench.cancel_samples("b", [0])
    bench.run()
    assert content(bench, "a") == content(bench, "b")


def test_samples_that_nobody_wants_any_more_are_computed_no_longer():
    bench = sample_bench()
    values = {"n": 3, "max_tokens": 60, "stop_token_ids": (alone(max_tokens=60)[12],)}
    for key in "ab":
        bench.ask(key, **values)
    bench.run(6)
    for key in "ab":
        bench.cancel_samples(key, [1, 2])
    bench.run()
    for key in "ab":
        assert reasons(bench, key) == ["stop", "cancelled", "cancelled"]
        assert sample_tokens(bench, key, 0) == alone(max_tokens=60)[:13]
        assert bench.chunks[key][-1].num_open == 0
    assert (bench.cached("a"), bench.cached("b")) == (None, "joined")
    assert bench.num_generated < 3 * 20
    counters = bench.core.metrics.counters
    assert counters["charonia_finished_total", "stop"] == 2
    assert counters["charonia_cancellations_total", ""] == 0
    assert not bench.answers._computations
    bench.ask("c", **values)
    bench.run()
    assert bench.cached("c") is None
    assert sample_tokens(bench, "c", 1) == alone(seed=6, max_tokens=60)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_who_does_without_the_last_sample_does_not_wait_for_an_engine(order):
    """Be it of an answer that it shared, or that it has alone."""
    bench = sample_bench()
    bench.executor.unload()
    bench.step()
    for key in ("shares", "leaves"):
        bench.ask(key, n=3)
    bench.ask("alone", n=3, seed=9)
    bench.cancel_samples("shares", order[:1])
    bench.cancel("leaves")
    for index in order[1:]:
        assert not bench.chunks["shares"][-1].is_final
        bench.cancel_samples("shares", [index])
    for index in order:
        bench.cancel_samples("alone", [index])
    assert not bench.core.is_up
    for key in ("shares", "alone"):
        assert bench.chunks[key][-1].is_final
        assert reasons(bench, key) == ["cancelled"] * 3
    bench.step()
    assert not bench.core.has_requests
    assert not bench.answers._computations


def test_who_does_without_the_last_sample_of_several_ends_at_once_while_an_engine_is_loaded():
    bench = sample_bench()
    bench.executor.load_s = 100.0
    for key in ("shares", "leaves"):
        bench.ask(key, n=3)
    bench.run(8)
    bench.executor.die_next = 1
    bench.run(2)
    assert not bench.core.is_up
    bench.cancel_samples("shares", [0, 2])
    bench.cancel("leaves")
    bench.cancel_samples("shares", [1])
    assert bench.chunks["shares"][-1].is_final
    assert reasons(bench, "shares") == ["cancelled"] * 3
    bench.step()
    assert not bench.core.has_requests


def test_a_sample_that_nobody_wants_any_more_is_computed_no_longer_while_others_go_on():
    bench = sample_bench()
    for key in "ab":
        bench.ask(key, n=3, max_tokens=60)
    bench.run(6)
    for key in "ab":
        bench.cancel_samples(key, [1])
    bench.ask("c", n=3, max_tokens=60)
    bench.run(6)
    assert bench.core.metrics.gauges["charonia_requests_running", ""] == 3, "c wants it"
    bench.cancel("c")
    bench.run(4)
    assert bench.core.metrics.gauges["charonia_requests_running", ""] == 2
    bench.ask("d", n=3, max_tokens=60)
    bench.run()
    for key in "ab":
        assert reasons(bench, key) == ["length", "cancelled", "length"]
        assert [chunk.is_final for chunk in bench.chunks[key]].count(True) == 1
    assert bench.cached("d") is None
    for index in range(3):
        assert sample_tokens(bench, "d", index) == alone(seed=5 + index, max_tokens=60)
