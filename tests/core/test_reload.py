"""The core while its engine is replaced on purpose: nobody is lost, changed or kept waiting."""

import pytest

from charonia.config import EngineArgs
from charonia.core.output.outputs import merge_samples
from charonia.core.replica.recovery import NOT_READY, UNLOADED_WAIT_S
from charonia.core.replica.reload import Reload
from charonia.errors import CharoniaError, UnavailableError
from charonia.metrics.metrics import Metrics
from core.bench import FIXED, Unchanged, expected
from core.reload_bench import Reloading
from support.echo import EchoExecutor


def test_live_requests_go_on_with_another_engine_and_its_arguments():
    bench = Reloading(executor=EchoExecutor(max_num_seqs=2))
    for key in "abcd":
        bench.add(key)
    bench.run(5)
    bench.executor.max_draft_len = 100
    bench.executor.block_size = 32
    order = bench.reload(speculative_config=FIXED, enable_prefix_caching=False)
    assert (order.phase, order.num_live) == ("done", 4)
    bench.run()
    for key in "abcd":
        assert bench.tokens(key) == expected(key)
    counters = bench.core.metrics.counters
    assert counters["charonia_draft_tokens_total", ""] > 0
    assert counters["charonia_prompt_tokens_total", "computed"] == 40, "it counts from 0 again"
    assert counters["charonia_engine_reloads_total", ""] == 1
    assert counters["charonia_engine_restarts_total", ""] == 0
    assert (bench.num_restored, bench.num_settled) == (0, 1)


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_samples_go_on_with_another_engine_wherever_they_are(num_steps):
    """Some wait for the prompt, some for a row, and some have tokens."""
    bench = Reloading(executor=EchoExecutor(max_num_seqs=2, max_num_batched_tokens=4))
    bench.add("a", n=4)
    bench.run(num_steps)
    bench.executor.block_size = 32
    assert bench.reload(enable_prefix_caching=False).phase == "done"
    bench.run()
    samples = merge_samples(bench.chunks["a"], 4)
    for index, sample in enumerate(samples):
        assert list(sample.token_ids) == expected("a", seed=5 + index)
    assert bench.core.metrics.gauges["charonia_kv_blocks", "used"] == 0


def test_more_requests_than_the_queue_takes_survive_a_reload():
    bench = Reloading(executor=EchoExecutor(max_num_seqs=4), max_queue_size=2)
    for key in "abcdef":
        bench.add(key)
    bench.run(2)
    bench.executor.max_num_seqs = 1
    bench.reload(seed=1)
    bench.run()
    for key in "abcdef":
        assert bench.tokens(key) == expected(key)


def test_while_requests_finish_new_ones_wait_for_the_next_engine():
    bench = Reloading()
    bench.add("a")
    bench.run(3)
    order = bench.reload(drain=True, seed=1)
    for key in "bcde":
        bench.add(key, timeout_s=0.05 if key == "c" else None)
    bench.add("f", deadline_ms=50)
    bench.run(2)
    assert (order.phase, order.num_live, order.num_held) == ("draining", 1, 5)
    assert bench.core.metrics.gauges["charonia_requests_waiting", ""] == 5
    bench.cancel("d")
    bench.cancel("e")
    bench.now += 0.05
    bench.run()
    assert order.phase == "done"
    assert bench.executor.num_restarts == 1
    for key in "ab":
        assert bench.tokens(key) == expected(key)
    assert str(bench.error("c")) == "Request timeout expired"
    assert str(bench.error("f")) == "deadline_ms has passed"
    assert [bench.error(key).code for key in "de"] == ["CANCELLED"] * 2
    for key in "de":
        assert f"request_cancelled key={key} request_id=id-{key} tokens=0" in bench.lines
    assert all(len(bench.chunks[key]) == 1 for key in "cdef")


def test_who_was_held_and_does_not_fit_the_next_engine_is_told_so_as_those_that_ran():
    bench = Reloading()
    bench.add("a")
    bench.run(3)
    bench.reload(drain=True, seed=1)
    bench.add("b", prompt=[7] * 100)
    bench.add("c", prompt=[200] * 10)
    bench.executor.max_model_len = 64
    bench.executor.vocab_size = 150
    bench.run()
    assert [type(bench.error(key)) for key in "bc"] == [UnavailableError] * 2
    assert "restarted with max_model_len 64" in str(bench.error("b"))
    assert "restarted with a vocabulary of 150 tokens" in str(bench.error("c"))


