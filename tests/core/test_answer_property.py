"""Random requests of which many are equal, with departures, time limits and faults: whatever the
cache does, each gets exactly what it would get alone, once, and nothing is left behind."""

from dataclasses import dataclass
from math import inf

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from charonia.core.replica.reload import Reload
from core.answer_bench import LOTS, AnswerBench
from core.bench import Unchanged
from support.echo import EchoExecutor, echo_run
from support.invariants import check_invariants
from support.long import long

VOCAB = 256
PROMPTS = ([1] * 20, [2] * 20)


@dataclass(frozen=True)
class Visit:
    """One request: when it comes, what it wants, and when its client leaves."""

    at_step: int
    prompt: int
    seed: int
    num_samples: int
    num_more: int
    tenant: str
    wants_scores: bool
    stops: bool
    timeout_s: float | None
    deadline_ms: int | None
    uses_cache: bool
    cancel_at: int | None
    cancels_sample: bool


visits = st.builds(
    Visit,
    at_step=st.integers(0, 30),
    prompt=st.integers(0, 1),
    seed=st.integers(0, 1),
    num_samples=st.sampled_from([1, 1, 1, 2]),
    num_more=st.sampled_from([0, 0, 0, 1]),
    tenant=st.sampled_from(["", "", "t"]),
    wants_scores=st.booleans(),
    stops=st.booleans(),
    timeout_s=st.sampled_from([None, None, 0.03]),
    deadline_ms=st.sampled_from([None, None, None, 60, 150]),
    uses_cache=st.sampled_from([True, True, True, False]),
    cancel_at=st.one_of(st.none(), st.none(), st.integers(0, 40)),
    cancels_sample=st.booleans(),
)


def expected(bench: AnswerBench, visit: Visit, index: int) -> tuple[list[int], str, str]:
    """Tokens, text and reason of a sample that nothing disturbs."""
    prompt, seed = PROMPTS[visit.prompt], visit.seed + index
    whole = echo_run(prompt, seed=seed, max_tokens=15, vocab_size=VOCAB)
    text = bench.tokenizer.decode(whole)
    if visit.stops:
        for count in range(1, len(whole) + 1):
            place = bench.tokenizer.decode(whole[:count]).find("e")
            if place >= 0:
                return whole[:count], text[:place], "stop"
    return whole, text, "length"


def ranked(bench: AnswerBench, visit: Visit) -> list[tuple[list[int], str, str]]:
    """Likewise of all samples, the best ones first where not all are returned."""
    samples = [expected(bench, visit, index) for index in range(visit.num_samples + visit.num_more)]
    if visit.num_more:  # an echo engine's tokens are equally likely
        samples.sort(key=lambda sample: len(sample[0]))
    return samples


