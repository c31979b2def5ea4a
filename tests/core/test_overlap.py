"""The core on an engine of several stages: what is in flight at what time, and what becomes of it.

A vocabulary of printable characters makes each token a chunk of its own.
"""

import pytest

from charonia.errors import CharoniaError
from charonia.protocol import StepPlan
from core.bench import Bench, hanging_bench
from support.echo import EchoExecutor, echo_run

VOCAB = 64


class ToldEngine(EchoExecutor):
    """Notes when a step is submitted and when its result is asked for."""

    def __init__(self, **values) -> None:
        super().__init__(vocab_size=VOCAB, **values)
        self.events: list[str] = []

    def submit(self, plan: StepPlan) -> "_ToldStep":
        self.events.append(f"submit {plan.step_id}")
        return _ToldStep(self, super().submit(plan), plan.step_id)


class _ToldStep:
    def __init__(self, engine: ToldEngine, step, step_id: int) -> None:
        self.engine = engine
        self.step = step
        self.step_id = step_id

    def result(self, timeout):
        self.engine.events.append(f"wait {self.step_id}")
        return self.step.result(timeout)


class ToldBench(Bench):
    def on_chunk(self, chunk):
        self.executor.events.append(f"text of {chunk.key}")
        super().on_chunk(chunk)


def told_bench(*, async_scheduling: bool = True, **values) -> Bench:
    return ToldBench(ToldEngine(**values), async_scheduling=async_scheduling)


def add(bench: Bench, keys: str, max_tokens: int = 20) -> None:
    for key in keys:
        bench.add(key, prompt=[ord(key) % VOCAB] * 10, max_tokens=max_tokens)


def expected(key: str, max_tokens: int = 20) -> list[int]:
    return echo_run([ord(key) % VOCAB] * 10, seed=5, max_tokens=max_tokens, vocab_size=VOCAB)


def test_the_next_step_of_the_same_rows_is_submitted_before_one_is_waited_for():
    bench = told_bench()
    add(bench, "a", max_tokens=3)
    bench.run()
    assert bench.executor.events == [
        *("submit 0", "submit 1", "wait 0"),
        *("text of a", "submit 2", "wait 1"),
        *("text of a", "wait 2"),
        "text of a",
    ]


def test_one_step_at_a_time_is_submitted_before_the_text_of_the_one_before_it():
    bench = told_bench(async_scheduling=False)
    add(bench, "a", max_tokens=3)
    bench.run()
    assert bench.executor.events == [
        *("submit 0", "wait 0"),
        *("submit 1", "text of a", "wait 1"),
        *("submit 2", "text of a", "wait 2"),
        "text of a",
    ]


def test_with_two_stages_the_next_step_is_submitted_before_one_is_waited_for():
    bench = told_bench(num_stages=2)
    add(bench, "ab", max_tokens=2)
    bench.run()
    assert bench.executor.events == [
        *("submit 0", "submit 1", "wait 0"),
        *("submit 2", "text of a", "wait 1"),
        *("submit 3", "text of b", "wait 2"),
        *("text of a", "wait 3"),
        "text of b",
    ]


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("fault", ["fail", "die"])
def test_a_step_that_fails_takes_those_behind_it_with_it(fault, is_early, num_stages):
    bench = told_bench(num_stages=num_stages, is_early=[is_early])
    add(bench, "abcd")
    bench.run(4)
    bench.executor.fail_next = int(fault == "fail")
    bench.executor.die_next = int(fault == "die")
    bench.run()
    for key in "abcd":
        assert bench.tokens(key) == expected(key)
    assert sum("fail" in line or "died" in line for line in bench.lines) == 1
    assert bench.executor.num_restarts == int(fault == "die")


def test_a_step_that_hangs_behind_another_one_is_given_up_in_its_own_time():
    bench = hanging_bench(5, vocab_size=VOCAB, num_stages=2)
    add(bench, "ab")
    bench.run()
    assert bench.executor.num_restarts == 1
    assert bench.executor.waited_s == pytest.approx(10 * 1.0, abs=0.5)
    for key in "ab":
        assert bench.tokens(key) == expected(key)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_an_abandoned_core_forgets_its_steps_in_flight(num_stages):
    bench = told_bench(num_stages=num_stages)
    add(bench, "ab")
    bench.run(3)
    bench.core.abandon(CharoniaError("internal error: KeyError"))
    bench.now += 2
    assert bench.connects()
    add(bench, "cd")
    bench.run()
    for key in "cd":
        assert bench.tokens(key) == expected(key)


def test_a_core_is_busy_until_the_last_step_is_applied():
    """A stop string is found when the next step is in flight, behind that of the other request."""
    bench = told_bench(num_stages=2)
    texts = {key: bench.tokenizer.decode(expected(key)) for key in "ab"}
    for key, text in texts.items():
        bench.add(key, prompt=[ord(key) % VOCAB] * 10, max_tokens=20, stop=(text[3:5],))
    bench.run()
    for key, text in texts.items():
        assert bench.text(key) == text[:3]
    assert bench.core.metrics.gauges["charonia_kv_blocks", "used"] == 0
