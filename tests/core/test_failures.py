"""The core on an engine that fails in every way: no request is lost, changed or left hanging."""

from functools import partial

import pytest

from charonia.config import EngineArgs, SchedulerArgs
from charonia.core.engine_core import EngineCore
from charonia.core.generation_request import GenerationRequest
from charonia.core.output.outputs import OutputStream
from charonia.core.replica.recovery import SILENT_START_S
from charonia.errors import CharoniaError, UnavailableError
from charonia.metrics.metric_table import FAILURES
from core.bench import FIXED, Bench, byte_tokenizer, expected, hanging_bench
from support.echo import EchoExecutor, echo_run


@pytest.mark.parametrize(
    ("fault", "failures", "lines"),
    [
        ("fail", {"step_failed": 1}, ["step_failed"]),
        ("fail twice", {"step_failed": 2}, ["step_failed"] * 2 + ["engine_died", "engine_back"]),
        ("die", {"died": 1}, ["engine_died", "engine_back"]),
        ("hang", {"hung": 1}, ["engine_died", "engine_back"]),
        (
            "die and not come back at once",
            {"died": 1, "load_failed": 3},
            ["engine_died", *["engine_load_failed"] * 3, "engine_back"],
        ),
    ],
)
def test_every_failure_is_counted_once_has_its_line_and_changes_no_token(fault, failures, lines):
    bench = Bench()
    for key in "abc":
        bench.add(key)
    bench.run(5)
    bench.executor.fail_next = {"fail": 1, "fail twice": 2}.get(fault, 0)
    bench.executor.die_next = int("die" in fault)
    bench.executor.hang_next = int(fault == "hang")
    bench.executor.refuse_restarts = 3 if "not come back" in fault else 0
    bench.lines.clear()
    bench.run()
    while not bench.core.is_up:
        bench.now += 1
        bench.connects()
    counters = bench.core.metrics.counters
    name = "charonia_engine_failures_total"
    assert {kind: counters[name, kind] for kind in FAILURES if counters[name, kind]} == failures
    names = [line.split()[0] for line in bench.lines]
    assert [name for name in names if name != "warning:"] == lines
    num_recoveries = int("engine_back" in lines)
    recoveries = bench.core.metrics.drain().get("charonia_recovery_seconds", [])
    assert len(recoveries) == num_recoveries
    assert bench.executor.num_restarts == num_recoveries + failures.get("load_failed", 0)
    if "load_failed" in failures:  # by then the requests were told so
        assert counters["charonia_requests_recomputed_total", ""] == 0
    else:
        assert counters["charonia_requests_recomputed_total", ""] == 3 * num_recoveries
        for key in "abc":
            assert bench.tokens(key) == expected(key)
    if "load_failed" in failures:
        assert recoveries[0] >= 3, "the time without an engine counts, not the last try alone"


def test_a_look_at_the_memory_does_not_make_up_for_a_step_that_failed():
    bench = Bench(EchoExecutor(num_blocks=64))
    bench.executor.room = 64
    bench.executor.die_next = 1
    bench.add("a", max_tokens=1)
    bench.run()  # with an engine that looks
    bench.lines.clear()
    for key in "bc":
        bench.add(key)
        bench.executor.fail_next = 1
        while bench.executor.fail_next:
            bench.core.step()
        bench.cancel(key)
        num_steps = bench.executor.num_steps
        bench.step_and_wait()
        bench.step_and_wait()
        assert bench.executor.num_steps > num_steps, "it was asked for its memory"
    assert [line.split()[0] for line in bench.lines if "engine_died" in line] == ["engine_died"]


def test_an_engine_that_is_lost_while_nothing_runs_is_replaced_at_once():
    bench = Bench()
    bench.core.step()
    assert bench.executor.num_restarts == 0
    bench.executor.is_alive = False
    assert bench.core.step(), "nobody would see at once that another one is needed"
    assert bench.connects()
    assert bench.executor.num_restarts == 1
    bench.add("a")
    bench.run()
    assert bench.tokens("a") == expected("a")
    assert bench.chunks["a"][-1].timing["restarts"] == 0


def test_an_engine_that_was_lost_before_anybody_spoke_to_it_is_replaced():
    bench = Bench()
    bench.executor.is_alive = False
    bench.restart_scheduler()
    assert not bench.connects()
    bench.now += SILENT_START_S - 0.1
    assert not bench.connects()
    with pytest.raises(UnavailableError, match="not ready yet"):
        bench.core.check(GenerationRequest(key="a", prompt_ids=[1]))
    bench.now += 0.1
    assert not bench.connects()
    assert bench.connects()
    assert bench.executor.num_restarts == 1
    bench.add("a")
    bench.run()
    assert bench.tokens("a") == expected("a")


