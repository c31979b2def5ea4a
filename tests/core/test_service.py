"""The service under many threads: every request is answered once, whoever comes and goes."""

import gc
import json
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import Request
from charonia.core.accepted_request import AcceptedRequest
from charonia.core.answers.shared_computation import SharedComputation, Subscriber
from charonia.core.generation_request import GenerationRequest
from charonia.core.recording.recorder import REQUESTS
from charonia.core.replica.opening import EngineOpening
from charonia.core.replica.reload import Reload
from charonia.core.request_log import RequestLog
from charonia.core.request_registry import LiveRequest
from charonia.core.service import EngineService
from charonia.errors import (
    EngineUnloadedError,
    LateRequestError,
    QueueFullError,
    RateLimitedError,
    ShuttingDownError,
    UnavailableError,
    error_of,
)
from charonia.events import Log
from charonia.protocol import SamplingParams
from charonia.traces import read_requests
from core.bench import Unchanged, byte_tokenizer
from support.echo import EchoExecutor, echo_run
from support.waiting import WAIT_S, eventually

NUM_BLOCKS = 2**13
FOR_EVER = 10**5
"""Tokens that have room in so many blocks, and take minutes."""


class Client:
    """Collects the chunks of its requests and waits for their ends."""

    def __init__(self, service: EngineService) -> None:
        self.service = service
        self.chunks = defaultdict(list)
        self.ends = defaultdict(threading.Event)
        self.accepted = {}

    def submit(
        self,
        key: str,
        arrived_at: float | None = None,
        prompt_ids: list[int] | None = None,
        **params,
    ) -> None:
        params = {"max_tokens": 10, "seed": 1} | params
        request = GenerationRequest(
            key=key, prompt_ids=prompt_ids or list(key.encode()), params=SamplingParams(**params)
        )
        self.ends[key] = threading.Event()
        self.accepted[key] = self.service.submit(request, self._take, arrived_at)

    def cancel(self, key: str) -> None:
        self.accepted[key].cancel()

    def _take(self, chunk) -> None:
        self.chunks[chunk.key].append(chunk)
        if chunk.is_final:
            assert not self.ends[chunk.key].is_set(), "answered twice"
            self.ends[chunk.key].set()

    def wait(self, key: str):
        assert self.ends[key].wait(WAIT_S), f"{key} hangs"
        return self.chunks[key]


def make_service(executor: EchoExecutor, prompt_index=None, **args) -> EngineService:
    service = EngineService(
        executor,
        EngineArgs(model="echo"),
        SchedulerArgs(**args),
        byte_tokenizer(),
        log=lambda line: None,
        prompt_index=prompt_index,
    )
    service.start()
    return service


def wait_until_up(service: EngineService) -> None:
    eventually(lambda: service.metrics.gauges["charonia_engine_up", ""], "the service is up")


@pytest.fixture
def service():
    service = make_service(EchoExecutor(num_blocks=NUM_BLOCKS))
    wait_until_up(service)
    yield service
    service.close()


def test_many_threads_are_served_at_once(service):
    client = Client(service)

    def one(index: int) -> None:
        key = f"request {index}"
        client.submit(key)
        client.wait(key)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(100)))
    for index in range(100):
        key = f"request {index}"
        tokens = [t for chunk in client.chunks[key] for t in chunk.token_ids]
        assert tokens == echo_run(list(key.encode()), seed=1, max_tokens=10, vocab_size=256)


def test_a_cancelled_request_ends_once_and_with_an_error(service):
    client = Client(service)
    client.submit("a", max_tokens=FOR_EVER)
    client.cancel("a")
    assert client.wait("a")[-1].error.code == "CANCELLED"


def test_before_the_engine_is_ready_requests_are_refused_at_once():
    class Late(EchoExecutor):
        def info(self):
            raise EngineUnloadedError("loading")

    service = make_service(Late())
    with pytest.raises(UnavailableError, match="not ready yet"):
        Client(service).submit("a")
    with pytest.raises(UnavailableError, match="not ready yet"):
        _ = service.info
    assert service.metrics.counters["charonia_rejections_total", "engine_down"] == 1
    service.close()


def test_a_service_that_never_started_lets_go_of_its_engine():
    executor = EchoExecutor()
    service = EngineService(
        executor, EngineArgs(model="echo"), SchedulerArgs(), byte_tokenizer(), log=print
    )
    service.close()
    assert not executor.is_alive


