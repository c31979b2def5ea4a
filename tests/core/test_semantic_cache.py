"""Requests that get the answer of a similar one: of the same tenant, and said to be so."""

import threading

import pytest

from charonia.config import MIN_ANSWER_BYTES, SchedulerArgs
from charonia.core.answers import SimilarPrompts
from charonia.core.answers.similar import MAX_LOOKUPS
from charonia.errors import ConfigError
from core.answer_bench import LOTS, AnswerBench, Found, alone, content, reload_
from core.service_bench import Client, make_service, wait_until_up
from support.echo import EchoExecutor, echo_run
from support.waiting import WAIT_S, eventually

PROMPT = [7] * 20
NEAR, FAR = [7] * 19, [7] * 10


def make_bench(**values) -> AnswerBench:
    return AnswerBench(semantic_cache_threshold=0.9, **values)


def first(bench: AnswerBench, **values) -> None:
    bench.ask("first", PROMPT, **values)
    bench.run()
    assert bench.cached("first") is None


def test_a_similar_prompt_gets_the_answer_and_is_told():
    bench = make_bench()
    first(bench)
    bench.ask("near", NEAR)
    bench.run()
    assert bench.tokens("near") == alone(PROMPT)
    timing = bench.chunks["near"][-1].timing
    assert (timing["cached"], timing["similarity"]) == ("semantic", 0.95)
    assert bench.chunks["near"][-1].num_prompt_tokens == len(NEAR)
    assert (bench.misses, bench.hits("semantic"), bench.num_generated) == (1, 1, 20)
    assert bench.core.metrics.counters["charonia_finished_total", "length"] == 2


def test_one_that_is_less_similar_is_computed_and_then_found_itself():
    bench = make_bench()
    first(bench)
    bench.ask("far", FAR)
    bench.run()
    assert bench.tokens("far") == alone(FAR)
    assert bench.cached("far") is None
    bench.ask("near far", [*FAR, 7])
    bench.run()
    assert bench.cached("near far") == "semantic"
    assert bench.tokens("near far") == alone(FAR)


def test_an_equal_prompt_is_not_looked_for():
    bench = make_bench()
    first(bench)
    bench.ask("equal", PROMPT)
    assert not bench.similar.waiting
    assert bench.cached("equal") == "exact"
    assert "similarity" not in bench.chunks["equal"][-1].timing


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "t"},
        {"cache_salt": "s"},
        {"seed": 6},
        {"max_tokens": 19},
        {"n": 2},
        {"logprobs": 1},
        {"return_cumulative_logprob": True},
        {"use_answer_cache": False},
        {"seed": None},
    ],
)
def test_what_differs_otherwise_is_computed(other):
    bench = make_bench()
    first(bench)
    before = bench.num_generated
    bench.ask("near", NEAR, **other)
    bench.run()
    assert bench.num_generated > before
    assert bench.cached("near") is None


def test_log_probabilities_of_a_prompt_are_its_own():
    bench = make_bench()
    first(bench, prompt_logprobs=1)
    bench.ask("near", NEAR, prompt_logprobs=1)
    bench.run()
    assert bench.cached("near") is None


def test_samples_are_given_whole():
    bench = make_bench(executor=EchoExecutor(num_blocks=128))
    first(bench, n=3)
    bench.ask("near", NEAR, n=3)
    bench.run()
    assert bench.cached("near") == "semantic"
    assert [one[1:3] for one in content(bench, "near")] == [
        one[1:3] for one in content(bench, "first")
    ]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_sample_that_a_client_does_without_is_not_given(index):
    bench = make_bench(executor=EchoExecutor(num_blocks=128))
    first(bench, n=3)
    bench.ask("near", NEAR, n=3)
    bench.cancel_samples("near", [index])
    bench.run()
    assert bench.cached("near") == "semantic"
    ends = {one.index: one.finish_reason for one in bench.chunks["near"] if one.ends_sample}
    assert [ends[i] for i in range(3)] == [
        "cancelled" if i == index else "length" for i in range(3)
    ]
    assert [chunk.is_final for chunk in bench.chunks["near"]].count(True) == 1
    for one in set(range(3)) - {index}:
        own = [chunk for chunk in bench.chunks["near"] if chunk.index == one]
        assert [t for chunk in own for t in chunk.token_ids] == alone(PROMPT, seed=5 + one)