def test_an_engine_that_is_not_loaded_at_the_start_is_left_to_whoever_loads_it():
    bench = Bench()
    bench.executor.unload()
    bench.restart_scheduler()
    for _ in range(100):
        bench.now += SILENT_START_S
        assert not bench.connects()
    assert bench.executor.num_restarts == 0
    bench.executor.load()
    bench.now += SILENT_START_S
    assert bench.connects()


def test_a_request_that_kills_every_engine_fails_alone():
    bench = Bench(EchoExecutor(poison=255))
    bench.add("a")
    bench.add("x", prompt=[255] * 10)
    bench.add("b")
    bench.run()
    assert "each time" in str(bench.error("x"))
    for key in "ab":
        whole = expected(key)
        assert bench.tokens(key) == whole or 255 in whole
    counters = bench.core.metrics.counters
    assert counters["charonia_engine_restarts_total", ""] >= 3
    assert counters["charonia_requests_quarantined_total", ""] == 1
    assert "request_quarantined level=error key=x request_id=id-x" in bench.lines


def test_an_engine_that_dies_while_it_is_loaded_is_loaded_again_and_nobody_suffers():
    bench = Bench()
    for key in "abc":
        bench.add(key)
    bench.run(4)
    bench.executor.die_next = 1
    bench.executor.refuse_restarts = 1
    bench.lines.clear()
    bench.run()
    for key in "abc":
        assert bench.tokens(key) == expected(key)
    assert "engine_load_failed level=error retry_in=0 failed_requests=0" in bench.lines[1]
    bench.executor.die_next = 1
    bench.executor.refuse_restarts = 1
    bench.add("d")
    bench.run()
    assert bench.tokens("d") == expected("d"), "the next loss is another matter"


def test_while_the_engine_cannot_be_loaded_requests_fail_with_the_reason():
    bench = Bench()
    bench.add("a")
    bench.run(4)
    bench.executor.die_next = 1
    bench.executor.refuse_restarts = 3
    bench.run()
    assert isinstance(bench.error("a"), UnavailableError)
    assert "cannot be loaded" in str(bench.error("a"))
    with pytest.raises(UnavailableError, match="cannot be loaded"):
        bench.core.check(GenerationRequest(key="b", prompt_ids=[1]))
    bench.add("b")
    bench.core.step()
    assert isinstance(bench.error("b"), UnavailableError)
    assert bench.core.metrics.gauges["charonia_engine_up", ""] == 0
    assert not bench.connects(), "it tried again without waiting"
    bench.now += 1
    assert not bench.connects()
    bench.now += 2
    assert bench.connects()
    bench.add("c")
    bench.run()
    assert bench.tokens("c") == expected("c")


class Stubborn(EchoExecutor):
    """An engine whose every step hangs, for as long as `is_stubborn`."""

    is_stubborn = True

    def execute(self, plan):
        self.hang_next = int(self.is_stubborn)
        return super().execute(plan)


@pytest.mark.parametrize(
    ("hanging_step", "seconds"),
    [
        (0, 7.0),  # a prompt, when nothing is known
        (2, 10 * 3.2),  # another one; and not 32 times what one token takes
        (3, 10 * 1.0),
    ],
)
def test_a_step_that_never_ends_counts_as_death_by_the_measure_of_steps_of_its_size(
    hanging_step, seconds
):
    bench = hanging_bench(hanging_step)
    for key in "ab":
        bench.add(key, prompt=[ord(key)] * 32, max_tokens=2)
        bench.run()
    assert bench.executor.num_restarts == 1
    assert bench.executor.waited_s == pytest.approx(seconds, abs=0.5)
    for key in "ab":
        assert bench.tokens(key) == echo_run([ord(key)] * 32, seed=5, max_tokens=2, vocab_size=256)


def test_while_a_step_hangs_others_time_runs_and_they_are_cancelled():
    bench = hanging_bench(3, max_num_seqs=2)
    bench.add("a")
    bench.add("b", deadline_ms=2000)
    bench.add("waits", timeout_s=1.0)
    while bench.executor.waited_s < 3:
        bench.core.step()
    assert str(bench.error("b")) == "deadline_ms has passed"
    assert str(bench.error("waits")) == "Request timeout expired"
    bench.cancel("a")
    assert bench.error("a").code == "CANCELLED"
    assert bench.executor.num_restarts == 0
    bench.add("c")
    bench.run()
    assert bench.tokens("c") == expected("c")
    assert bench.executor.num_restarts == 1


