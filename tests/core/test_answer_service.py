"""The service with an answer cache: many threads, limits at the door, and bugs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from charonia.errors import RateLimitedError
from core.service_bench import Client, Gated, make_service, wait_until_up
from support.echo import EchoExecutor, echo_run
from support.waiting import WAIT_S

LOTS = 2**20
PROMPT = b"the same"


class SameClient(Client):
    """All its requests have one prompt."""

    def submit(self, key: str, **params) -> None:
        super().submit(key, prompt_ids=list(PROMPT), **params)


def tokens(client: Client, key: str) -> list[int]:
    return [token_id for chunk in client.wait(key) for token_id in chunk.token_ids]


def expected(max_tokens: int = 10) -> list[int]:
    return echo_run(list(PROMPT), seed=1, max_tokens=max_tokens, vocab_size=256)


def hits(service, kind: str) -> float:
    return service.metrics.counters["charonia_answer_cache_hits_total", kind]


def test_equal_requests_of_many_threads_are_computed_once():
    executor = Gated(num_blocks=256)
    service = make_service(executor, answer_cache_bytes=LOTS)
    wait_until_up(service)
    client = SameClient(service)
    keys = [f"r{index}" for index in range(60)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(client.submit, keys))
    executor.may_step.set()
    for key in keys:
        assert tokens(client, key) == expected()
    assert service.metrics.counters["charonia_generation_tokens_total", ""] == 10
    client.submit("one more")
    assert tokens(client, "one more") == expected()
    assert hits(service, "exact") + hits(service, "joined") == 60
    assert service.state.num_live == 0
    assert service.drain() == 0
    service.close()


def test_who_comes_and_goes_while_others_stay_is_answered_once():
    service = make_service(EchoExecutor(num_blocks=2**13), answer_cache_bytes=LOTS)
    wait_until_up(service)
    client = SameClient(service)
    client.submit("stays", max_tokens=300)

    def one(index: int) -> None:
        key = f"r{index}"
        client.submit(key, max_tokens=300)
        if index % 2:
            client.cancel(key)
        client.wait(key)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(100)))
    assert tokens(client, "stays") == expected(300)
    for index in range(100):
        last = client.wait(f"r{index}")[-1]
        if last.error is None:
            assert tokens(client, f"r{index}") == expected(300)
        else:
            assert last.error.kind == "cancelled"
    assert service.metrics.counters["charonia_generation_tokens_total", ""] == 300
    service.close()


def test_who_joins_counts_among_what_its_tenant_has(tmp_path):
    tenants = tmp_path / "tenants.json"
    tenants.write_text('{"tenants": {"a": {"max_concurrency": 3}}}')
    executor = Gated()
    service = make_service(executor, answer_cache_bytes=LOTS, tenants_file=str(tenants))
    wait_until_up(service)
    client = SameClient(service)
    for key in ("first", "second", "third"):
        client.submit(key, tenant="a")
    with pytest.raises(RateLimitedError):
        client.submit("fourth", tenant="a")
    executor.may_step.set()
    for key in ("first", "second", "third"):
        assert tokens(client, key) == expected()
    client.submit("fourth", tenant="a")
    assert tokens(client, "fourth") == expected()
    assert service._gate.num_of_tenants()["other"] == (0, 0)
    service.close()


def test_a_bug_on_the_way_to_clients_loses_nobody(monkeypatch):
    executor = Gated()
    service = make_service(executor, answer_cache_bytes=LOTS)
    wait_until_up(service)
    client = SameClient(service)

    def give(*args):
        raise KeyError("a bug")

    for key in "abc":
        client.submit(key)
    assert executor.is_asked.wait(WAIT_S)
    monkeypatch.setattr(service._answers, "_give", give)
    executor.may_step.set()
    for key in "abc":
        assert str(client.wait(key)[-1].error) == "internal error: KeyError"
    counters = service.metrics.counters
    assert counters["charonia_finished_total", "internal"] == 3
    assert counters["charonia_tenant_requests_total", "other"] == 3
    monkeypatch.undo()
    wait_until_up(service)
    client.submit("d")
    assert tokens(client, "d") == expected()
    service.close()


def test_closing_answers_who_joined():
    executor = Gated()
    service = make_service(executor, answer_cache_bytes=LOTS)
    wait_until_up(service)
    client = SameClient(service)
    for key in "ab":
        client.submit(key, max_tokens=50)
    assert executor.is_asked.wait(WAIT_S)
    closing = threading.Thread(target=service.close)
    closing.start()
    executor.may_step.set()
    closing.join()
    for key in "ab":
        assert client.wait(key)[-1].is_final
