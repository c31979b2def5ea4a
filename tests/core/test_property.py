"""Random requests, faults and departures: everybody is answered exactly once, and rightly.

The scheduler's own property test is in tests/control; here the whole core is driven, with text,
stop strings, time limits, cancellation of requests and of single samples, failing steps, deaths,
engines that cannot be loaded or take their time, operators, and the end of the server.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from charonia.config import SpeculativeConfig
from charonia.core.output.outputs import Chunk
from charonia.core.replica.reload import Reload
from core.bench import FIXED, Bench, Unchanged
from support.echo import EchoExecutor, echo_run
from support.invariants import check_invariants
from support.journals import open_journal, replay
from support.long import long

STOPS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
VOCAB = 256
OPERATOR = ("unload", "load", "reload", "drain", "stop")
ADAPTIVE = SpeculativeConfig(model="echo-draft")


class WatchedEngine(EchoExecutor):
    """Calls `watch` when a plan is submitted."""

    watch: Callable[[], None]

    def submit(self, plan):
        self.watch()
        return super().submit(plan)


@dataclass(frozen=True)
class Visit:
    """One request: when it comes, what it wants, and when its client leaves.

    Attributes:
        cancel_one_at: a step and the index of the sample that is cancelled then, if it is there.
    """

    at_step: int
    prompt: list[int]
    max_tokens: int
    seed: int
    has_stops: bool
    timeout_s: float | None
    deadline_ms: int | None
    cancel_at: int | None
    num_samples: int
    cancel_one_at: tuple[int, int] | None


visits = st.builds(
    Visit,
    at_step=st.integers(0, 25),
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    max_tokens=st.integers(1, 40),
    seed=st.integers(0, 5),
    has_stops=st.booleans(),
    timeout_s=st.sampled_from([None, None, 0.05]),
    deadline_ms=st.sampled_from([None, None, 200]),
    cancel_at=st.one_of(st.none(), st.none(), st.integers(0, 50)),
    num_samples=st.sampled_from([1, 1, 2, 3]),
    cancel_one_at=st.one_of(st.none(), st.tuples(st.integers(0, 50), st.integers(0, 3))),
)


def expected(bench: Bench, visit: Visit, index: int) -> tuple[list[int], str, str]:
    """Tokens, text and reason of a sample of a visit that nothing disturbs."""
    seed = visit.seed + index
    whole = echo_run(visit.prompt, seed=seed, max_tokens=visit.max_tokens, vocab_size=VOCAB)
    text = bench.tokenizer.decode(whole)
    if visit.has_stops:
        for count in range(1, len(whole) + 1):
            places = [bench.tokenizer.decode(whole[:count]).find(stop) for stop in STOPS]
            if max(places) >= 0:
                return whole[:count], text[: max(places)], "stop"
    return whole, text, "length"


def operate(bench: Bench, what: str) -> list[Reload]:
    """What an operator does; returns the orders that were given."""
    engine = bench.executor
    if what == "unload":
        engine.unload()
    elif what == "load":
        engine.load()
    elif what == "stop":
        engine.is_server_stopping = True
    else:
        order = Reload(Unchanged(), drain=what == "drain")
        bench.core.reload(order)
        return [order]
    return []


def check_in_time(bench: Bench, key: str, visit: Visit) -> None:
    """Time limits act whatever the engine does."""
    if visit.deadline_ms is not None:
        assert bench.ended_at[key] - 0.01 * (visit.at_step + 1) <= visit.deadline_ms / 1000 + 0.05


def check_answer(bench: Bench, key: str, visit: Visit) -> None:
    chunks = bench.chunks[key]
    assert [chunk.is_final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for index in range(visit.num_samples):
        own = [chunk for chunk in chunks if chunk.index == index]
        if own:
            assert [one.ends_sample for one in own] == [False] * (len(own) - 1) + [True]
            check_sample(bench, visit, Chunk.merge(own))
        else:
            assert chunks[-1].error is not None  # it was refused before there were samples


def check_sample(bench: Bench, visit: Visit, whole: Chunk) -> None:
    ids = list(whole.token_ids)
    tokens, text, reason = expected(bench, visit, whole.index)
    if whole.finish_reason == "cancelled":
        assert visit.cancel_one_at is not None
        assert visit.cancel_one_at[1] == whole.index
    if whole.error is None and whole.finish_reason != "cancelled":
        assert ids == tokens
        assert whole.text == text
        assert whole.finish_reason == reason
    else:
        assert ids == tokens[: len(ids)]
        # Its last character may lack bytes that the whole text has.
        assert bench.tokenizer.decode(ids).startswith(whole.text)


patient = settings(
    print_blob=True,
    suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow],
)
visits_and_faults = given(
    arrivals=st.lists(visits, min_size=1, max_size=8),
    num_blocks=st.integers(8, 40),
    max_num_seqs=st.integers(1, 4),
    faults=st.dictionaries(
        st.integers(0, 40),
        st.sampled_from(["fail", "die", "hang", "cannot load", *OPERATOR]),
        max_size=4,
    ),
    poison=st.sampled_from([None, None, 2, 200]),
    load_s=st.sampled_from([0.0, 0.1, 0.5]),
    load_timeout_s=st.sampled_from([0.3, 900.0]),
    speculative_config=st.sampled_from([None, FIXED, ADAPTIVE]),
    num_stages=st.sampled_from([1, 1, 1, 2, 4]),
    async_scheduling=st.booleans(),
    is_early=st.lists(st.booleans(), min_size=1, max_size=5),
)


def check(**case) -> None:
    """Every request is answered exactly once and rightly, and the run can be repeated."""
    with TemporaryDirectory() as directory:
        journal = open_journal(Path(directory))
        try:
            check_answers(journal=journal, **case)
        finally:
            journal.close()
        differences = replay(Path(directory)).differences
    assert not differences, "\n".join(differences)


def check_answers(
    arrivals,
    num_blocks,
    max_num_seqs,
    faults,
    poison,
    load_s,
    load_timeout_s,
    speculative_config,
    num_stages,
    async_scheduling,
    is_early,
    journal,
):
    executor = WatchedEngine(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        poison=poison,
        max_draft_len=60,
        num_stages=num_stages,
        is_early=is_early,
    )
    bench = Bench(
        executor,
        speculative_config,
        async_scheduling=async_scheduling,
        min_step_deadline_s=0.3,
        load_timeout_s=load_timeout_s,
        journal=journal,
    )
    executor.load_s = load_s
    orders: list[Reload] = []
    executor.watch = lambda: check_invariants(bench.core._replica._scheduler)
    step = 0
    while step <= 50 or bench.core.has_requests:
        for index, visit in enumerate(arrivals):
            if visit.at_step == step:
                bench.add(
                    str(index),
                    prompt=visit.prompt,
                    timeout_s=visit.timeout_s,
                    max_tokens=visit.max_tokens,
                    seed=visit.seed,
                    stop=STOPS if visit.has_stops else (),
                    deadline_ms=visit.deadline_ms,
                    n=visit.num_samples,
                )
            if str(index) not in bench.live:
                continue
            if visit.cancel_at == step:
                bench.cancel(str(index))
            if visit.cancel_one_at is not None and visit.cancel_one_at[0] == step:
                bench.cancel_samples(str(index), [visit.cancel_one_at[1]])
        fault = faults.get(step)
        executor.fail_next = int(fault == "fail")
        executor.die_next = int(fault in ("die", "cannot load"))
        executor.hang_next = int(fault == "hang")
        executor.refuse_restarts = int(fault == "cannot load")
        if fault in OPERATOR:
            orders += operate(bench, fault)
        bench.now += 0.01 if step < 200 else 0.5  # an engine that was unloaded is waited for
        bench.core.step()
        if bench.core.is_up:
            scheduler = bench.core._replica._scheduler
            check_invariants(scheduler)
            # Nothing is computed for nobody: a text that met its stop string is gone by now, or
            # goes with the last step that computes it.
            going_on = {each.key for each in scheduler.requests if not each.num_in_flight}
            assert going_on <= {key for one in bench.core._requests for key in one.open_samples}
        step += 1
        assert step < 3000, "a request hangs"
    for index, visit in enumerate(arrivals):
        check_answer(bench, str(index), visit)
        check_in_time(bench, str(index), visit)
    for _ in range(10_000):
        if all(order.is_over for order in orders):
            break
        bench.now += 0.01
        bench.core.step()
    assert all(order.is_over for order in orders), "an order hangs"
    assert bench.core.metrics.gauges["charonia_kv_blocks", "used"] == 0


@settings(patient, max_examples=50)
@visits_and_faults
def test_every_request_is_answered_exactly_once_and_rightly(**case):
    check(**case)


@long
@settings(patient, max_examples=200)
@visits_and_faults
def test_in_many_more_cases_every_request_is_answered_exactly_once_and_rightly(**case):
    check(**case)
