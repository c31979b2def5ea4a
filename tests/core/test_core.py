"""The core from a request to its end: text, tokens, limits, and what is refused."""

import re

import pytest

from charonia.core.generation_request import GenerationRequest, seeds_of
from charonia.core.output.outputs import Chunk
from charonia.errors import InvalidRequestError, NotSupportedError
from charonia.metrics.metrics import Metrics
from charonia.protocol import MemoryReport, SamplingParams
from core.bench import Bench, expected
from support.echo import EchoExecutor


def test_chunks_carry_all_tokens_and_text_and_one_end():
    bench = Bench()
    bench.add("a", max_tokens=200)
    bench.run()
    chunks = bench.chunks["a"]
    assert bench.tokens("a") == expected("a", 200)
    assert bench.text("a") == bench.tokenizer.decode(expected("a", 200))
    assert [chunk.is_final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk.text for chunk in chunks[:-1])
    assert all(chunk.token_ids for chunk in chunks)
    assert len(chunks) < 200, "nothing was held back although much of it is broken UTF-8"
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].timing["computed_tokens"] == 10


def test_a_stop_string_ends_the_text_and_its_surplus_tokens_do_not_count():
    bench = Bench()
    whole = expected("a", 60)
    text = bench.tokenizer.decode(whole)
    stop = text[25:28]
    bench.add("a", max_tokens=60, stop=(stop,))
    bench.add("b", max_tokens=60, stop=(stop,), include_stop_str_in_output=True, min_tokens=60)
    bench.run()
    assert bench.text("a") == text[: text.index(stop)]
    assert bench.chunks["a"][-1].finish_reason == "stop"
    assert bench.tokens("a") == whole[: len(bench.tokens("a"))]
    assert bench.chunks["b"][-1].finish_reason == "length"
    counted = bench.core.metrics.counters["charonia_generation_tokens_total", ""]
    assert counted == len(bench.tokens("a")) + 60


def test_a_stop_token_is_counted_but_not_shown():
    bench = Bench()
    whole = expected("a")
    bench.add("a", stop_token_ids=(whole[6],))
    bench.add("b", prompt=[ord("a")] * 10, stop_token_ids=(whole[6],), logprobs=0)
    bench.add(
        "c", prompt=[ord("a")] * 10, stop_token_ids=(whole[6],), include_stop_str_in_output=True
    )
    bench.run()
    assert bench.tokens("a") == whole[:7]
    assert bench.text("a") == bench.tokenizer.decode(whole[:6])
    assert bench.text("c") == bench.tokenizer.decode(whole[:7])
    assert bench.chunks["b"][-1].cumulative_logprob == pytest.approx(-0.5 * 7)


def test_cancelling_frees_everything_and_leaves_the_others():
    bench = Bench(EchoExecutor(max_num_seqs=2))
    for key in "abcd":
        bench.add(key)
    bench.run(3)
    bench.cancel("a")
    bench.cancel("d")
    bench.run()
    assert [type(bench.error(key)).__name__ for key in "ad"] == ["RequestCancelledError"] * 2
    assert bench.tokens("b") == expected("b")
    assert bench.tokens("c") == expected("c")
    gauges = bench.core.metrics.gauges
    assert gauges["charonia_kv_blocks", "used"] == 0
    assert gauges["charonia_requests_running", ""] == gauges["charonia_requests_waiting", ""] == 0


def test_a_timeout_in_the_queue_and_a_deadline_end_requests():
    bench = Bench(EchoExecutor(max_num_seqs=1))
    bench.add("a", max_tokens=100, deadline_ms=500)
    bench.add("b", timeout_s=0.2)
    bench.run()
    assert str(bench.error("a")) == "deadline_ms has passed"
    assert str(bench.error("b")) == "Request timeout expired"
    assert bench.core.metrics.counters["charonia_finished_total", "timeout"] == 2
    assert bench.tokens("b") == []
    assert max(bench.core.metrics.drain()["charonia_queue_seconds"]) >= 0.2, "b is not seen"
    assert 30 < len(bench.tokens("a")) < 60


@pytest.mark.parametrize(
    ("scheduling_policy", "late_requests", "kind"),
    [
        ("deadline", "reject", "late"),
        ("deadline", "demote", "timeout"),
        ("fcfs", "reject", "timeout"),
    ],
)
def test_who_has_not_started_at_its_deadline_is_late_where_late_ones_are_rejected(
    scheduling_policy, late_requests, kind
):
    """Also before there was a step, which would say what steps take."""
    bench = Bench(scheduling_policy=scheduling_policy, late_requests=late_requests)
    bench.add("a", deadline_ms=50)
    bench.add("b", timeout_s=0.05)
    bench.now += 0.1
    bench.run()
    assert bench.error("a").kind == kind
    assert not bench.error("a").is_retryable
    assert str(bench.error("a")).startswith("deadline_ms has passed")
    assert bench.error("b").kind == "timeout"
    bench.add("c", max_tokens=100, deadline_ms=500)
    bench.run()
    assert bench.error("c").kind == "timeout", "it has started"


