"""What each tenant got, and whether it was what was promised."""

import json
from dataclasses import dataclass

import pytest

from charonia.core.gate.attainment import Attainment
from charonia.core.gate.tenants import Tenants
from charonia.core.generation_request import GenerationRequest
from charonia.metrics.metrics import Metrics
from charonia.protocol import SamplingParams
from core.answer_bench import AnswerBench
from core.bench import Bench
from support.echo import EchoExecutor

FILE = {
    "tenants": {
        "search": {"ttft_target_ms": 200, "inter_token_target_ms": 50},
        "plain": {},
    }
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps(FILE))
    return path


def counts(metrics: Metrics) -> dict[str, float]:
    """What is not zero of promises, by metric and tenant."""
    words = ("target", "deadline")
    return {
        f"{name.removeprefix('charonia_').removesuffix('_total')} {tenant}": value
        for (name, tenant), value in metrics.counters.items()
        if value and any(word in name for word in words)
    }


@dataclass
class Entry:
    """One that came at 0 s."""

    request: GenerationRequest
    first_token_s: float | None = None
    inter_token_s: float | None = None
    arrived_at: float = 0.0
    num_tokens: int = 4

    def queue_s(self, now: float) -> float:
        return now / 2


@pytest.mark.parametrize(
    ("end", "found"),
    [
        (
            {"first_token_s": 0.2, "inter_token_s": 0.05},
            {"ttft_target_met search": 1, "inter_token_target_met search": 1},
        ),
        (
            {"first_token_s": 0.21, "inter_token_s": 0.06},
            {"ttft_target_missed search": 1, "inter_token_target_missed search": 1},
        ),
        ({"first_token_s": 0.1}, {"ttft_target_met search": 1}),
        ({"reason": "timeout"}, {"ttft_target_missed search": 1}),
        ({"reason": "cancelled", "has_deadline": True}, {}),
        (
            {"reason": "stop", "first_token_s": 0.1, "has_deadline": True},
            {"ttft_target_met search": 1, "deadline_met search": 1},
        ),
        (
            {"reason": "timeout", "has_deadline": True},
            {"ttft_target_missed search": 1, "deadline_missed search": 1},
        ),
        ({"tenant": "plain", "first_token_s": 100.0}, {}),
        ({"tenant": "unknown", "has_deadline": True}, {"deadline_met other": 1}),
    ],
)
def test_what_was_promised_is_met_or_missed(path, end, found):
    metrics = Metrics()
    attainment = Attainment(Tenants(path, log=print), metrics)
    end = {"tenant": "search", "reason": "length", "has_deadline": False} | end
    tenant, reason, has_deadline = map(end.pop, ("tenant", "reason", "has_deadline"))
    params = SamplingParams(tenant=tenant, deadline_ms=1000 if has_deadline else None)
    request = GenerationRequest(key="a", prompt_ids=[1, 2, 3], params=params)
    attainment.note_end(Entry(request, **end), reason, now=2.0)
    assert counts(metrics) == found
    assert metrics.counters["charonia_finished_total", reason] == 1


def test_whom_the_server_refuses_has_missed_what_was_promised(path):
    metrics = Metrics()
    attainment = Attainment(Tenants(path, log=print), metrics)
    attainment.note_refusal("search", has_deadline=True)
    attainment.note_refusal("search", has_deadline=False)
    attainment.note_refusal("plain", has_deadline=False)
    assert counts(metrics) == {"ttft_target_missed search": 2, "deadline_missed search": 1}
    assert not metrics.counters["charonia_tenant_requests_total", "search"]


def test_a_core_counts_what_its_tenants_got(path):
    bench = Bench(tenants=Tenants(path, log=print))
    bench.add("a", tenant="search", max_tokens=5)
    bench.add("b", tenant="search", max_tokens=5, deadline_ms=100000)
    bench.add("c", tenant="nobody", max_tokens=5, timeout_s=0.0)
    bench.run()
    counters = bench.core.metrics.counters
    assert counters["charonia_tenant_requests_total", "search"] == 2
    assert counters["charonia_tenant_requests_total", "other"] == 1
    assert counters["charonia_tenant_prompt_tokens_total", "search"] == 20
    assert counters["charonia_tenant_prompt_tokens_total", "other"] == 0
    assert counters["charonia_tenant_generation_tokens_total", "search"] == 10
    assert counts(bench.core.metrics) == {
        "ttft_target_met search": 2,
        "inter_token_target_met search": 2,
        "deadline_met search": 1,
    }


@pytest.mark.parametrize("makes", [Bench, AnswerBench])
def test_samples_that_are_not_returned_count_for_their_tenant(makes):
    """With equal requests they count once, and not where the answer was kept."""
    bench = makes(EchoExecutor(num_blocks=128))
    for key in "abc":
        if makes is AnswerBench:
            bench.ask(key, n=2, best_of=5)
        elif key == "a":
            bench.add(key, n=2, best_of=5)
        if key == "b":
            bench.run()
    bench.run()
    assert len(bench.tokens("a")) == 2 * 20
    counters = bench.core.metrics.counters
    assert counters["charonia_tenant_generation_tokens_total", "other"] == 5 * 20
    assert counters["charonia_tenant_prompt_tokens_total", "other"] == 10


@pytest.mark.parametrize("params", [{}, {"n": 2}, {"n": 2, "best_of": 4}])
def test_an_answer_cache_changes_nothing_of_when_tokens_came(params):
    """Be they returned at once, or when it is known which samples are the best."""
    plain, cached = Bench(EchoExecutor(num_blocks=128)), AnswerBench(EchoExecutor(num_blocks=128))
    plain.add("a", [7] * 10, **params)
    cached.ask("a", [7] * 10, **params)
    cached.ask("joins", [7] * 10, **params)
    cached.ask("leaves", [7] * 10, deadline_ms=100, **params)
    for bench in (plain, cached):
        bench.run()
    (expected,) = plain.core.metrics.drain()["charonia_time_to_first_token_seconds"]
    assert expected < 0.05 < plain.ended_at["a"]
    found = cached.core.metrics.drain()["charonia_time_to_first_token_seconds"]
    assert cached.error("leaves").kind == "timeout"
    assert found == [expected] * 3


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_samples_that_come_one_after_the_other_are_no_slower_for_it(path, max_num_seqs):
    found = []
    for makes in (Bench, AnswerBench):
        bench = makes(EchoExecutor(max_num_seqs=max_num_seqs), tenants=Tenants(path, log=print))
        add = bench.ask if makes is AnswerBench else bench.add
        add("a", [7] * 10, n=8, tenant="search")
        bench.run()
        found.append(counts(bench.core.metrics))
    assert found == [{"ttft_target_met search": 1, "inter_token_target_met search": 1}] * 2


def test_who_cancels_before_the_best_are_known_is_charged_what_was_computed():
    bench = AnswerBench(EchoExecutor(num_blocks=128))
    for key in "ab":
        bench.ask(key, n=1, best_of=3, max_tokens=50)
    bench.run(8)
    bench.cancel("a")
    bench.run(4)
    bench.cancel("b")
    assert bench.num_generated > 0
    counters = bench.core.metrics.counters
    assert counters["charonia_tenant_generation_tokens_total", "other"] == bench.num_generated
    assert counters["charonia_tenant_requests_total", "other"] == 2


def test_a_deadline_that_passes_is_missed():
    bench = Bench()
    bench.add("a", deadline_ms=50)
    bench.add("b", deadline_ms=50)
    bench.cancel("b")
    bench.run()
    assert counts(bench.core.metrics) == {"deadline_missed other": 1}
