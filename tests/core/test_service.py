"""The service under many threads: every request is answered once, whoever comes and goes."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import Request
from charonia.core.accepted_request import AcceptedRequest
from charonia.core.answers.shared_computation import SharedComputation, Subscriber
from charonia.core.generation_request import GenerationRequest
from charonia.core.recording.recorder import REQUESTS
from charonia.core.request_log import RequestLog
from charonia.core.request_registry import LiveRequest
from charonia.core.service import EngineService
from charonia.errors import (
    EngineUnloadedError,
    ShuttingDownError,
    UnavailableError,
)
from charonia.events import Log
from charonia.protocol import SamplingParams
from charonia.traces import read_requests
from core.bench import byte_tokenizer
from core.service_bench import FOR_EVER, NUM_BLOCKS, Client, Gated, make_service, wait_until_up
from support.echo import EchoExecutor, echo_run
from support.waiting import WAIT_S, eventually


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


def test_closing_answers_what_is_live(service):
    client = Client(service)
    client.submit("a", max_tokens=FOR_EVER)
    service.close()
    assert "shutting down" in str(client.wait("a")[-1].error)
    with pytest.raises(UnavailableError, match="shutting down"):
        client.submit("b")


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