def test_who_is_late_is_told_when_to_come_again_if_that_can_help():
    bench = Bench(EchoExecutor(max_num_seqs=1, num_blocks=2**10), scheduling_policy="deadline")
    bench.add("a", max_tokens=400, deadline_ms=5000)
    bench.run(3)  # these steps say that they took a millisecond each
    bench.add("b", max_tokens=3000, deadline_ms=5100)
    bench.add("c", max_tokens=6000, deadline_ms=5200)
    bench.run()
    assert len(bench.tokens("a")) == 400
    late, hopeless = bench.error("b"), bench.error("c")
    assert (late.kind, late.is_retryable) == (hopeless.kind, True) == ("late", True)
    assert str(late).startswith("deadline_ms cannot be met: about 3.00 s are needed, and")
    assert re.search(r"; retry after 0\.0\d\d s$", str(late))
    assert not hopeless.is_retryable
    assert "retry" not in str(hopeless)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "empty"),
        ({"prompt_ids": [256]}, "token id 256 at place 0; the vocabulary has ids 0 to 255"),
        ({"prompt_ids": [1, -1]}, "token id -1 at place 1"),
        ({"prompt_ids": [1] * 2000}, "2000 tokens; at most"),
        ({"params": SamplingParams(logit_bias={999: 1.0})}, "logit_bias has token id 999"),
        ({"params": SamplingParams(stop_token_ids=(-3,))}, "stop_token_ids has token id -3"),
        (
            {"params": SamplingParams(allowed_token_ids=(255, 256))},
            "allowed_token_ids has token id 256 at place 1; the vocabulary has ids 0 to 255",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes, message):
    request = GenerationRequest(**({"key": "a", "prompt_ids": [1]} | changes))
    with pytest.raises(InvalidRequestError, match=message):
        Bench().core.check(request)


@pytest.mark.parametrize(
    ("scheduling_policy", "order"), [("fcfs", "arrival"), ("deadline", "deadlines")]
)
def test_a_priority_is_refused_where_another_order_serves_and_the_text_names_it(
    scheduling_policy, order
):
    bench = Bench(scheduling_policy=scheduling_policy)
    refused = GenerationRequest(key="a", prompt_ids=[1], params=SamplingParams(priority=-2))
    with pytest.raises(NotSupportedError) as caught:
        bench.core.check(refused)
    assert str(caught.value) == (
        f"priority = -2 has no effect with scheduling_policy '{scheduling_policy}', which serves"
        f" requests in the order of their {order}; leave it out, or have the engine loaded with"
        ' scheduling_policy "priority"'
    )
    in_time = SamplingParams(priority=0, deadline_ms=500)
    bench.core.check(GenerationRequest(key="a", prompt_ids=[1], params=in_time))


def test_a_priority_is_accepted_where_it_is_the_order():
    request = GenerationRequest(key="a", prompt_ids=[1], params=SamplingParams(priority=-2))
    Bench(scheduling_policy="priority").core.check(request)


def test_seeds_of_64_bits_are_taken_as_they_are_and_missing_ones_are_drawn():
    bench = Bench()
    bench.add("a", seed=2**64 - 1)
    bench.add("b", prompt=[ord("a")] * 10, seed=-1)
    bench.add("c", prompt=[ord("a")] * 10, seed=None)
    bench.add("d", prompt=[ord("a")] * 10, seed=None)
    bench.run()
    assert bench.tokens("a") == bench.tokens("b") == expected("a", seed=2**64 - 1)
    assert bench.tokens("c") != bench.tokens("d")


def test_chunks_merge_into_what_one_chunk_would_have_been():
    bench = Bench()
    bench.add("a", logprobs=0)
    bench.run()
    merged = Chunk.merge(bench.chunks["a"])
    assert merged.text == bench.text("a")
    assert list(merged.token_ids) == expected("a")
    assert len(merged.logprobs) == 20
    assert merged.cumulative_logprob == pytest.approx(-10)
    assert merged.is_final


def test_an_engines_seed_gives_seeds_in_order() -> None:
    first, again, negative = seeds_of(7), seeds_of(7), seeds_of(-7)
    drawn = [first() for _ in range(3)]
    assert len(set(drawn)) == 3
    assert [again() for _ in range(3)] == drawn
    assert negative() != drawn[0]
    assert seeds_of(None)() != seeds_of(None)()


def test_what_an_engine_says_of_its_memory_is_shown_until_another_one_says_otherwise():
    report = MemoryReport(weights=7, step=None, kv_cache=3, left=5, total=20, source="machine")
    metrics = Metrics()
    for memory, shown in ((report, [7, 0, 3, 5]), (None, [0, 0, 0, 0])):
        metrics.show_memory(memory)
        parts = ("weights", "step", "kv_cache", "left")
        assert [metrics.gauges["charonia_engine_memory_bytes", part] for part in parts] == shown


def test_a_step_that_only_looks_at_memory_is_no_sign_of_a_rank_that_computes():
    executor = EchoExecutor(num_blocks=33)
    executor.room = 33
    bench = Bench(executor)
    bench.add("a", max_tokens=2)
    bench.run()
    stepped_at, num_submitted = bench.core.last_step_at, executor.num_submitted
    for _ in range(4):
        bench.step_and_wait()
    assert executor.num_submitted > num_submitted
    assert bench.core.last_step_at == stepped_at
