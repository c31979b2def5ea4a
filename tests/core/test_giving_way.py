"""On a full queue the request that ranks last gives way to one that ranks before it."""

import json
from functools import partial

import pytest

from charonia.config import EngineArgs, SchedulerArgs
from charonia.core.gate.tenants import Tenants
from charonia.core.generation_request import GenerationRequest
from charonia.core.recording.recorder import REQUESTS
from charonia.core.service import EngineService
from charonia.errors import LateRequestError, QueueFullError
from charonia.protocol import SamplingParams
from charonia.traces import read_requests
from core.answer_bench import AnswerBench
from core.bench import byte_tokenizer
from core.service_bench import Client, Gated, wait_until_up
from core.test_gate import KeyedGate
from support.echo import EchoExecutor
from support.waiting import WAIT_S

SIZE = 4


class Door:
    """A gate before a queue of `SIZE`, which starts nobody."""

    def __init__(self, policy: str = "fcfs", tenants: Tenants | None = None, **args) -> None:
        self.now = 0.0
        scheduler_args = SchedulerArgs(**{"max_queue_size": SIZE, "priority_aging_s": 0.0} | args)
        tenants = tenants or Tenants(log=print)
        self.gate = KeyedGate(tenants, scheduler_args, clock=lambda: self.now)
        self.gate.follow(EngineArgs(model="echo", scheduling_policy=policy))
        self.keys: list[str] = []

    def enter(self, key: str, num_tokens: int = 1, **params) -> str | None:
        """Who gives way; the request's tenant is its key's first letter."""
        self.now += 0.001
        params = SamplingParams(tenant=key[0], **params)
        request = GenerationRequest(key=key, prompt_ids=[0] * num_tokens, params=params)
        leaver = self.gate.enter(request, num_queued=len(self.keys))
        self.keys.append(key)
        if leaver is None:
            return None
        entry, error = leaver
        assert entry.is_leaving
        assert error.is_retryable
        assert "gives way" in str(error)
        self.leave(entry.key)
        assert not entry.is_leaving
        return entry.key

    def leave(self, key: str) -> None:
        self.keys.remove(key)
        self.gate.leave(key)

    def is_refused(self, key: str, **params) -> bool:
        before = self.waiting()
        try:
            self.enter(key, **params)
        except QueueFullError:
            assert (self.waiting(), self.gate.num_live) == (before, len(self.keys))
            return True
        return False

    def waiting(self) -> dict[str, list[str]]:
        """Keys of those that wait, in order, by tenant."""
        lines = self.gate._order._lines
        return {tenant: [entry.key for entry in line] for tenant, line in lines.items()}


def test_by_arrival_nobody_gives_way_to_the_same_tenant():
    door = Door()
    for number in range(SIZE):
        assert door.enter(f"a{number}") is None
    assert door.is_refused("a9")


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline"])
def test_no_tenant_keeps_others_out_of_the_queue(policy: str):
    door = Door(policy)
    for number in range(SIZE):
        door.enter(f"a{number}")
    assert door.enter("b1") == "a3"
    assert door.enter("b2") == "a2"
    assert door.is_refused("b3"), "they have as many"
    assert door.enter("c1") == "b2"
    assert door.enter("d1") == "a1"
    assert door.is_refused("e1"), "all have one"


def test_a_tenant_gets_its_place_from_the_least_urgent_of_the_one_with_the_most():
    door = Door("priority")
    for key, priority in (("a1", -3), ("a2", -1), ("a3", -2), ("b1", 5)):
        door.enter(key, priority=priority)
    assert door.enter("c1", priority=9) == "a2"
    assert door.enter("a4", priority=0) == "c1", "with as many as others, the rank decides"
    assert door.enter("a5", priority=0) == "b1"


def test_by_priority_the_last_of_the_least_urgent_gives_way():
    door = Door("priority")
    for number, priority in enumerate([0, 5, 5, -1]):
        door.enter(f"a{number}", priority=priority)
    assert door.is_refused("ab0", priority=5)
    assert door.enter("ab1", priority=4) == "a2"
    assert door.enter("ab2", priority=-5) == "a1"
    assert door.enter("ab3", priority=-5) == "ab1"
    assert door.enter("ab4", priority=-5) == "a0"
    assert door.is_refused("ab5", priority=-1)
    assert door.enter("ab6", priority=-2) == "a3"