class Gated(EchoExecutor):
    """Makes its steps when it may."""

    def __init__(self, **size: int) -> None:
        super().__init__(**size)
        self.is_asked = threading.Event()
        self.may_step = threading.Event()

    def execute(self, plan):
        self.is_asked.set()
        assert self.may_step.wait(WAIT_S)
        return super().execute(plan)


def test_a_key_that_is_live_is_refused_and_its_request_goes_on():
    executor = Gated()
    service = make_service(executor)
    wait_until_up(service)
    client = Client(service)
    client.submit("a")
    other = Client(service)
    other.submit("a")
    assert "live request" in str(other.wait("a")[-1].error)
    executor.may_step.set()
    assert client.wait("a")[-1].finish_reason == "length"
    service.close()


def test_log_and_record_follow_a_request_and_its_chunks_pass(tmp_path):
    executor, lines = Gated(), []
    service = EngineService(
        executor,
        EngineArgs(model="echo"),
        SchedulerArgs(record_dir=str(tmp_path)),
        byte_tokenizer(),
        log=lambda line: None,
        request_log=RequestLog(Log(lines.append, lambda: "debug")),
    )
    service.start()
    wait_until_up(service)
    client = Client(service)
    client.submit("a")
    service.drain()
    with pytest.raises(ShuttingDownError):  # the log still follows the first one
        Client(service).submit("b")
    executor.may_step.set()
    chunks = client.wait("a")
    assert sum(len(chunk.token_ids) for chunk in chunks) == 10
    service.close()
    assert sorted(line.split()[0] for line in lines) == [
        "request_ended",
        "request_first_token",
        "request_received",
        "request_received",
        "request_refused",
        "request_started",
    ]
    first, second = read_requests(tmp_path / REQUESTS)
    assert (first.outcome, first.output_length) == ("length", 10)
    assert second.outcome == "shutting_down"


def test_a_full_queue_is_refused_at_once():
    executor = Gated(max_num_seqs=2)
    service = make_service(executor, max_queue_size=3)
    wait_until_up(service)
    client = Client(service)
    for index in range(5):
        client.submit(f"r{index}", max_tokens=50)
    with pytest.raises(QueueFullError):
        client.submit("one too many")
    executor.may_step.set()
    assert service.metrics.counters["charonia_rejections_total", "queue_full"] == 1
    for index in range(5):
        assert client.wait(f"r{index}")[-1].finish_reason == "length"
    service.close()


def test_what_a_tenant_may_have_is_counted_from_coming_to_end(tmp_path):
    tenants = tmp_path / "tenants.json"
    tenants.write_text('{"tenants": {"a": {"max_concurrency": 2, "max_queue_size": 1}}}')
    executor = Gated(max_num_seqs=8)
    service = make_service(executor, tenants_file=str(tenants))
    wait_until_up(service)
    client = Client(service)
    client.submit("first", tenant="a")
    assert executor.is_asked.wait(WAIT_S)
    client.submit("second", tenant="a")
    with pytest.raises(RateLimitedError):
        client.submit("third", tenant="a")
    assert service.metrics.counters["charonia_rejections_total", "rate_limited"] == 1
    executor.may_step.set()
    for key in ("first", "second"):
        assert client.wait(key)[-1].finish_reason == "length"
    client.submit("third", tenant="a")
    assert client.wait("third")[-1].finish_reason == "length"
    service.close()


def test_whom_a_full_queue_refuses_has_missed_its_targets(tmp_path):
    tenants = tmp_path / "tenants.json"
    own = {"max_queue_size": 1, "ttft_target_ms": 1e6}
    targets = {"a": {"ttft_target_ms": 1e6}, "own": own}
    tenants.write_text(json.dumps({"tenants": targets}))
    executor = Gated(max_num_seqs=1)
    service = make_service(executor, tenants_file=str(tenants), max_queue_size=2)
    wait_until_up(service)
    client = Client(service)
    client.submit("first", tenant="a")
    assert executor.is_asked.wait(WAIT_S)
    client.submit("second", tenant="own")
    with pytest.raises(QueueFullError, match="of tenant 'own'"):
        client.submit("third", tenant="own", deadline_ms=10**6)
    client.submit("fourth", tenant="a")
    with pytest.raises(QueueFullError, match="Maximum queue size of 2 is"):
        client.submit("fifth", tenant="a", deadline_ms=10**6)
    executor.may_step.set()
    for key in ("first", "second", "fourth"):
        assert client.wait(key)[-1].finish_reason == "length"
    service.close()
    counters = service.metrics.counters
    for kind in ("tenant_queue_full", "queue_full"):
        assert counters["charonia_rejections_total", kind] == 1, kind
    for metric, tenant, num in (
        ("ttft_target_met", "a", 2),
        ("ttft_target_missed", "a", 1),
        ("deadline_missed", "a", 1),
        ("ttft_target_met", "own", 1),
        ("ttft_target_missed", "own", 0),
        ("deadline_missed", "own", 0),
    ):
        assert counters[f"charonia_{metric}_total", tenant] == num, (metric, tenant)