def check_answer(bench: AnswerBench, key: str, visit: Visit) -> None:
    chunks = bench.chunks[key]
    assert [chunk.is_final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    has_error = chunks[-1].error is not None
    if has_error and visit.num_more:
        return  # it is open which would have been the best
    samples = ranked(bench, visit)
    for index in range(visit.num_samples):
        own = [chunk for chunk in chunks if chunk.index == index and chunk.error is None]
        got = [token_id for chunk in own for token_id in chunk.token_ids]
        tokens, text, reason = samples[index]
        if has_error or own[-1].finish_reason == "cancelled":
            assert got == tokens[: len(got)]
        else:
            assert (got, "".join(chunk.text for chunk in own)) == (tokens, text)
            assert own[-1].finish_reason == reason
            has_scores = visit.wants_scores or visit.num_more
            scores = -0.5 * len(tokens) if has_scores else None
            assert own[-1].cumulative_logprob == scores
    if not visit.uses_cache and chunks[-1].timing is not None:
        assert "cached" not in chunks[-1].timing


def check_counts(bench: AnswerBench, arrivals: list[Visit], *, may_leave_before: bool) -> None:
    """Who leaves while a similar prompt is looked for was neither a hit nor a miss."""
    counters = bench.core.metrics.counters
    finished = sum(v for (name, _), v in counters.items() if name == "charonia_finished_total")
    assert finished == len(arrivals)
    looked_up = bench.misses + sum(bench.hits(kind) for kind in ("exact", "joined", "semantic"))
    num_may = sum(visit.uses_cache for visit in arrivals)
    assert looked_up <= num_may if may_leave_before else looked_up == num_may
    generated = counters["charonia_tenant_generation_tokens_total", "other"]
    assert generated == bench.num_generated


def check_nothing_is_left(bench: AnswerBench) -> None:
    answers = bench.answers
    assert (answers._computations, answers._joinable) == ({}, {})
    assert not answers._subscribers
    assert answers._subscribers._deadlines.take_due(inf) == []
    assert bench.similar.known.keys() <= answers._kept._store._answers.keys()
    scheduler = bench.core._replica._scheduler
    assert scheduler is None or scheduler.kv.num_used == 0


def check(
    arrivals, num_blocks, max_num_seqs, faults, max_bytes, ttl_s, threshold, async_scheduling
):
    executor = EchoExecutor(num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    bench = AnswerBench(
        executor,
        async_scheduling=async_scheduling,
        answer_cache_bytes=max_bytes,
        answer_cache_ttl_s=ttl_s,
        semantic_cache_threshold=threshold,
    )
    step = 0
    while step <= 42 or bench.core.has_requests or bench.similar.waiting:
        for index, visit in enumerate(arrivals):
            if visit.at_step == step:
                bench.ask(
                    str(index),
                    PROMPTS[visit.prompt],
                    seed=visit.seed,
                    n=visit.num_samples,
                    best_of=visit.num_samples + visit.num_more if visit.num_more else None,
                    max_tokens=15,
                    tenant=visit.tenant,
                    stop=("e",) if visit.stops else (),
                    return_cumulative_logprob=visit.wants_scores,
                    timeout_s=visit.timeout_s,
                    deadline_ms=visit.deadline_ms,
                    use_answer_cache=visit.uses_cache,
                )
            if visit.cancel_at != step or str(index) not in bench.live:
                continue
            if visit.cancels_sample:
                bench.cancel_samples(str(index), [visit.num_samples - 1])
            else:
                bench.cancel(str(index))
        fault = faults.get(step)
        executor.fail_next, executor.die_next = int(fault == "fail"), int(fault == "die")
        if fault == "unload":
            executor.unload()
        elif fault == "load":
            executor.load()
        bench.now += 0.01 if step < 200 else 0.5
        bench.step()
        if bench.core.is_up:
            check_invariants(bench.core._replica._scheduler)
        step += 1
        assert step < 5000
    for index, visit in enumerate(arrivals):
        check_answer(bench, str(index), visit)
    check_counts(bench, arrivals, may_leave_before=threshold is not None)
    check_nothing_is_left(bench)


patient = settings(
    print_blob=True, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow]
)
cases = given(
    arrivals=st.lists(visits, min_size=1, max_size=10),
    num_blocks=st.integers(8, 40),
    max_num_seqs=st.integers(1, 4),
    faults=st.dictionaries(
        st.integers(0, 40), st.sampled_from(["fail", "die", "unload", "load"]), max_size=3
    ),
    max_bytes=st.sampled_from([900, 2000, LOTS]),
    ttl_s=st.sampled_from([0.05, 1000.0]),
    threshold=st.sampled_from([None, 0.9]),
    async_scheduling=st.booleans(),
)


@settings(patient, max_examples=100)
@cases
def test_each_gets_what_it_would_get_alone(**case):
    check(**case)


@long
@settings(patient, max_examples=1000)
@cases
def test_in_many_more_cases_each_gets_what_it_would_get_alone(**case):
    check(**case)


# ---------------------------------------------------------------------- models that change

MODELS = (256, 255)
"""By the size of their vocabularies, which is a part of what an echo engine generates."""


def serve(bench: AnswerBench, vocab_size: int) -> None:
    """Go on with another model; what is live goes on with it."""
    bench.executor.vocab_size = vocab_size
    order = Reload(Unchanged())
    bench.core.reload(order)
    while not order.is_over:
        bench.now += 0.01
        bench.step()


@settings(patient, max_examples=40)
@given(
    arrivals=st.lists(visits, min_size=1, max_size=8),
    changes=st.dictionaries(st.integers(1, 30), st.sampled_from(MODELS), min_size=1, max_size=4),
    async_scheduling=st.booleans(),
)
def test_whatever_models_come_and_go_an_answer_is_that_of_the_model_that_serves(
    arrivals, changes, async_scheduling
):
    """What is kept is asked for at the end, of each model: it is what that one says by itself."""
    bench = AnswerBench(EchoExecutor(num_blocks=64), async_scheduling=async_scheduling)
    for step in range(45):
        for index, visit in enumerate(arrivals):
            if visit.at_step == step:
                bench.ask(str(index), PROMPTS[visit.prompt], seed=visit.seed, max_tokens=15)
        if step in changes:
            serve(bench, changes[step])
        bench.now += 0.01
        bench.step()
    bench.run()
    for vocab_size in MODELS:
        serve(bench, vocab_size)
        for prompt in PROMPTS:
            for seed in (0, 1):
                key = f"{vocab_size} {prompt[0]} {seed}"
                bench.ask(key, prompt, seed=seed, max_tokens=15)
                bench.run()
                alone = echo_run(prompt, seed=seed, max_tokens=15, vocab_size=vocab_size)
                assert bench.tokens(key) == alone
    check_nothing_is_left(bench)
