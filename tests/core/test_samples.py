"""Several samples of one request: their chunks, their one end, and what is counted of them."""

import itertools

import pytest

from charonia.core.output.outputs import Chunk, merge_samples
from charonia.errors import RequestCancelledError, RequestTimeoutError, UnavailableError
from core.bench import Bench, expected
from support.echo import EchoExecutor


def tokens(bench: Bench, key: str, num_samples: int) -> list[list[int]]:
    return [list(one.token_ids) for one in merge_samples(bench.chunks[key], num_samples)]


def test_each_sample_has_the_tokens_of_its_seed_and_the_request_one_end():
    bench = Bench()
    bench.add("a", n=3)
    bench.add("b", n=2, seed=40, max_tokens=5)
    bench.run()
    assert tokens(bench, "a", 3) == [expected("a", seed=5 + i) for i in range(3)]
    assert tokens(bench, "b", 2) == [expected("b", 5, seed=40 + i) for i in range(2)]
    for key in "ab":
        chunks = bench.chunks[key]
        assert [chunk.is_final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert all(chunk.timing is None for chunk in chunks[:-1])
    timing = bench.chunks["a"][-1].timing
    assert timing["computed_tokens"] == 10 + 2
    assert timing["cached_tokens"] == 2 * 9
    assert timing["prompt_cached_tokens"] == 0
    counters = bench.core.metrics.counters
    assert counters["charonia_generation_tokens_total", ""] == 3 * 20 + 2 * 5
    assert counters["charonia_finished_total", "length"] == 2
    gaps = bench.core.metrics.histograms["charonia_inter_token_seconds"]
    assert gaps.count == 3 * 19 + 2 * 4
    assert len(bench.core.metrics.drain()["charonia_time_to_first_token_seconds"]) == 2


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_the_parts_of_a_requests_time_add_up_also_where_one_sample_waits_for_the_other(
    max_num_seqs,
):
    bench = Bench(EchoExecutor(max_num_seqs=max_num_seqs))
    bench.add("before", max_tokens=3)
    bench.add("a", n=2, max_tokens=9)
    bench.run()
    timing = bench.chunks["a"][-1].timing
    parts = [timing[f"{part}_seconds"] for part in ("queue", "prefill", "decode")]
    assert all(part > 0 for part in parts)
    assert sum(parts[:2]) == pytest.approx(timing["first_token_seconds"])
    assert sum(parts) == pytest.approx(timing["total_seconds"])


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_what_was_cached_of_the_prompt_is_told_however_the_samples_came_to_it(max_num_seqs):
    """With one row the others find blocks that the first has left, and fork nothing."""
    bench = Bench(EchoExecutor(max_num_seqs=max_num_seqs))
    for key in "ab":
        bench.add(key, n=3, max_tokens=2, prompt=list(range(1, 41)))
        bench.run()
    found = [bench.chunks[key][-1].timing["prompt_cached_tokens"] for key in "ab"]
    assert found == [0, 32]


def test_a_sample_that_never_began_does_not_count_in_what_was_cached_of_the_prompt():
    bench = Bench(EchoExecutor(max_num_seqs=1))
    bench.add("a", n=2, max_tokens=2, prompt=list(range(1, 41)))
    bench.run()
    bench.add("b", n=2, max_tokens=9, prompt=list(range(1, 41)))
    bench.core.step()
    bench.cancel_samples("b", {1})
    bench.run()
    assert bench.chunks["b"][-1].timing["prompt_cached_tokens"] == 32


def test_samples_end_by_themselves():
    """A stop string ends one; the chunks say how many go on."""
    probe = Bench()
    probe.add("a", n=3)
    probe.run()
    text = merge_samples(probe.chunks["a"], 3)[1].text
    others = [merge_samples(probe.chunks["a"], 3)[i].text for i in (0, 2)]
    stop = next(
        text[i : i + 3] for i in range(len(text)) if not any(text[i : i + 3] in o for o in others)
    )
    bench = Bench()
    bench.add("a", n=3, stop=(stop,))
    bench.run()
    whole = merge_samples(bench.chunks["a"], 3)
    assert [one.finish_reason for one in whole] == ["length", "stop", "length"]
    assert whole[1].text == text[: text.index(stop)]
    ends = [chunk for chunk in bench.chunks["a"] if chunk.ends_sample]
    assert [chunk.num_open for chunk in ends] == [2, 1, 0]
    assert not bench.core.has_requests
    assert bench.core.metrics.gauges["charonia_kv_blocks", "used"] == 0


def test_a_request_of_which_one_samples_key_is_taken_ends_alone_and_leaves_nothing():
    bench = Bench()
    bench.add("a#1")
    bench.core.step()
    bench.add("a", n=2)
    bench.core.step()
    assert "live request" in str(bench.error("a"))
    assert bench.core.metrics.gauges["charonia_requests_running", ""] == 1
    bench.executor.unload()
    bench.run()
    assert isinstance(bench.error("a#1"), UnavailableError)
    assert bench.core.metrics.gauges["charonia_requests_waiting", ""] == 0


@pytest.mark.parametrize("num_steps", [1, 2, 3, 8])
def test_who_cancels_ends_all_samples(num_steps):
    bench = Bench(EchoExecutor(max_num_seqs=2))
    bench.add("a", n=4)
    bench.add("b")
    bench.run(num_steps)
    bench.cancel("a")
    bench.run()
    ends = [chunk for chunk in bench.chunks["a"] if chunk.ends_sample]
    assert len(ends) == 4
    assert isinstance(bench.error("a"), RequestCancelledError)
    assert bench.chunks["a"][-1].is_final
    assert bench.tokens("b") == expected("b")
    for index, ids in enumerate(tokens(bench, "a", 4)):
        assert ids == expected("a", seed=5 + index)[: len(ids)]
    assert bench.core.metrics.counters["charonia_cancellations_total", ""] == 1


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 8])
def test_a_sample_that_is_cancelled_ends_alone(num_steps, index):
    bench = Bench(EchoExecutor(max_num_seqs=2))
    bench.add("a", n=4)
    bench.add("b")
    bench.run(num_steps)
    bench.cancel_samples("a", [index, 4, 127])
    end = bench.chunks["a"][-1]
    assert (end.index, end.finish_reason, end.num_open) == (index, "cancelled", 3)
    bench.cancel_samples("a", [index])  # which has ended
    assert bench.chunks["a"][-1] is end
    bench.run()
    ids = tokens(bench, "a", 4)
    whole = expected("a", seed=5 + index)
    assert ids.pop(index) == whole[: len(merge_samples(bench.chunks["a"], 4)[index].token_ids)]
    assert ids == [expected("a", seed=5 + i) for i in range(4) if i != index]
    assert bench.tokens("b") == expected("b")
    assert bench.chunks["a"][-1].is_final
    counters = bench.core.metrics.counters
    assert counters["charonia_cancellations_total", ""] == 0  # it had its answer
    assert counters["charonia_finished_total", "length"] == 2
    assert bench.core.metrics.gauges["charonia_kv_blocks", "used"] == 0