def test_a_request_that_is_cancelled_as_it_hangs_the_engine_alone_takes_nobody_along():
    bench = Bench(Stubborn())
    for key in "ab":
        bench.add(key)
    while bench.executor.num_restarts < 2:
        bench.step_and_wait()
    bench.step_and_wait()
    assert bench.core.metrics.gauges["charonia_requests_running", ""] == 1
    bench.cancel("a")
    bench.executor.is_stubborn = False
    bench.run()
    assert bench.executor.num_restarts == 3
    assert bench.error("a").code == "CANCELLED"
    assert bench.tokens("b") == expected("b")
    assert bench.core.metrics.counters["charonia_requests_quarantined_total", ""] == 0


def test_a_new_scheduler_takes_over_a_living_engine():
    first = Bench()
    first.add("a")
    first.run(5)
    second = Bench(first.executor)
    second.add("a")
    second.run()
    assert second.tokens("a") == expected("a")
    first.run()  # its plans are refused at first; it opens a later epoch
    assert first.tokens("a") == expected("a")


def test_an_engine_with_other_blocks_after_a_restart_shares_no_wrong_prefix():
    """Keys of 16 tokens must not name blocks of 32: x and y differ in tokens 16 to 31."""
    bench = Bench()
    prompts = {key: [7] * 16 + [ord(key)] * 24 for key in "xy"}
    for key, prompt in prompts.items():
        bench.add(key, prompt=prompt)
    bench.run(2)
    bench.executor.die_next = 1
    bench.executor.block_size = 32
    bench.executor.max_num_seqs = 1  # y comes when x has published
    bench.run()
    for key, prompt in prompts.items():
        assert bench.tokens(key) == echo_run(prompt, seed=5, max_tokens=20, vocab_size=256)


def test_a_smaller_engine_after_a_restart_ends_what_no_longer_fits():
    bench = Bench()
    bench.add("a", max_tokens=200)
    bench.add("b", prompt=[3] * 100, max_tokens=100)
    bench.run(5)
    bench.executor.die_next = 1
    bench.executor.num_blocks = 5
    bench.run()
    assert "max_model_len 64" in str(bench.error("b"))
    assert any("max_model_len is lowered" in line for line in bench.lines)
    assert bench.chunks["a"][-1].finish_reason == "length"


@pytest.mark.parametrize("is_engine_alive", [True, False])
def test_an_abandoned_core_fails_its_requests_and_serves_new_ones(is_engine_alive):
    bench = Bench()
    bench.add("a")
    bench.run(3)
    bench.executor.is_alive = is_engine_alive
    bench.core.abandon(CharoniaError("internal error: KeyError"))
    assert "KeyError" in str(bench.error("a"))
    assert bench.connects() == is_engine_alive
    bench.now += 2
    assert bench.connects()
    bench.add("b")
    bench.run()
    assert bench.tokens("b") == expected("b")
    counters = bench.core.metrics.counters
    assert counters["charonia_prompt_tokens_total", "computed"] == 20, "it counts from 0 again"
    assert counters["charonia_engine_restarts_total", ""] == (0 if is_engine_alive else 1)


def test_a_scheduler_in_an_impossible_state_does_not_keep_its_requests_from_their_answer():
    bench = Bench()
    bench.add("a")
    bench.run(3)
    bench.core._replica._scheduler._policy.running._requests.clear()  # so nothing can be taken out
    with pytest.raises(IndexError):
        bench.cancel("a")
    bench.core.abandon(CharoniaError("internal error: IndexError"))
    assert "IndexError" in str(bench.error("a"))


def test_limits_that_contradict_each_other_are_told_and_not_taken_for_a_slow_start():
    core = EngineCore(
        EchoExecutor(max_num_batched_tokens=8, max_model_len=64),
        EngineArgs(model="echo", enable_chunked_prefill=False),
        SchedulerArgs(),
        partial(OutputStream, tokenizer=byte_tokenizer()),
        clock=lambda: 0.0,
        log=lambda line: None,
    )
    core.step()
    assert not core.is_up
    with pytest.raises(UnavailableError, match="max_num_batched_tokens = 8 must be at least"):
        core.check(GenerationRequest(key="a", prompt_ids=[1]))


def test_after_an_error_that_is_no_engines_the_next_try_waits():
    bench = Bench()
    bench.executor.info = lambda: {}["a bug"]
    bench.core.abandon(CharoniaError("internal error"))
    with pytest.raises(KeyError):
        bench.connects()
    assert not bench.connects()


@pytest.mark.parametrize("max_draft_len", [0, 14])
def test_an_engine_that_comes_back_with_another_draft_model_goes_on(max_draft_len):
    bench = Bench(EchoExecutor(max_draft_len=100), FIXED)
    bench.add("a")
    bench.run(4)
    bench.executor.max_draft_len = max_draft_len
    bench.executor.die_next = 1
    bench.run()
    assert bench.tokens("a") == expected("a")
    assert bench.chunks["a"][-1].timing["restarts"] == 1
