"""What is reported of a simulation: classes, numbers and tables."""

import pytest

from charonia.simulate.report import ALL, recorded, report, tables
from support.simulations import make_setting, request, run


def test_a_report_has_classes_and_numbers():
    requests = [request(10, 5, tenant=name, timestamp=float(n)) for n, name in enumerate("aab")]
    outcome = run(make_setting(), *requests)
    found = report("fcfs", outcome, ("tenant",), 100)
    assert [(one.name, one.num_requests) for one in found.classes] == [(ALL, 3), ("a", 2), ("b", 1)]
    assert found.overall.num_finished == 3
    assert found.tokens_per_s == pytest.approx(15 / outcome.seconds)
    assert found.overall.inter_token.mean == pytest.approx(0.0103, rel=0.1)
    assert found.overall.queue.longest < found.overall.ttft.p50 <= found.overall.ttft.p99
    text = tables([found])
    assert "| fcfs | 3 | 3 |" in text
    assert "| fcfs | a | 2 | 2 | 10 |" in text
    by_priority = report("fcfs", outcome, ("priority",), 100)
    assert [one.name for one in by_priority.classes] == [ALL, "priority 0"]
    assert len(report("fcfs", outcome, (), 100).classes) == 1
    by_both = report("fcfs", outcome, ("tenant", "priority"), 100)
    assert by_both.classes == [*found.classes, *by_priority.classes[1:]]


def test_a_run_is_a_trace_again():
    outcome = run(make_setting(), request(10, 5), request(10, 5, timestamp=2.0))
    trace = list(outcome.as_trace())
    again = recorded(trace)
    assert again is not None
    found = report("x", outcome, (), 100)
    assert again.overall.ttft.p50 == pytest.approx(found.overall.ttft.p50, rel=1e-3)
    assert again.overall.inter_token.mean == pytest.approx(found.overall.inter_token.mean, rel=1e-3)
    assert again.tokens_per_s == pytest.approx(found.tokens_per_s, rel=1e-3)
    assert recorded([request()]) is None


def test_tables_say_how_requests_ended_that_were_not_finished():
    requests = [request(tenant="ab"[n % 2]) for n in range(10)]
    outcome = run(make_setting(max_queue_size=2), *requests, request(2000, 1, tenant="a"))
    text = tables([report("fcfs", outcome, ("tenant",), 100)])
    assert text.count("| not finished |") == 2
    assert "| 4 queue_full, 1 prompt_too_long |" in text
    assert "| 2 queue_full, 1 prompt_too_long |" in text
    assert "not finished" not in tables([report("x", run(make_setting()), (), 100)])
