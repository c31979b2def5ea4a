"""A probe is answered at once, has a token made when none came lately, and is nobody's request."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from charonia.config import EngineArgs, SchedulerArgs
from charonia.core.generation_request import GenerationRequest
from charonia.core.service import EngineService
from charonia.errors import EngineDiedError
from charonia.protocol import EngineInfo, SamplingParams, StepPlan, StepResult
from charonia.serving.requests.probing import TOKEN_INTERVAL_S, Prober
from core.bench import byte_tokenizer
from support.echo import EchoExecutor
from support.waiting import WAIT_S, eventually

NAMES = {"engine_up", "reason", "step_age_s", "turn_age_s", "max_model_len", "load"}


class Gated(EchoExecutor):
    """An engine whose steps wait until they may go on."""

    def __init__(self) -> None:
        super().__init__(max_num_seqs=1)
        self.may_step = threading.Event()
        self.may_step.set()
        self.num_begun = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_begun += 1
        assert self.may_step.wait(WAIT_S)
        return super().execute(plan)


@pytest.fixture
def engine() -> Gated:
    return Gated()


@pytest.fixture
def service(engine: Gated) -> Iterator[EngineService]:
    service = serving(engine)
    yield service
    engine.may_step.set()
    service.close()


def serving(engine: EchoExecutor, wait_s: float = WAIT_S) -> EngineService:
    args = EngineArgs(model="echo")
    queue = SchedulerArgs(max_queue_size=1)
    service = EngineService(engine, args, queue, byte_tokenizer(), log=lambda line: None)
    service.start(wait_s=wait_s)
    return service


def ask(prober: Prober) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(prober.answer())
    assert answer.keys() == NAMES
    return answer


def wait_fresh(prober: Prober) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        answer = ask(prober)
        if answer["step_age_s"] is not None and answer["step_age_s"] <= TOKEN_INTERVAL_S:
            return answer
        time.sleep(0.01)
    raise AssertionError("no step")


def wait_idle(service: EngineService) -> None:
    eventually(lambda: not service.state.num_live)


def counted(service: EngineService) -> dict[Any, float]:
    """What is counted of requests."""
    return {
        series: value
        for series, value in service.metrics.counters.items()
        if value and "step_phase" not in series[0]
    }


def test_an_idle_engine_makes_one_token_for_many_probes(
    engine: Gated, service: EngineService
) -> None:
    since_step_s = 0.5 * TOKEN_INTERVAL_S
    prober = Prober(
        service, byte_tokenizer(), lambda: (service.state.last_step_at or 0.0) + since_step_s
    )
    first = ask(prober)
    assert first["step_age_s"] is None
    assert first["max_model_len"] == service.limits.max_model_len
    wait_idle(service)
    for _ in range(20):
        assert ask(prober)["step_age_s"] == pytest.approx(since_step_s)
    assert engine.num_begun == 1
    since_step_s = 1.5 * TOKEN_INTERVAL_S
    engine.may_step.clear()
    for _ in range(20):  # the first of them has one made
        ask(prober)
    engine.may_step.set()
    wait_idle(service)
    assert engine.num_begun == 2


def test_a_probe_is_in_no_metric_of_requests(service: EngineService) -> None:
    prober = Prober(service, byte_tokenizer())
    ask(prober)
    wait_fresh(prober)
    wait_idle(service)
    assert counted(service) == {}
    assert service.metrics.drain() == {}


class Permitted(EchoExecutor):
    """An engine of one row that runs as many steps as it is permitted."""

    def __init__(self) -> None:
        super().__init__(max_num_seqs=1)
        self.permits = threading.Semaphore(0)

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.permits.acquire(timeout=WAIT_S)
        return super().execute(plan)


def test_a_probe_tells_the_load_and_what_was_done() -> None:
    engine = Permitted()
    service = serving(engine)
    prober = Prober(service, byte_tokenizer())
    assert prober.load()["num_running"] == 0
    ends = [threading.Event() for _ in range(2)]
    for index, end in enumerate(ends):
        request = GenerationRequest(
            key=str(index), prompt_ids=[1, 2, 3], params=SamplingParams(max_tokens=4)
        )
        service.submit(request, lambda chunk, end=end: end.set() if chunk.is_final else None)
    engine.permits.release(2)  # both are known at the end of the second step

    def is_known() -> bool:
        """Whether the second step has been noted: the queue is counted before the blocks are."""
        load = prober.load()
        return load["num_waiting"] == 1 and load["kv_blocks_used"] > 0

    eventually(is_known)
    load = ask(prober)["load"]
    assert load["num_running"] == 1
    assert load["kv_blocks_total"] == service.info.num_blocks - 1
    assert 0 <= load["engine_age_s"] < WAIT_S
    engine.permits.release(100)
    assert all(end.wait(WAIT_S) for end in ends)
    eventually(lambda: not prober.load()["num_running"])
    load = prober.load()
    assert (load["num_waiting"], load["kv_blocks_used"]) == (0, 0)
    assert (load["prompt_tokens"], load["generation_tokens"]) == (6, 8)
    queried = service.metrics.counters["charonia_prefix_cache_queried_tokens_total", ""]
    assert load["cache_queried_tokens"] == queried
    service.close()


def test_a_probe_is_answered_while_the_queue_is_full_and_an_engine_hangs(
    engine: Gated, service: EngineService
) -> None:
    prober = Prober(service, byte_tokenizer())
    engine.may_step.clear()
    params = SamplingParams(max_tokens=5)
    ends = [threading.Event() for _ in range(2)]
    for index, end in enumerate(ends):
        request = GenerationRequest(key=str(index), prompt_ids=[1, 2], params=params)
        service.submit(request, lambda chunk, end=end: end.set() if chunk.is_final else None)
    answer = ask(prober)
    assert answer["engine_up"]
    assert answer["step_age_s"] is None
    assert ("charonia_rejections_total", "queue_full") not in counted(service)
    engine.may_step.set()
    assert all(end.wait(WAIT_S) for end in ends)
    assert wait_fresh(prober)["step_age_s"] is not None


def test_a_probe_says_why_there_is_no_engine() -> None:
    class Lost(EchoExecutor):
        def info(self) -> EngineInfo:
            raise EngineDiedError("no weights")

    service = serving(Lost(), wait_s=0.5)
    answer = ask(Prober(service, byte_tokenizer()))
    assert not answer["engine_up"]
    assert "engine" in answer["reason"]
    assert answer["max_model_len"] is None
    assert answer["step_age_s"] is None
    assert counted(service).keys() <= {("charonia_engine_failures_total", "load_failed")}
    service.close()


def test_a_thread_that_is_held_up_shows_it(engine: Gated, service: EngineService) -> None:
    prober = Prober(service, byte_tokenizer())
    engine.may_step.clear()
    ask(prober)
    deadline = time.monotonic() + WAIT_S
    while ask(prober)["turn_age_s"] < 0.3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ask(prober)["turn_age_s"] >= 0.3
