"""The spans of requests that the real scheduler plans."""

import pytest

from charonia.control import Group
from charonia.tracing import request_trace
from charonia.tracing.request_trace import RequestTrace, Span
from charonia.tracing.traceparent import TraceContext
from support.scheduling import make_engine, make_request, make_scheduler, run_step

CONTEXT = TraceContext(1, 2, is_sampled=True)


def names_of(trace: RequestTrace) -> list[str]:
    return [span.name for span in trace.spans]


def spans_named(trace: RequestTrace, name: str) -> list[Span]:
    return [span for span in trace.spans if span.name == name]


def make_trace(arrived_at: float = 0.0) -> tuple[RequestTrace, list[RequestTrace]]:
    exported: list[RequestTrace] = []
    return RequestTrace(CONTEXT, arrived_at, exported.append), exported


def test_each_chunk_of_a_prompt_has_a_span_and_the_tokens_after_it_have_one() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    engine = make_engine(scheduler)
    trace, exported = make_trace(arrived_at=1.0)
    trace.note_tokenized(1.0, 1.5, 10)
    request = make_request("a", 10, token_ids=[7] * 10, max_tokens=5, group=Group("a", trace))
    scheduler.add(request)
    for now in range(2, 20):
        if scheduler.requests:
            plan = scheduler.plan(now)
            scheduler.apply(engine.submit(plan).result(None), now + 0.5)
    trace.note_sent(9.0, 9.1, 2)
    trace.note_sent(9.5, 9.6, 3)
    assert not exported
    trace.end(10.0, attributes={"more": 1})
    assert exported == [trace]
    queue = ["tokenize", "queue"]
    assert names_of(trace) == [*queue, "prefill", "prefill", "prefill", "decode", "send"]
    (waited,) = spans_named(trace, "queue")
    assert (waited.began_at, waited.ended_at) == (1.5, 2)
    chunks = [
        (one.attributes["charonia.position"], one.attributes["charonia.tokens"], one.began_at)
        for one in spans_named(trace, "prefill")
    ]
    assert chunks == [(0, 4, 2), (4, 4, 3), (8, 2, 4)]
    (decode,) = spans_named(trace, "decode")
    assert decode.attributes["charonia.steps"] == 4  # the last chunk sampled the first token
    assert (decode.began_at, decode.ended_at) == (5, 8.5)
    (send,) = spans_named(trace, "send")
    assert send.attributes["charonia.responses"] == 2
    assert trace.num_tokens == 5
    assert trace.attributes == {"more": 1}


def test_who_is_preempted_waits_in_a_span_of_its_own() -> None:
    # Two requests of 8 and 12 tokens each have 5 blocks of 4; the last one gives way.
    scheduler = make_scheduler(num_blocks=8)
    engine = make_engine(scheduler)
    traces = {}
    for key in "ab":
        traces[key], _ = make_trace()
        group = Group(key, traces[key])
        scheduler.add(make_request(key, token_ids=[ord(key)] * 8, max_tokens=12, group=group))
    now = 0.0
    while scheduler.requests:
        now += 1
        run_step(scheduler, engine, now)
    assert scheduler.stats.preemptions == 1
    for trace in traces.values():
        trace.end(now)
    assert "preempted" not in names_of(traces["a"])
    (gap,) = spans_named(traces["b"], "preempted")
    assert gap.ended_at > gap.began_at
    again = spans_named(traces["b"], "prefill")[-1]
    assert again.began_at == gap.ended_at


def test_who_loses_its_engine_waits_for_another_in_a_span_of_its_own() -> None:
    scheduler = make_scheduler()
    trace, _ = make_trace()
    scheduler.add(make_request("a", group=Group("a", trace)))
    run_step(scheduler, make_engine(scheduler), 1.0)
    scheduler.plan(2.0)
    scheduler.blame()
    scheduler.reset()
    run_step(scheduler, make_engine(scheduler), 5.0)
    trace.end(6.0)
    (gap,) = spans_named(trace, "recovery")
    assert (gap.began_at, gap.ended_at) == (1.0, 5.0)


@pytest.mark.parametrize("name", ["preempted", "recovery"])
def test_who_ends_without_its_row_has_waited_until_then(name: str) -> None:
    scheduler = make_scheduler()
    trace, _ = make_trace()
    request = make_request("a", group=Group("a", trace))
    scheduler.add(request)
    run_step(scheduler, make_engine(scheduler), 1.0)
    if name == "recovery":
        scheduler.plan(2.0)
        scheduler.blame()
        scheduler.reset()
    else:
        request.num_preemptions += 1
    trace.end(6.0)
    (gap,) = spans_named(trace, name)
    assert (gap.began_at, gap.ended_at) == (1.0, 6.0)


def test_who_shares_an_answer_waits_for_it_until_the_first_response() -> None:
    trace, _ = make_trace()
    trace.note_tokenized(1.0, 2.0, 8)
    trace.note_sent(4.0, 4.1, 3)
    trace.note_sent(5.0, 5.1, 2)
    trace.end(5.1)
    assert names_of(trace) == ["tokenize", "shared", "send"]
    (waited,) = spans_named(trace, "shared")
    assert (waited.began_at, waited.ended_at) == (2.0, 4.0)


def test_a_long_prompt_has_no_more_spans_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_trace, "MAX_CHUNKS", 3)
    scheduler = make_scheduler(max_num_batched_tokens=4)
    engine = make_engine(scheduler)
    trace, _ = make_trace()
    scheduler.add(make_request("a", 40, max_tokens=1, group=Group("a", trace)))
    while scheduler.requests:
        run_step(scheduler, engine)
    trace.end(1.0)
    chunks = spans_named(trace, "prefill")
    assert [one.attributes["charonia.steps"] for one in chunks] == [1, 1, 8]
    assert sum(int(one.attributes["charonia.tokens"]) for one in chunks) == 40


def test_who_never_starts_has_only_waited_and_what_comes_late_is_ignored() -> None:
    scheduler = make_scheduler()
    trace, exported = make_trace()
    request = make_request("a", group=Group("a", trace))
    trace.note_tokenized(1.0, 2.0, 8)
    trace.end(5.0, error=("it was cancelled", "cancelled"))
    scheduler.add(request)
    run_step(scheduler, make_engine(scheduler))
    trace.end(7.0)
    assert exported == [trace]
    assert names_of(trace) == ["tokenize", "queue"]
    assert trace.error == ("it was cancelled", "cancelled")
    assert trace.ended_at == 5.0