def test_a_sample_that_a_client_does_without_is_not_computed_where_nothing_is_found():
    bench = make_bench(executor=EchoExecutor(num_blocks=128))
    bench.ask("a", PROMPT, n=3)
    bench.cancel_samples("a", [0])
    bench.answers.refresh()
    assert bench.answers._joinable, "another one might want it"
    bench.run()
    assert bench.cached("a") is None
    assert bench.num_generated < 2 * 20 + 5
    ends = {one.index: one.finish_reason for one in bench.chunks["a"] if one.ends_sample}
    assert ends == {0: "cancelled", 1: "length", 2: "length"}


def test_equal_requests_share_what_is_found():
    bench = make_bench()
    first(bench)
    for key in ("a", "b"):
        bench.ask(key, NEAR)
    assert len(bench.similar.waiting) == 1
    bench.run()
    for key in ("a", "b"):
        assert bench.tokens(key) == alone(PROMPT)
        assert bench.cached(key) == "semantic"
    assert (bench.hits("semantic"), bench.hits("joined")) == (1, 1)
    for key in ("c", "d"):
        bench.ask(key, FAR)
    bench.run()
    assert [bench.cached(key) for key in ("c", "d")] == [None, "joined"]
    assert bench.tokens("d") == alone(FAR)


def test_whoever_leaves_while_it_is_looked_for_leaves_nothing_behind():
    bench = make_bench()
    bench.ask("a", PROMPT)
    bench.ask("b", PROMPT, deadline_ms=5)
    bench.ask("c", FAR, timeout_s=0.005)
    bench.cancel("a")
    assert bench.error("a").kind == "cancelled"
    bench.now += 1.0
    bench.answers.refresh()
    assert str(bench.error("b")) == "deadline_ms has passed"
    assert str(bench.error("c")) == "Request timeout expired"
    bench.run()
    assert bench.num_generated == 0
    assert bench.misses == 0
    assert (bench.answers._computations, bench.answers._joinable) == ({}, {})
    counters = bench.core.metrics.counters
    assert counters["charonia_cancellations_total", ""] == 1
    assert counters["charonia_finished_total", "timeout"] == 2


def test_closing_answers_who_waits_for_a_look():
    bench = make_bench()
    bench.ask("a", PROMPT)
    bench.answers.close()
    bench.core.close()
    bench.similar.answer()
    assert bench.error("a").kind == "shutting_down"
    assert len(bench.chunks["a"]) == 1


@pytest.mark.parametrize("what", ["is_full", "is_unable"])
def test_what_cannot_be_looked_for_is_computed(what):
    bench = make_bench()
    first(bench)
    setattr(bench.similar, what, True)
    bench.ask("near", NEAR)
    bench.run()
    assert bench.tokens("near") == alone(NEAR)
    setattr(bench.similar, what, False)
    bench.ask("equal", NEAR)
    assert bench.cached("equal") == "exact"


def test_an_answer_that_has_gone_is_found_no_more():
    bench = make_bench(answer_cache_ttl_s=50.0)
    first(bench)
    bench.ask("near", NEAR)
    bench.now += 51.0
    bench.run()
    assert bench.cached("near") is None
    assert len(bench.similar.known) == 1
    assert bench.tokens("near") == alone(NEAR)


def test_bytes_count_what_the_index_takes():
    plain, bench = AnswerBench(), make_bench()
    for one in (plain, bench):
        first(one)
        one.step()
    taken = [one.core.metrics.gauges["charonia_answer_cache_bytes", ""] for one in (plain, bench)]
    assert taken[1] == taken[0] + 100


def test_another_model_has_no_similar_prompts():
    bench = make_bench()
    first(bench)
    bench.executor.vocab_size = 200
    reload_(bench)
    bench.ask("near", NEAR)
    bench.run()
    assert bench.cached("near") is None
    assert bench.tokens("near") == alone(NEAR, vocab_size=200)