def test_a_sample_that_is_cancelled_gives_its_blocks_and_its_row_back():
    bench = Bench(EchoExecutor(max_num_seqs=4))
    bench.add("a", n=4, max_tokens=200)
    bench.run(100)
    used = bench.core.metrics.gauges["charonia_kv_blocks", "used"]
    bench.cancel_samples("a", [1, 3])
    bench.run(4)
    gauges = bench.core.metrics.gauges
    assert gauges["charonia_requests_running", ""] == 2
    assert gauges["charonia_kv_blocks", "used"] < 0.6 * used
    bench.run()
    assert tokens(bench, "a", 4)[2] == expected("a", 200, seed=7)


def test_who_cancels_one_sample_after_the_other_has_a_whole_answer_without_an_error():
    bench = Bench()
    bench.add("a", n=3)
    bench.run(5)
    for index in (2, 0, 1):
        bench.cancel_samples("a", [index])
    assert not bench.core._requests
    bench.run()
    ends = [(one.index, one.is_final) for one in bench.chunks["a"] if one.ends_sample]
    assert ends == [(2, False), (0, False), (1, True)]
    assert bench.error("a") is None
    assert bench.chunks["a"][-1].timing["computed_tokens"] == 10 + 2
    counters = bench.core.metrics.counters
    assert counters["charonia_cancellations_total", ""] == 1
    assert counters["charonia_finished_total", "cancelled"] == 1