@pytest.mark.parametrize("end", ["time", "cancel", "close", "reload"])
def test_a_held_request_that_ends_is_counted_as_any_other(end):
    bench = Reloading()
    bench.add("a")
    bench.run(3)
    bench.reload(drain=True, max_num_seqs=4)
    bench.add("b", prompt=[7] * 200, timeout_s=0.05 if end == "time" else None)
    bench.now += 0.05
    if end == "cancel":
        bench.cancel("b")
    elif end == "close":
        bench.core.close()
    elif end == "reload":
        bench.executor.max_model_len = 100
    bench.run()
    kind = bench.error("b").kind
    drained = bench.core.metrics.drain()
    finished = [
        bench.core.metrics.counters["charonia_finished_total", reason]
        for reason in {"length", kind}
    ]
    assert sum(finished) == 2
    for name in ("charonia_queue_seconds", "charonia_request_seconds"):
        assert len(drained[name]) == 2
        assert max(drained[name]) >= 0.05
    assert sorted(drained["request_prompt_tokens"]) == [10, 200]
    assert sorted(drained["request_generation_tokens"])[0] == 0


def test_a_reload_that_fails_goes_back_and_changes_no_token():
    bench = Reloading()
    bench.add("a")
    bench.run(5)
    bench.executor.refuse_restarts = 1
    order = bench.reload(seed=1)
    assert (order.phase, order.reason) == ("failed", "the echo engine cannot be loaded")
    assert (bench.num_restored, bench.num_settled) == (1, 0)
    bench.run()
    assert bench.tokens("a") == expected("a")
    names = [line.split()[0] for line in bench.lines if not line.startswith("warning")]
    assert names == ["engine_reloading", "engine_reload_failed", "engine_restored"]
    check_nothing_replaced(bench.core.metrics)
    assert bench.core.metrics.counters["charonia_requests_recomputed_total", ""] == 1


def test_an_engine_that_dies_while_it_comes_back_after_a_failed_reload_is_loaded_again():
    bench = Reloading()
    bench.add("a")
    bench.run(5)
    bench.executor.refuse_restarts = 2  # the new one, and the old one once
    assert bench.reload(seed=1).phase == "failed"
    bench.run()
    assert bench.tokens("a") == expected("a")
    names = [line.split()[0] for line in bench.lines if not line.startswith("warning")]
    assert names == [
        "engine_reloading",
        "engine_reload_failed",
        "engine_load_failed",
        "engine_restored",
    ]


def stuck_bench() -> Reloading:
    """Whose engine, once lost or replaced, takes longer to be loaded than is waited for."""
    bench = Reloading(load_timeout_s=100.0)
    bench.add("a")
    bench.run(5)
    bench.executor.load_s = 150.0
    bench.lines.clear()
    return bench


def test_nobody_waits_for_ever_for_an_engine_that_is_being_loaded():
    bench = stuck_bench()
    bench.executor.die_next = 1
    bench.core.step()
    bench.core.step()
    bench.now += 99
    bench.core.step()
    assert bench.error("a") is None
    bench.now += 1
    bench.core.step()
    assert "cannot be loaded: it was not loaded within 100 s" in str(bench.error("a"))
    assert isinstance(bench.error("a"), UnavailableError)
    late = Reload(Unchanged())
    bench.core.reload(late)
    bench.core.step()
    assert (late.phase, late.reason) == ("failed", str(bench.error("a")))
    bench.now += 49
    assert not bench.connects(), "another one was begun beside it"
    bench.now += 1
    assert bench.connects(), "it is welcome all the same"
    bench.add("b")
    bench.run()
    assert bench.tokens("b") == expected("b")
    assert bench.executor.num_restarts == 1
    names = [line.split()[0] for line in bench.lines if not line.startswith("warning")]
    assert names == ["engine_died", "engine_load_stuck", "engine_back"]