@pytest.mark.parametrize(
    ("kind", "num_missed"),
    [
        *[(kind, 1) for kind in ("queue_full", "late", "overloaded", "timeout", "internal")],
        *[(kind, 1) for kind in ("engine_down", "shutting_down", "unavailable")],
        *[(kind, 0) for kind in ("rate_limited", "invalid_request", "prompt_too_long")],
        *[(kind, 0) for kind in ("not_supported", "cancelled", "tenant_queue_full")],
    ],
)
def test_a_refusal_is_a_missed_deadline_unless_it_is_the_clients_own_doing(kind, num_missed):
    service = make_service(EchoExecutor())
    service.count_rejection(error_of("no", kind), SamplingParams(deadline_ms=1000))
    service.close()
    assert service.metrics.counters["charonia_deadline_missed_total", "other"] == num_missed


@pytest.mark.parametrize(
    ("kind", "num"),
    [
        *[(kind, 1) for kind in ("queue_full", "rate_limited", "overloaded", "late", "timeout")],
        *[(kind, 1) for kind in ("engine_down", "shutting_down", "unavailable")],
        ("tenant_queue_full", 1),
        *[(kind, 0) for kind in ("invalid_request", "prompt_too_long", "not_supported")],
    ],
)
def test_an_invalid_request_does_not_count_as_a_refusal_of_its_tenant(kind, num):
    service = make_service(EchoExecutor())
    service.count_rejection(error_of("no", kind), SamplingParams(tenant="a"))
    service.close()
    counters = service.metrics.counters
    assert counters["charonia_tenant_rejections_total", "other"] == num
    assert counters["charonia_rejections_total", kind if num else "invalid"] == 1


def test_who_would_be_late_is_counted_as_that():
    service = make_service(Gated(max_num_seqs=1))
    service.count_rejection(LateRequestError("it would wait", retry_after_s=1.5))
    service.count_rejection(UnavailableError("it is down"))
    rejections = service.metrics.counters
    assert rejections["charonia_rejections_total", "late"] == 1
    assert rejections["charonia_rejections_total", "unavailable"] == 1
    service.close()


def test_a_service_that_is_drained_finishes_what_it_has_and_takes_nothing_but_probes():
    executor = Gated(max_num_seqs=8)
    service = make_service(executor)
    wait_until_up(service)
    client = Client(service)
    client.submit("first")
    came_at = time.monotonic()
    assert service.drain() == 1
    with pytest.raises(ShuttingDownError):
        client.submit("second")
    client.submit("before", arrived_at=came_at)
    probe = GenerationRequest(
        key="probe", prompt_ids=[1], params=SamplingParams(max_tokens=1), is_probe=True
    )
    probed = threading.Event()
    service.submit(probe, lambda chunk: probed.set())
    executor.may_step.set()
    for key in ("first", "before"):
        assert client.wait(key)[-1].finish_reason == "length"
    assert probed.wait(WAIT_S)
    assert service.drain() == 0
    service.close()


def test_the_oldest_are_those_that_came_first_and_are_still_there():
    executor = Gated(max_num_seqs=16, num_blocks=NUM_BLOCKS)
    service = make_service(executor)
    wait_until_up(service)
    client, now = Client(service), time.monotonic()
    assert service.oldest_s(5) == []
    for number in range(8):
        client.submit(f"a{number}", arrived_at=now - 1000 * (10 - number), max_tokens=FOR_EVER)
    client.submit("b", arrived_at=now - 12_000, max_tokens=FOR_EVER)  # it was tokenized for long
    probe = GenerationRequest(key="probe", prompt_ids=[1], is_probe=True)
    service.submit(probe, lambda chunk: None, now - 20_000)

    def ages(count: int) -> list[int]:
        return [round(age_s / 1000) for age_s in service.oldest_s(count)]

    assert ages(3) == [10, 9, 8]
    executor.may_step.set()
    for number in range(6):
        client.cancel(f"a{number}")
        client.wait(f"a{number}")
    assert ages(5) == [12, 4, 3]
    service.close()
    assert ages(5) == []