def test_whom_aging_has_brought_before_it_gives_way_to_nobody():
    door = Door("priority", priority_aging_s=10.0)
    for number in range(SIZE):
        door.enter(f"a{number}", priority=2)
    door.now += 10.0
    assert door.enter("ab1", priority=0) == "a3"
    door.now += 10.0
    assert door.is_refused("ab2", priority=0)


def test_by_deadlines_the_latest_gives_way_and_first_those_without_one():
    door = Door("deadline")
    for number, deadline_ms in enumerate([60_000, None, None, 10_000]):
        door.enter(f"a{number}", deadline_ms=deadline_ms)
    assert door.is_refused("ab0")
    gone = [door.enter(f"ab{number}", deadline_ms=1000) for number in range(SIZE)]
    assert gone == ["a2", "a1", "a0", "a3"]
    assert door.is_refused("ab9", deadline_ms=2000)


def test_with_another_engine_another_order_holds():
    door = Door("priority")
    for number in range(SIZE):
        door.enter(f"a{number}", priority=SIZE - number, deadline_ms=1000 * (number + 1))
    door.gate.follow(EngineArgs(model="echo", scheduling_policy="deadline"))
    assert door.enter("ab1", deadline_ms=10) == f"a{SIZE - 1}"


def test_with_shares_a_tenant_cannot_keep_others_out():
    door = Door(fair_share=True)
    for number in range(SIZE):
        door.enter(f"a{number}")
    assert door.is_refused("a9")
    assert door.enter("b1") == "a3"
    assert door.enter("b2") == "a2"
    assert door.is_refused("b3"), "they have as many"
    assert door.is_refused("a9")
    assert door.enter("c1") == "b2"
    assert door.is_refused("b3"), "it would have more than any other again"
    assert door.enter("d1") == "a1"
    assert door.is_refused("e1"), "all have one"


def test_shares_are_by_weight(tmp_path):
    file = tmp_path / "tenants.json"
    file.write_text(json.dumps({"tenants": {"a": {"weight": 3}}}))
    tenants = Tenants(file, has_shares=True, log=print)
    door = Door(tenants=tenants, fair_share=True, max_queue_size=8)
    for number in range(8):
        door.enter(f"a{number}")
    assert [door.enter("b1"), door.enter("b2")] == ["a7", "a6"]
    assert door.is_refused("b3")
    assert door.is_refused("a9")


def test_with_shares_ranks_hold_among_the_requests_of_a_tenant():
    door = Door("priority", fair_share=True)
    for key, priority in (("a1", 5), ("a2", 1), ("b1", 9), ("b2", 0)):
        door.enter(key, priority=priority)
    assert door.enter("b3", priority=-9) == "b1"
    assert door.is_refused("b4", priority=0)
    assert door.enter("c1", priority=99) == "b2", "the last of one that has the most"
    assert door.enter("a3", priority=-1) == "a1"


def test_a_request_that_has_started_or_shares_a_computation_gives_way_to_nobody():
    door = Door("priority", max_queue_size=3)
    for key in ("a1", "a2", "a3"):
        door.enter(key, priority=9)
    door.gate.note_started("a3")
    door.gate.note_joined("a2")
    assert door.enter("b1") == "a1"
    assert door.is_refused("b2", priority=0)


def test_who_is_refused_for_another_reason_takes_nobodys_place(tmp_path):
    file = tmp_path / "tenants.json"
    file.write_text(json.dumps({"tenants": {"b": {"max_queue_size": 1}}}))
    door = Door("priority", Tenants(file, log=print))
    door.enter("b1")
    for number in range(3):
        door.enter(f"a{number}", priority=9)
    assert door.is_refused("b2")
    assert door.enter("c1") == "a2"
    door.now += 60.0
    with pytest.raises(LateRequestError):
        door.enter("c2", deadline_ms=10)
    assert not door.gate._num_leaving


def test_one_that_gives_way_makes_room_for_a_prompt_that_is_no_longer():
    door = Door("priority", max_queue_tokens=100)
    door.enter("a1", num_tokens=60, priority=1)
    door.enter("a2", num_tokens=40, priority=2)
    assert door.is_refused("ab1", num_tokens=41)
    assert door.is_refused("ab1", num_tokens=10, priority=2)
    assert door.enter("ab1", num_tokens=40) == "a2"