def test_samples_that_are_cancelled_while_there_is_no_engine_end_and_the_others_wait_for_it():
    bench = Bench()
    bench.executor.unload()
    bench.core.step()
    bench.add("a", n=3)
    bench.add("b", n=2, deadline_ms=60_000)
    bench.cancel_samples("a", [0, 1])
    bench.cancel_samples("b", [0])
    bench.cancel_samples("b", [1])
    assert [(one.index, one.finish_reason) for one in bench.chunks["b"]] == [
        (0, "cancelled"),
        (1, "cancelled"),
    ]
    assert bench.chunks["b"][-1].is_final
    bench.executor.load()
    bench.run()
    assert tokens(bench, "a", 3) == [[], [], expected("a", seed=7)]
    reasons = [one.finish_reason for one in merge_samples(bench.chunks["a"], 3)]
    assert reasons == ["cancelled", "cancelled", "length"]
    assert bench.chunks["a"][-1].timing["computed_tokens"] == 10
    counters = bench.core.metrics.counters
    assert counters["charonia_finished_total", "cancelled"] == 1
    assert counters["charonia_cancellations_total", ""] == 1


def test_what_is_one_of_the_best_is_not_known_when_it_is_cancelled():
    bench = Bench()
    bench.add("a", n=2, best_of=3)
    bench.cancel_samples("a", [0, 1, 2])
    bench.run(5)
    bench.cancel_samples("a", [0, 1, 2])
    bench.run()
    assert tokens(bench, "a", 2) == [expected("a"), expected("a", seed=6)]


def test_a_request_that_waits_too_long_fails_as_one():
    bench = Bench(EchoExecutor(max_num_seqs=1))
    bench.add("a", max_tokens=20)
    bench.add("b", n=3, timeout_s=0.05)
    bench.run()
    assert isinstance(bench.error("b"), RequestTimeoutError)
    assert [chunk.is_final for chunk in bench.chunks["b"]] == [False, False, True]
    assert bench.tokens("a") == expected("a")


def test_the_best_come_at_the_end_the_best_one_first():
    bench = Bench()
    bench.add("a", n=2, best_of=4, ignore_eos=True)
    bench.run()
    # The echo engine gives every token the same log-probability: then the first ones are the best.
    first, second = bench.chunks["a"]
    assert (first.index, second.index) == (0, 1)
    assert (first.is_final, second.is_final) == (False, True)
    assert list(first.token_ids) == expected("a")
    assert list(second.token_ids) == expected("a", seed=6)
    assert first.logprobs is None
    assert first.cumulative_logprob == -10.0
    assert second.timing["computed_tokens"] == 10 + 3


def test_the_best_of_a_cancelled_request_are_what_there_is():
    bench = Bench()
    bench.add("a", n=1, best_of=3)
    bench.run(6)
    bench.cancel("a")
    (chunk,) = bench.chunks["a"]
    assert isinstance(chunk.error, RequestCancelledError)
    assert chunk.is_final
    assert len(chunk.token_ids) > 2


@pytest.mark.parametrize("fault", ["fail_next", "die_next"])
def test_a_lost_engine_changes_no_sample(fault):
    for num_steps in range(1, 8):
        bench = Bench()
        bench.add("a", n=3)
        bench.run(num_steps)
        setattr(bench.executor, fault, 1)
        bench.run()
        assert tokens(bench, "a", 3) == [expected("a", seed=5 + i) for i in range(3)]
        restarts = bench.chunks["a"][-1].timing["restarts"]
        assert restarts == (3 if fault == "die_next" else 0)


def test_a_request_is_made_whole_by_its_chunks():
    chunks = [
        Chunk("k", text="a", token_ids=(1,), index=0, num_open=2),
        Chunk("k", text="b", token_ids=(2,), index=1, num_open=2),
        Chunk("k", text="c", token_ids=(3,), finish_reason="stop", index=1, num_open=1),
        Chunk("k", text="d", token_ids=(4,), finish_reason="length", index=0),
    ]
    for some in (chunks, [*itertools.chain(chunks[1:3], chunks[:1], chunks[3:])]):
        whole = merge_samples(some, 2)
        assert [one.text for one in whole] == ["ad", "bc"]
        assert [one.finish_reason for one in whole] == ["length", "stop"]
        assert [one.is_final for one in whole] == [True, False]