def test_the_queue_takes_no_more_while_those_that_were_accepted_are_on_their_way(monkeypatch):
    service = make_service(EchoExecutor(max_num_seqs=2), max_queue_size=3)
    wait_until_up(service)
    client = Client(service)
    add = service._core.add
    is_taken = {key: threading.Event() for key in ("first", "second")}
    may_go_on = {key: threading.Event() for key in ("first", "second")}

    def add_slowly(request, events, arrived_at):
        if request.key in is_taken:
            is_taken[request.key].set()
            assert may_go_on[request.key].wait(WAIT_S)
        return add(request, events, arrived_at)

    monkeypatch.setattr(service._core, "add", add_slowly)
    client.submit("first")
    assert is_taken["first"].wait(WAIT_S)
    others = ("second", "third", "fourth", "fifth")
    for key in others:
        client.submit(key)
    may_go_on["first"].set()
    assert is_taken["second"].wait(WAIT_S)
    with pytest.raises(QueueFullError):
        client.submit("sixth")
    may_go_on["second"].set()
    for key in others:
        assert client.wait(key)[-1].finish_reason == "length"
    service.close()


def test_closing_answers_what_is_live(service):
    client = Client(service)
    client.submit("a", max_tokens=FOR_EVER)
    service.close()
    assert "shutting down" in str(client.wait("a")[-1].error)
    with pytest.raises(UnavailableError, match="shutting down"):
        client.submit("b")


def test_a_bug_in_a_step_fails_the_live_requests_and_the_service_goes_on():
    class Buggy(EchoExecutor):
        def execute(self, plan):
            if self.num_steps == 5:
                self.num_steps += 1
                raise KeyError("a bug")
            return super().execute(plan)

    service = make_service(Buggy())
    wait_until_up(service)
    client = Client(service)
    client.submit("a", max_tokens=100)
    assert str(client.wait("a")[-1].error) == "internal error: KeyError"
    wait_until_up(service)
    client.submit("b")
    assert client.wait("b")[-1].finish_reason == "length"
    service.close()


def test_a_bug_on_the_way_in_loses_nobody(service, monkeypatch):
    """One request cannot even be taken in; those that came with it must be answered as well."""
    client = Client(service)
    add = service._core.add
    has_all, may_go_on = threading.Event(), threading.Event()

    def add_or_raise(request, events, arrived_at):
        if request.key == "first":
            has_all.set()
            assert may_go_on.wait(WAIT_S)
        if request.key == "bad":
            raise KeyError("a bug")
        return add(request, events, arrived_at)

    monkeypatch.setattr(service._core, "add", add_or_raise)
    client.submit("first")
    assert has_all.wait(WAIT_S)
    for key in ("good", "bad", "after"):
        client.submit(key)
    may_go_on.set()
    for key in ("first", "good", "bad", "after"):
        last = client.wait(key)[-1]
        assert last.finish_reason == "length" or "KeyError" in str(last.error)
    assert str(client.chunks["bad"][-1].error) == "internal error: KeyError"
    wait_until_up(service)
    client.submit("next")
    assert client.wait("next")[-1].finish_reason == "length"


def order(*, drain: bool = False) -> Reload:
    return Reload(Unchanged(), drain=drain)


def wait_over(reload: Reload) -> None:
    eventually(lambda: reload.is_over, "the reload is over")