def test_a_reload_whose_engine_is_not_loaded_in_time_fails_and_the_old_engine_comes_back():
    bench = stuck_bench()
    order = bench.order(seed=1)
    bench.core.step()
    bench.core.step()  # another engine begins to be loaded
    assert order.phase == "loading"
    bench.now += 100
    bench.core.step()
    assert order.phase == "failed"
    assert order.reason.startswith("it was not loaded within 100 s; the engine is down")
    assert (bench.num_restored, bench.num_settled) == (1, 0)
    assert isinstance(bench.error("a"), UnavailableError)
    bench.executor.load_s = 0.0
    bench.now += 49
    assert not bench.connects()
    bench.now += 1
    assert not bench.connects(), "that one has the configuration of the reload"
    assert bench.connects()
    assert bench.core.engine_args == bench.args == EngineArgs(model="echo")
    bench.add("b")
    bench.run()
    assert bench.tokens("b") == expected("b")


def test_an_engine_that_comes_back_too_late_after_a_failed_reload_is_not_waited_for_either():
    bench = stuck_bench()
    bench.executor.load_s = 0.0
    bench.executor.refuse_restarts = 1
    order = bench.order(seed=1)
    bench.core.step()  # it begins
    bench.core.step()  # the new engine fails
    bench.executor.load_s = 150.0
    assert order.phase == "loading"
    bench.core.step()
    bench.now += 100
    bench.core.step()
    assert order.phase == "failed"
    assert order.reason.startswith("the echo engine cannot be loaded; the engine is down and")
    assert isinstance(bench.error("a"), UnavailableError)
    bench.now += 50
    assert bench.connects()
    assert bench.num_restored == 1


def check_nothing_replaced(metrics: Metrics) -> None:
    assert metrics.counters["charonia_engine_restarts_total", ""] == 0
    assert metrics.counters["charonia_engine_reloads_total", ""] == 0
    assert metrics.counters["charonia_engine_failures_total", "load_failed"] == 1
    assert "charonia_recovery_seconds" not in metrics.drain()


def test_a_reload_that_a_bug_ends_is_none_and_the_old_engine_comes_back():
    bench = Reloading()
    bench.add("a")
    bench.run(5)
    restart, bench.executor.restart = bench.executor.restart, lambda: {}["a bug"]
    with pytest.raises(KeyError):
        bench.reload(seed=1)
    bench.executor.restart = restart
    bench.core.abandon(CharoniaError("internal error: KeyError"))
    assert bench.connects()
    assert bench.num_restored == 1
    assert bench.lines[-1].startswith("engine_restored")
    check_nothing_replaced(bench.core.metrics)
    bench.add("b")
    bench.run()
    assert bench.tokens("b") == expected("b")


def test_a_configuration_that_cannot_be_written_leaves_the_engine_alone():
    bench = Reloading()
    bench.add("a")
    bench.run(5)
    bench.is_disk_full = True
    order = bench.reload(seed=1)
    reason = "the new configuration cannot be written: No space left on device"
    assert (order.phase, order.reason) == ("failed", reason)
    bench.run()
    assert bench.tokens("a") == expected("a")
    assert bench.executor.num_restarts == 0
    assert not any("engine_reloading" in line for line in bench.lines)


@pytest.mark.parametrize("fails", [True, False])
def test_a_file_that_cannot_be_put_away_loses_nobody(fails):
    bench = Reloading()
    bench.add("a")
    bench.run(5)
    bench.is_disk_broken = True
    bench.executor.refuse_restarts = int(fails)
    order = bench.reload(seed=1)
    reason = "the old configuration cannot be restored: Input/output error"
    if fails:
        assert order.phase == "failed"
        assert order.reason == f"the echo engine cannot be loaded; {reason}"
        assert any("engine_reload_failed" in line and reason in line for line in bench.lines)
    else:
        assert (order.phase, order.num_live) == ("done", 1)
        assert (
            bench.lines[-1] == 'engine_reload_unsettled level=warning reason="Input/output error"'
        )
    bench.run()
    assert bench.tokens("a") == expected("a")