def test_a_model_that_comes_while_it_is_looked_for_answers_itself():
    bench = make_bench()
    first(bench)
    bench.ask("near", NEAR)
    found, bench.similar.waiting = bench.similar.waiting, []
    bench.executor.vocab_size = 200
    reload_(bench)
    for tell in found:
        tell()
    bench.run()
    assert bench.cached("near") is None
    assert bench.tokens("near") == alone(NEAR, vocab_size=200)
    assert len(bench.similar.known) == 1, "the answer is of no use under the old model's key"


# ---------------------------------------------------------------------- the thread


class Scripted:
    """An index that knows one prompt, and fails on order."""

    bytes_per_prompt = 10

    def __init__(self) -> None:
        self.is_broken = False
        self.known: list[bytes] = []
        self.may_look = threading.Event()
        self.may_look.set()

    def find(self, scope: bytes, text: str) -> Found:
        assert self.may_look.wait(WAIT_S)
        if self.is_broken:
            raise KeyError("a bug")
        return Found(text, self.known[0] if self.known else None, 0.95)

    def add(self, scope: bytes, key: bytes, vector: object) -> None:
        self.known.append(key)

    def remove(self, key: bytes) -> None:
        self.known.remove(key)


def test_the_service_looks_in_a_thread_of_its_own():
    index = Scripted()
    service = make_service(
        EchoExecutor(num_blocks=256),
        prompt_index=index,
        answer_cache_bytes=LOTS,
        semantic_cache_threshold=0.9,
    )
    wait_until_up(service)
    client = Client(service)
    client.submit("one")
    client.wait("one")
    eventually(lambda: index.known, "it is kept")
    index.may_look.clear()
    client.submit("two")
    client.submit("beside", use_answer_cache=False)
    assert client.wait("beside")[-1].finish_reason == "length"
    assert not client.chunks["two"]
    index.may_look.set()
    assert client.wait("two")[-1].timing["cached"] == "semantic"
    tokens = [token_id for chunk in client.chunks["two"] for token_id in chunk.token_ids]
    assert tokens == echo_run(list(b"one"), seed=1, max_tokens=10, vocab_size=256)
    index.is_broken = True
    client.submit("three")
    assert "cached" not in client.wait("three")[-1].timing
    index.may_look.clear()
    client.submit("last")
    index.may_look.set()
    service.close()
    assert client.wait("last")[-1].is_final


@pytest.mark.parametrize("num_bytes", [MIN_ANSWER_BYTES + 9, MIN_ANSWER_BYTES + 10])
def test_a_cache_without_room_for_one_vector_is_refused(num_bytes):
    """`Scripted` takes 10 bytes for each."""
    values = {"answer_cache_bytes": num_bytes, "semantic_cache_threshold": 0.9}
    if num_bytes < MIN_ANSWER_BYTES + 10:
        with pytest.raises(ConfigError, match=r"answer_cache_bytes = 823 .* takes 824 bytes at"):
            make_service(EchoExecutor(), prompt_index=Scripted(), **values)
    else:
        make_service(EchoExecutor(), prompt_index=Scripted(), **values).close()


def test_no_more_wait_than_are_looked_for_soon():
    posted: list = []
    similar = SimilarPrompts(
        Scripted(), lambda ids: "text", post=posted.append, log=lambda line: None
    )
    done: list = []
    asked = [similar.ask(b"s", [1], done.append) for _ in range(MAX_LOOKUPS + 1)]
    assert asked == [True] * MAX_LOOKUPS + [False]
    similar.start()
    eventually(lambda: len(posted) == MAX_LOOKUPS, "all are looked for")
    assert similar.ask(b"s", [1], done.append), "whether or not anybody heard of the others"
    similar.close()
    for tell in posted:
        tell()
    assert len(done) == MAX_LOOKUPS + 1


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"semantic_cache_threshold": "0.9"}, "no effect without answer_cache_bytes"),
        (
            {"answer_cache_bytes": "1000", "semantic_cache_model": "m"},
            "semantic_cache_model = 'm' has no effect without semantic_cache_threshold",
        ),
        ({"answer_cache_bytes": "1000", "semantic_cache_threshold": "1.5"}, "threshold"),
        ({"answer_cache_bytes": "1000", "semantic_cache_threshold": "0"}, "threshold"),
    ],
)
def test_a_wrong_setting_is_named(values, says):
    with pytest.raises(ConfigError, match=says):
        SchedulerArgs.from_parameters(values)