def test_an_order_that_a_bug_hinders_fails_and_the_next_is_carried_out(service, monkeypatch):
    client = Client(service)
    add = service._core.add
    is_in_bug, may_go_on = threading.Event(), threading.Event()

    def add_and_raise(request, events, arrived_at):
        is_in_bug.set()
        assert may_go_on.wait(WAIT_S)
        raise KeyError("a bug")

    monkeypatch.setattr(service._core, "add", add_and_raise)
    client.submit("a")
    assert is_in_bug.wait(WAIT_S)
    lost, refused = order(), order()
    service.reload(lost)
    service.reload(refused)
    assert (refused.phase, refused.reason) == ("failed", "another reload is under way")
    monkeypatch.setattr(service._core, "add", add)
    may_go_on.set()
    wait_over(lost)
    assert (lost.phase, lost.reason) == ("failed", "internal error: KeyError")
    wait_until_up(service)
    after = order()
    service.reload(after)
    wait_over(after)
    assert after.phase == "done"


def test_an_order_that_comes_while_a_bug_is_dealt_with_is_carried_out(service, monkeypatch):
    client = Client(service)
    abandon, late = service._core.abandon, order()

    def abandon_and_be_ordered(error):
        monkeypatch.setattr(service._core, "abandon", abandon)
        abandon(error)
        service.reload(late)

    monkeypatch.setattr(service._core, "abandon", abandon_and_be_ordered)
    monkeypatch.setattr(service._core, "add", lambda request, events, arrived_at: {}["a bug"])
    client.submit("a")
    assert str(client.wait("a")[-1].error) == "internal error: KeyError"
    wait_over(late)
    assert late.phase == "done"


def test_an_order_that_waits_when_the_service_closes_fails(service):
    client = Client(service)
    client.submit("a", max_tokens=FOR_EVER)
    waiting, late = order(drain=True), order()
    service.reload(waiting)
    service.close()
    service.reload(late)
    assert [waiting.reason, late.reason] == ["the server is shutting down"] * 2


def test_a_request_that_comes_while_the_engine_is_restarted_waits_for_the_new_one():
    is_restarting, may_go_on = threading.Event(), threading.Event()

    class Dying(EchoExecutor):
        def open(self, *, replace, on_done):
            opening = EngineOpening(self._replace if replace else self.info)
            opening.start(on_done)
            return opening

        def _replace(self):
            is_restarting.set()
            assert may_go_on.wait(WAIT_S)
            self.restart()
            return self.info()

    executor = Dying()
    service = make_service(executor)
    wait_until_up(service)
    client = Client(service)
    executor.die_next = 1
    client.submit("a")
    assert is_restarting.wait(WAIT_S)
    assert service.metrics.gauges["charonia_engine_up", ""] == 0
    client.submit("b")
    client.submit("late", deadline_ms=50)
    client.submit("leaves")
    client.cancel("leaves")
    assert str(client.wait("late")[-1].error) == "deadline_ms has passed"
    assert client.wait("leaves")[-1].error.code == "CANCELLED"
    may_go_on.set()
    for key in "ab":
        assert client.wait(key)[-1].finish_reason == "length"
    service.close()


def test_an_engine_that_is_lost_while_nothing_runs_is_replaced_before_a_request_comes(service):
    executor = service._core._replica._executor
    executor.is_alive = False
    eventually(lambda: executor.num_restarts, "it is replaced")
    assert executor.num_restarts == 1
    wait_until_up(service)


@pytest.mark.parametrize("cache_bytes", [None, 2**20], ids=["computed", "shared"])
def test_nothing_of_a_request_that_ended_waits_for_the_garbage_collector(cache_bytes):
    kinds = (AcceptedRequest, LiveRequest, Subscriber, SharedComputation, Request)

    def left() -> list[str]:
        return [type(one).__name__ for one in gc.get_objects() if type(one) in kinds]

    service = make_service(EchoExecutor(num_blocks=NUM_BLOCKS), answer_cache_bytes=cache_bytes)
    wait_until_up(service)
    ends = threading.Semaphore(0)

    def submit(key: str, **params) -> AcceptedRequest:
        request = GenerationRequest(
            key=key, prompt_ids=[1, 2, 3], params=SamplingParams(seed=1, **params)
        )
        return service.submit(request, lambda chunk: ends.release() if chunk.is_final else None)

    gc.collect()
    gc.disable()
    try:
        before = left()
        for key in "abc":  # with a cache, the second one joins or gets what was kept
            submit(key, max_tokens=10, n=2)
        submit("leaves", max_tokens=FOR_EVER).cancel()
        submit("late", max_tokens=FOR_EVER, deadline_ms=20)
        for _ in range(5):
            assert ends.acquire(timeout=WAIT_S)
        eventually(lambda: left() == before)
    finally:
        gc.enable()
    service.close()