def test_who_gives_way_is_told_how_long_it_would_wait():
    door = Door("priority", max_queue_size=10)
    for number in range(8):  # each waits for a second
        door.enter(f"a{number}", num_tokens=10)
        door.now += 0.999
        door.gate.note_started(f"a{number}")
        door.leave(f"a{number}")
    for number in range(10):
        door.enter(f"b{number}", num_tokens=10, priority=number // 9)
    request = GenerationRequest(
        key="c", prompt_ids=[0] * 10, params=SamplingParams(tenant="c", priority=-1)
    )
    entry, error = door.gate.enter(request, num_queued=10)
    assert entry.key == "b9"
    assert str(error).startswith("Exceeds maximum queue size: the request gives way to one that")
    seconds = float(str(error).partition("try again later; retry after ")[2].removesuffix(" s"))
    assert seconds == pytest.approx(10.0, abs=0.1)  # nine others, and the one that came


def test_one_that_is_to_leave_counts_no_more_and_is_not_chosen_twice():
    door = Door("priority", max_queue_size=2)
    for key in ("a1", "a2"):
        door.enter(key, priority=9)
    params = SamplingParams(tenant="b")
    gate, leavers = door.gate, []
    for number in range(2):
        request = GenerationRequest(key=f"b{number}", prompt_ids=[0], params=params)
        leavers.append(gate.enter(request, num_queued=2 + number).entry.key)
    assert leavers == ["a2", "a1"]
    request = GenerationRequest(key="b2", prompt_ids=[0], params=params)
    with pytest.raises(QueueFullError):
        gate.enter(request, num_queued=4)
    gate.note_started("a2")  # its step had begun when it was chosen
    assert [gate.is_leaving(key) for key in ("a2", "a1")] == [False, True]
    assert gate.num_of_tenants()["other"] == (2, 2)
    for key in ("a1", "a2", "b0", "b1"):
        gate.leave(key)
    assert gate.num_live == 0
    assert (gate._num_leaving, gate._order._lines) == (0, {})


def test_with_shares_nothing_is_kept_of_tenants_that_have_left():
    door = Door(fair_share=True)
    for key in ("a1", "a2", "b1"):
        door.enter(key)
    for key in ("a1", "b1", "a2"):
        door.leave(key)
    order = door.gate._order
    assert (order._lines, order._shares, order._by_share) == ({}, {}, [])


# ---------------------------------------------------------------------- in the service


def make_service(executor: EchoExecutor, policy: str, **args) -> EngineService:
    """A service whose queue has two places."""
    engine_args = EngineArgs(model="echo", scheduling_policy=policy)
    scheduler_args = SchedulerArgs(max_queue_size=2, **args)
    service = EngineService(
        executor, engine_args, scheduler_args, byte_tokenizer(), log=lambda line: None
    )
    service.start()
    wait_until_up(service)
    return service


def fill(service: EngineService, executor: Gated, client: Client, **params) -> None:
    """Have one request run until it may go on, and two wait."""
    client.submit("runs", **params)
    assert executor.is_asked.wait(WAIT_S)
    for key in ("first", "last"):
        client.submit(key, **params)


def end(service: EngineService, executor: Gated, client: Client, *keys: str) -> None:
    """Let all end, of which nothing is to be left."""
    executor.may_step.set()
    for key in keys:
        assert client.wait(key)[-1].finish_reason == "length"
    assert service.drain() == 0
    service.close()
    assert service.state.num_live == 0
    assert service.metrics.gauges["charonia_kv_blocks", "used"] == 0


def test_who_gives_way_ends_with_the_error_of_a_full_queue_and_leaves_nothing(tmp_path):
    executor = Gated(max_num_seqs=1)
    service = make_service(executor, "priority", record_dir=str(tmp_path))
    client = Client(service)
    fill(service, executor, client, priority=5)
    client.submit("urgent")
    with pytest.raises(QueueFullError):
        client.submit("too much", priority=5)
    end(service, executor, client, "runs", "first", "urgent")
    assert isinstance(client.wait("last")[-1].error, QueueFullError)
    counters = service.metrics.counters
    assert counters["charonia_finished_total", "queue_full"] == 1
    assert counters["charonia_rejections_total", "queue_full"] == 1
    assert counters["charonia_tenant_requests_total", "other"] == 4
    ends = [(one.priority, one.outcome) for one in read_requests(tmp_path / REQUESTS)]
    assert sorted(ends) == [(0, "length"), *[(5, "length")] * 2, *[(5, "queue_full")] * 2]


def test_a_tenant_that_fills_the_queue_keeps_nobody_out():
    executor = Gated(max_num_seqs=1)
    service = make_service(executor, "fcfs", fair_share=True)
    client = Client(service)
    fill(service, executor, client, tenant="greedy")
    client.submit("other", tenant="modest")
    end(service, executor, client, "runs", "first", "other")
    assert client.wait("last")[-1].error.kind == "queue_full"


def test_one_whose_first_step_begins_meanwhile_goes_on(monkeypatch):
    executor = Gated(max_num_seqs=1)
    service = make_service(executor, "priority")
    client = Client(service)
    fill(service, executor, client, priority=5)
    give_way = service._give_way

    def start_and_give_way(entry, error):
        """As if its step had been planned just before the service's thread looked."""
        service._gate.note_started(entry)
        give_way(entry, error)

    monkeypatch.setattr(service, "_give_way", start_and_give_way)
    client.submit("urgent")
    end(service, executor, client, "runs", "first", "last", "urgent")
    assert service.metrics.counters["charonia_finished_total", "queue_full"] == 0


@pytest.mark.parametrize("how", ["cancel", "bug"])
def test_one_that_ends_by_itself_before_it_gives_way_ends_once(how):
    executor = Gated(max_num_seqs=1)
    service = make_service(executor, "priority")
    client = Client(service)
    fill(service, executor, client, priority=5)
    with service._wake:  # the service's thread takes all of it at once
        service._inbox.append(client.accepted["last"]._cancel)
        client.submit("urgent")
        if how == "bug":
            service._inbox.insert(0, partial(next, iter([])))
    if how == "cancel":
        end(service, executor, client, "runs", "first", "urgent")
    else:
        executor.may_step.set()
        client.wait("urgent")
        service.close()
    kind = {"cancel": "cancelled", "bug": "internal"}[how]
    assert client.wait("last")[-1].error.kind == kind
    assert service.drain() == 0
    assert not service._gate._num_leaving


# ---------------------------------------------------------------------- with others' answers


def full(bench: AnswerBench, key: str) -> None:
    bench.answers.end(bench.live[key], QueueFullError.of_leaver("1", None))


def test_one_that_gives_way_takes_its_computation_with_it_only_where_nobody_shares_it():
    bench = AnswerBench(EchoExecutor(max_num_seqs=1))
    bench.ask("runs", [1] * 10, max_tokens=60)
    bench.run(3)
    for key in ("alone", "shared", "joined"):
        bench.ask(key, [2 + (key != "alone")] * 10)
    for key in ("alone", "shared"):
        full(bench, key)
    bench.run()
    assert [bench.error(key).kind for key in ("alone", "shared")] == ["queue_full"] * 2
    assert bench.error("joined") is None
    assert len(bench.tokens("joined")) == 20
    counters = bench.core.metrics.counters
    assert counters["charonia_finished_total", "queue_full"] == 2
    assert counters["charonia_finished_total", "length"] == 2
    answers = bench.answers
    assert (answers._computations, answers._joinable) == ({}, {})
    assert not answers._subscribers


def test_one_gives_way_while_an_answer_is_looked_for():
    bench = AnswerBench(semantic_cache_threshold=0.9)
    bench.ask("a")
    full(bench, "a")
    bench.run()
    assert bench.error("a").kind == "queue_full"
    assert bench.core.metrics.counters["charonia_answer_cache_misses_total", ""] == 0
    assert (bench.answers._computations, bench.answers._joinable) == ({}, {})


def test_all_samples_of_a_request_give_way():
    bench = AnswerBench(EchoExecutor(max_num_seqs=1), answer_cache_bytes=None)
    bench.ask("runs", [1] * 10, max_tokens=60)
    bench.run(3)
    bench.ask("a", n=3)
    bench.run(1)
    full(bench, "a")
    bench.run()
    assert [chunk.is_final for chunk in bench.chunks["a"]] == [False, False, True]
    assert bench.core.metrics.gauges["charonia_kv_blocks", "used"] == 0