def test_what_is_finished_is_delivered_before_the_next_engine_is_loaded():
    bench = Reloading()
    bench.add("a", max_tokens=1)
    bench.core.step()  # its token is there, and not delivered
    assert not bench.chunks["a"]
    finished = []
    restart = bench.executor.restart

    def look_and_restart() -> None:
        finished.append([chunk.finish_reason for chunk in bench.chunks["a"]])
        restart()

    bench.executor.restart = look_and_restart
    order = bench.reload(seed=1)
    assert (order.phase, order.num_live) == ("done", 0)
    assert finished == [["length"]]


def test_who_was_accepted_while_requests_finish_is_not_refused_for_a_full_queue():
    bench = Reloading(executor=EchoExecutor(max_num_seqs=8), max_queue_size=2)
    bench.add("a")
    bench.run(3)
    bench.reload(drain=True, seed=1)
    for key in "bcdef":
        bench.add(key)
    bench.executor.max_num_seqs = 1
    bench.run()
    for key in "abcdef":
        assert bench.tokens(key) == expected(key)


def test_who_is_held_for_the_next_engine_is_not_failed_with_the_old_one():
    bench = Reloading()
    bench.add("a")
    bench.run(3)
    order = bench.reload(drain=True, seed=1)
    bench.add("b")
    bench.executor.die_next = 1
    bench.executor.refuse_restarts = 2
    bench.run()
    assert "the engine is down" in str(bench.error("a"))
    assert order.phase == "done"
    assert bench.tokens("b") == expected("b")


def test_the_gauges_are_right_as_soon_as_nobody_waits_for_an_engine_any_more():
    bench = Reloading(executor=EchoExecutor(max_num_seqs=2))
    for key in "abcd":
        bench.add(key)
    bench.run(3)
    bench.executor.unload()
    bench.core.step()
    gauges = bench.core.metrics.gauges
    assert gauges["charonia_requests_waiting", ""] == 4
    bench.now += UNLOADED_WAIT_S + 1
    assert not bench.connects()
    assert gauges["charonia_requests_waiting", ""] == 0


def test_an_engine_that_a_reload_brought_back_is_replaced_at_once_when_it_is_lost_again():
    bench = Reloading()
    bench.add("a")
    bench.run(3)
    bench.executor.die_next = 1
    bench.executor.refuse_restarts = 5
    bench.run(1)
    for _ in range(4):
        bench.now += 60
        assert not bench.connects()
    assert bench.reload(seed=1).phase == "done"
    bench.add("b")
    bench.run(3)
    bench.executor.die_next = 1
    bench.core.step()
    assert bench.connects()
    bench.run()
    assert bench.tokens("b") == expected("b")


def test_requests_run_out_of_time_also_while_no_try_is_due():
    bench = Reloading()
    bench.add("a", deadline_ms=500)
    bench.run(3)
    bench.executor.unload()
    bench.core.step()
    bench.core._replica.recovery.back_off()
    bench.now += 0.5
    assert not bench.connects()
    assert str(bench.error("a")) == "deadline_ms has passed"


@pytest.mark.parametrize("end", ["cancel", "abandon", "close"])
def test_a_reload_that_waits_can_end_before_it_began(end):
    bench = Reloading()
    bench.add("a")
    bench.run(3)
    order = bench.reload(drain=True, seed=1)
    bench.add("b")
    assert bench.reload(seed=2).reason == "another reload is under way"
    if end == "cancel":
        order.is_cancelled = True
        bench.run()
        assert bench.tokens("b") == expected("b")
    elif end == "abandon":
        bench.core.abandon(CharoniaError("internal error"))
        assert str(bench.error("b")) == "internal error"
    else:
        bench.core.close()
        assert "shutting down" in str(bench.error("b"))
    assert order.phase == "failed"
    assert bench.num_restored == 0  # it was never installed
    assert bench.executor.num_restarts == 0


def test_an_order_before_the_first_engine_fails_at_once():
    bench = Reloading()
    bench.restart_scheduler()
    order = bench.order(seed=1)
    assert (order.phase, order.reason) == ("failed", NOT_READY)
    assert bench.connects()
    assert bench.reload(seed=1).phase == "done"
