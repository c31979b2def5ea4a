"""Who is let in: limits of all, limits of one tenant, rates."""

import json

import pytest

from charonia.config import EngineArgs, SchedulerArgs
from charonia.core.gate.gate import MAX_REMEMBERED, Gate, Leaver
from charonia.core.gate.queue_order import Entry
from charonia.core.gate.tenants import Tenants
from charonia.core.generation_request import GenerationRequest
from charonia.errors import (
    InvalidRequestError,
    LateRequestError,
    QueueFullError,
    RateLimitedError,
)
from charonia.protocol import SamplingParams


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


clock = Clock()


class KeyedGate(Gate):
    """A gate that keeps the entries of its requests and is asked for them by key."""

    def __init__(self, tenants: Tenants, args: SchedulerArgs, *, clock) -> None:
        super().__init__(tenants, args, clock=clock)
        self.entries: dict[str, Entry] = {}

    def enter(self, request, arrived_at=None, *, num_queued=0) -> Leaver | None:
        entry, leaver = super().enter(request, arrived_at, num_queued=num_queued)
        self.entries[request.key] = entry
        return leaver

    def note_started(self, key: str) -> None:
        super().note_started(self.entries[key])

    def note_joined(self, key: str) -> None:
        super().note_joined(self.entries[key])

    def is_leaving(self, key: str) -> bool:
        return self.entries[key].is_leaving

    def leave(self, key: str) -> None:
        super().leave(self.entries[key])


@pytest.fixture
def make_gate(tmp_path):
    def make(max_queue_tokens=None, **file) -> KeyedGate:
        path = tmp_path / "tenants.json"
        path.write_text(json.dumps(file))
        clock.now = 0.0
        args = SchedulerArgs(max_queue_tokens=max_queue_tokens)
        return KeyedGate(Tenants(path, log=print), args, clock=clock)

    return make


def enter(
    gate: KeyedGate,
    key: str,
    now: float | None = None,
    *,
    num_tokens: int = 1,
    is_probe: bool = False,
    arrived_at: float | None = None,
    num_queued: int = 0,
    **params,
):
    """Let a request in, of the tenant whose name is the key's first character."""
    clock.now = clock.now if now is None else now
    params = SamplingParams(tenant=key[0], **params)
    prompt_ids = [0] * num_tokens
    request = GenerationRequest(key=key, prompt_ids=prompt_ids, params=params, is_probe=is_probe)
    assert gate.enter(request, arrived_at, num_queued=num_queued) is None


def test_without_limits_everybody_comes_in(make_gate):
    gate = make_gate()
    for number in range(100):
        enter(gate, f"a{number}", num_tokens=1000)


def test_a_full_queue_refuses_whoever_comes(make_gate):
    gate = make_gate()
    enter(gate, "a1", num_queued=1023)
    for is_probe in (False, True):
        full = r"Exceeds maximum queue size.*Maximum queue size of 1024 is reached"
        with pytest.raises(QueueFullError, match=full):
            enter(gate, "a2", num_queued=1024, is_probe=is_probe)


def test_the_tokens_of_all_that_wait_are_bounded(make_gate):
    gate = make_gate(max_queue_tokens=10)
    enter(gate, "a1", num_tokens=6)
    enter(gate, "b1", num_tokens=4)
    with pytest.raises(QueueFullError, match="Maximum queue size of 10 prompt tokens is reached"):
        enter(gate, "c1")
    gate.note_started("a1")
    enter(gate, "c1", num_tokens=6)
    with pytest.raises(QueueFullError):
        enter(gate, "d1")
    gate.leave("b1")
    enter(gate, "d1", num_tokens=4)


def test_who_gets_what_another_ones_steps_give_waits_no_longer_and_is_still_there(make_gate):
    gate = make_gate(max_queue_tokens=10, default={"max_concurrency": 2})
    enter(gate, "a1", num_tokens=6)
    with pytest.raises(QueueFullError):
        enter(gate, "a2", num_tokens=6)
    gate.note_joined("a1")
    gate.note_started("a1")
    assert gate.num_of_tenants()["other"] == (0, 1)
    enter(gate, "a2", num_tokens=6)
    with pytest.raises(RateLimitedError):
        enter(gate, "a3")
    gate.leave("a1")
    gate.leave("a2")
    assert gate.num_live == 0


def test_a_prompt_beyond_the_bound_comes_in_alone(make_gate):
    gate = make_gate(max_queue_tokens=10)
    enter(gate, "a1", num_tokens=11)
    with pytest.raises(QueueFullError):
        enter(gate, "b1")
    gate.leave("a1")
    enter(gate, "b1", num_tokens=12)


def test_what_one_tenant_has_waiting_is_bounded_and_others_do_not_notice(make_gate):
    gate = make_gate(default={"max_queue_size": 2})
    enter(gate, "a1")
    enter(gate, "a2")
    with pytest.raises(QueueFullError, match="Maximum queue size of 2 requests of tenant 'a' is"):
        enter(gate, "a3")
    enter(gate, "b1")
    gate.note_started("a1")
    enter(gate, "a3")
    gate.leave("a2")
    enter(gate, "a4")
    with pytest.raises(QueueFullError):
        enter(gate, "a5")


def test_the_tokens_that_one_tenant_has_waiting_are_bounded(make_gate):
    gate = make_gate(tenants={"a": {"max_queue_tokens": 10}})
    enter(gate, "a1", num_tokens=8)
    with pytest.raises(QueueFullError, match="of 10 prompt tokens of tenant 'a' is"):
        enter(gate, "a2", num_tokens=3)
    enter(gate, "a2", num_tokens=2)
    enter(gate, "b1", num_tokens=100)


def test_how_many_requests_a_tenant_has_at_once_is_bounded_whether_they_wait_or_run(make_gate):
    gate = make_gate(tenants={"a": {"max_concurrency": 2}})
    enter(gate, "a1")
    enter(gate, "a2")
    gate.note_started("a1")
    with pytest.raises(RateLimitedError, match="has 2 requests here, as many as it may have at"):
        enter(gate, "a3")
    gate.leave("a1")
    gate.leave("a1")  # has no effect
    enter(gate, "a3")
    with pytest.raises(RateLimitedError):
        enter(gate, "a4")


def test_who_has_too_many_at_once_is_told_when_one_of_them_may_end(make_gate):
    gate = make_gate(default={"max_concurrency": 2})
    enter(gate, "a1", now=100.0)
    enter(gate, "a2")
    with pytest.raises(RateLimitedError, match=r"when one of them has ended$"):
        enter(gate, "a3")
    clock.now += 8.0
    gate.leave("a1")
    enter(gate, "a3")
    with pytest.raises(RateLimitedError, match=r"; retry after 4\.000 s$"):  # of two
        enter(gate, "a4")
    clock.now += 20.0
    gate.leave("a2")
    enter(gate, "a4")
    with pytest.raises(RateLimitedError, match=r"; retry after 5\.000 s$"):  # those end after 10 s
        gate.check("a", 0)
    enter(gate, "b1")
    enter(gate, "b2")
    with pytest.raises(RateLimitedError, match=r"has ended$"):
        enter(gate, "b3")


def test_how_fast_they_come_is_bounded_and_the_error_says_when_there_is_room(make_gate):
    gate = make_gate(tenants={"a": {"requests_per_s": 4, "burst": 2}})
    enter(gate, "a1", now=100.0)
    enter(gate, "a2", now=100.0)
    with pytest.raises(RateLimitedError, match=r"may send 4 requests per .*; retry after 0.250 s$"):
        enter(gate, "a3", now=100.0)
    with pytest.raises(RateLimitedError, match=r"retry after 0.125 s$"):
        enter(gate, "a3", now=100.125)
    enter(gate, "a3", now=100.25)
    for number in (4, 5):
        enter(gate, f"a{number}", now=200.0)
    with pytest.raises(RateLimitedError):
        enter(gate, "a6", now=200.0)


def test_a_request_that_is_refused_costs_nothing(make_gate):
    gate = make_gate(tenants={"a": {"requests_per_s": 1, "max_concurrency": 1}})
    enter(gate, "a1")
    for _ in range(3):
        with pytest.raises(RateLimitedError, match="as many as it may have"):
            enter(gate, "a2", now=1.0)
    gate.leave("a1")
    enter(gate, "a2", now=1.0)


def test_whom_no_prompt_would_let_in_is_refused_before_it_is_known(make_gate):
    limits = {"a": {"max_concurrency": 2}, "b": {"max_queue_size": 2}, "c": {"requests_per_s": 1}}
    gate = make_gate(unknown="refuse", tenants=limits)
    for tenant in "abc":
        gate.check(tenant, 0)
        gate.check(tenant, 0)  # it takes nothing
        enter(gate, f"{tenant}1")
    gate.check("a", 0)
    with pytest.raises(RateLimitedError, match="has 2 requests here"):
        gate.check("a", 1)
    gate.check("b", 0)
    with pytest.raises(QueueFullError):
        gate.check("b", 1)
    with pytest.raises(RateLimitedError, match="retry after"):
        gate.check("c", 0)
    clock.now += 2.0
    gate.check("c", 0)
    with pytest.raises(RateLimitedError, match=r"retry after 1\.000 s"):
        gate.check("c", 1)
    with pytest.raises(InvalidRequestError, match="'d' is not known"):
        gate.check("d", 0)


def test_a_tenant_that_the_file_does_not_name_may_be_refused(make_gate):
    gate = make_gate(unknown="refuse", tenants={"a": {}})
    enter(gate, "a1")
    with pytest.raises(InvalidRequestError, match="tenant 'b' is not known here"):
        enter(gate, "b1")


def test_a_probe_is_always_let_in_and_counts_for_nothing(make_gate):
    gate = make_gate(unknown="refuse", max_queue_tokens=1)
    enter(gate, "a1", num_tokens=5, is_probe=True)
    gate.note_started("a1")
    gate.leave("a1")


def test_idle_tenants_are_forgotten_when_there_are_too_many_and_busy_ones_never(make_gate):
    gate = make_gate(default={"max_concurrency": 1})
    enter(gate, "!")
    for number in range(3 * MAX_REMEMBERED):
        key = chr(1000 + number)
        enter(gate, key)
        gate.leave(key)
    assert len(gate._accounts) <= 2 * MAX_REMEMBERED
    with pytest.raises(RateLimitedError):
        enter(gate, "!2")


def test_idle_tenants_are_forgotten_in_the_order_in_which_they_came(make_gate):
    gate = make_gate()
    num_busy = MAX_REMEMBERED
    came = [chr(1000 + number) for number in range(num_busy + MAX_REMEMBERED + 4)]
    for key in came[:-2]:
        enter(gate, key)
    for key in reversed(came[num_busy:-2]):
        gate.leave(key)
    enter(gate, came[num_busy])
    gate.leave(came[num_busy])  # it came again
    for key in came[-2:]:
        enter(gate, key)
    forgotten = set(came) - set(gate._accounts)
    assert forgotten == {came[num_busy + 1], came[num_busy + 2]}


def test_of_too_many_idle_tenants_more_are_forgotten_than_come(make_gate):
    gate = make_gate()
    num_too_many = 20
    keys = [chr(1000 + number) for number in range(2 * MAX_REMEMBERED + num_too_many)]
    for key in keys:
        enter(gate, key)
    for key in keys:
        gate.leave(key)
    assert len(gate._accounts) == len(keys)
    for number in range(num_too_many):
        enter(gate, key := chr(100_000 + number))
        gate.leave(key)
    assert len(gate._accounts) == 2 * MAX_REMEMBERED


def test_who_comes_does_not_look_at_all_tenants_that_wait(make_gate):
    gate = make_gate()
    gate._accounts = accounts = Looked(gate._accounts)
    num_waiting = 2 * MAX_REMEMBERED + 1
    for number in range(num_waiting + MAX_REMEMBERED + 5):
        enter(gate, key := chr(1000 + number))
        if number >= num_waiting:
            gate.leave(key)
    assert accounts.num_looked_at <= 10
    assert len(accounts) <= num_waiting + MAX_REMEMBERED + 1
    assert chr(1000 + num_waiting) not in accounts


class Looked(dict):
    """Counts the items that are looked at one after the other."""

    num_looked_at = 0

    def items(self):
        for item in super().items():
            self.num_looked_at += 1
            yield item


# ---------------------------------------------------------------------- how long they would wait


def make_predicting(**args) -> KeyedGate:
    """A gate that has let eight requests of 10 tokens wait for a second each, one at a time."""
    clock.now = 0.0
    gate = KeyedGate(Tenants(log=print), SchedulerArgs(**args), clock=clock)
    for number in range(8):
        enter(gate, f"a{number}", num_tokens=10)
        clock.now += 1.0
        gate.note_started(f"a{number}")
        gate.leave(f"a{number}")
        clock.now += 100.0  # in which nobody waits
    return gate


def test_who_would_wait_beyond_the_deadline_is_refused_and_told_when_to_come():
    gate = make_predicting()
    enter(gate, "a", num_tokens=10, deadline_ms=1)  # nobody is ahead of it
    enter(gate, "b", num_tokens=20)
    reason = r"deadline_ms = 2000 cannot be met: it would wait for about 3\.00 s; retry after 1\.0"
    with pytest.raises(LateRequestError, match=reason):
        enter(gate, "c", deadline_ms=2000)
    enter(gate, "c", deadline_ms=3500)
    enter(gate, "d")
    gate.leave("b")
    enter(gate, "e", deadline_ms=2000)


def test_what_a_request_has_spent_on_its_way_is_no_part_of_what_is_left():
    gate = make_predicting()
    enter(gate, "b", num_tokens=30)
    enter(gate, "c", deadline_ms=3500, arrived_at=clock.now)
    gate.leave("c")
    with pytest.raises(
        LateRequestError, match=r"deadline_ms = 3500 .* about 3\.00 s; .* after 0\.5"
    ):
        enter(gate, "c", deadline_ms=3500, arrived_at=clock.now - 1.0)


def test_while_nobody_begins_the_wait_grows_and_stays_known():
    gate = make_predicting()
    for number in range(20):
        enter(gate, f"b{number}", num_tokens=10)
    waits = []
    for _ in range(12):
        clock.now += 30.0
        waits.append(gate.wait_s())
    assert waits == sorted(waits)
    assert waits[0] > 20 * 3
    assert waits[-1] > 20 * 60
    with pytest.raises(LateRequestError):
        enter(gate, "c", deadline_ms=60_000)


@pytest.mark.parametrize("num_starts", [0, 2])
def test_before_enough_have_begun_a_wait_is_as_long_as_nobody_has(make_gate, num_starts):
    gate = make_gate()
    for number in range(num_starts):
        enter(gate, f"a{number}")
        clock.now += 0.1
        gate.note_started(f"a{number}")
    enter(gate, "b1")
    clock.now += 0.5
    assert gate.wait_s() is None
    clock.now += 29.5
    enter(gate, "b2")  # it has waited for no time, but the other one has
    assert gate.wait_s() == pytest.approx(30.0)
    with pytest.raises(LateRequestError, match=r"for about 30\.00 s; retry after 10\.000 s"):
        enter(gate, "c1", deadline_ms=20_000)
    gate.note_started("b1")
    assert gate.wait_s() is None
    gate.leave("b2")
    clock.now += 100.0
    assert gate.wait_s() == 0.0, "nobody waits"


def test_a_stall_counts_from_the_last_start_on_and_from_when_somebody_waits():
    gate = make_predicting()  # whose last start was 100 s ago
    enter(gate, "b1")
    clock.now += 10.0
    assert gate.wait_s() == pytest.approx(10.0)  # its prompt alone would take a tenth of a second
    enter(gate, "b2")
    gate.leave("b1")
    clock.now += 10.0
    assert gate.wait_s() == pytest.approx(20.0)
    enter(gate, "b3")
    gate.note_started("b2")
    clock.now += 5.0
    assert gate.wait_s() == pytest.approx(5.0, rel=0.1)


def test_who_waits_behind_others_for_long_holds_up_nobody():
    gate = make_predicting()
    enter(gate, "low", priority=1)
    for number in range(100):
        enter(gate, f"b{number}", num_tokens=10)
        clock.now += 1.0
        gate.note_started(f"b{number}")
    assert gate.wait_s() < 2.0
    clock.now += 50.0
    enter(gate, "c", deadline_ms=10)  # nobody is before it
    with pytest.raises(LateRequestError, match=r"for about 50\.00 s"):
        enter(gate, "d", deadline_ms=10, priority=1)


def test_where_requests_begin_seldom_the_wait_is_known_all_the_same():
    clock.now = 0.0
    gate = KeyedGate(Tenants(log=print), SchedulerArgs(), clock=clock)
    for number in range(50):
        enter(gate, f"a{number}")
    for number in range(20):
        clock.now += 20.0
        gate.note_started(f"a{number}")
    assert gate.wait_s() == pytest.approx(30 * 20.0, rel=0.2)


def test_who_does_not_wait_in_line_is_not_refused_for_it():
    gate = make_predicting()
    enter(gate, "b", num_tokens=100)
    enter(gate, "c", deadline_ms=10, priority=-1)
    with pytest.raises(LateRequestError):
        enter(gate, "d", deadline_ms=10, priority=1)
    gate.follow(EngineArgs(model="echo", scheduling_policy="deadline"))
    enter(gate, "d", deadline_ms=10)


def test_with_fair_shares_a_tenant_waits_for_its_own_requests_alone():
    gate = make_predicting(fair_share=True)
    enter(gate, "a", num_tokens=100)
    enter(gate, "b", num_tokens=100)
    enter(gate, "b2", deadline_ms=10)  # nothing is known of this tenant
    with pytest.raises(LateRequestError):
        enter(gate, "a2", deadline_ms=10)


def test_before_anything_is_known_nobody_is_refused():
    clock.now = 0.0
    gate = KeyedGate(Tenants(log=print), SchedulerArgs(), clock=clock)
    for number in range(20):
        enter(gate, f"a{number}", now=0.01 * number, num_tokens=1000, deadline_ms=1)
    for number in range(8):
        gate.note_started(f"a{number}")
    enter(gate, "b", deadline_ms=1)  # a fifth of a second is too short
    clock.now = 5.0
    with pytest.raises(LateRequestError):
        enter(gate, "c", deadline_ms=1)


def test_what_was_long_ago_counts_little():
    gate = make_predicting()
    for number in range(100):  # ten times as fast
        enter(gate, f"b{number}", num_tokens=100)
        clock.now += 1.0
        gate.note_started(f"b{number}")
    enter(gate, "c", num_tokens=1000)
    with pytest.raises(LateRequestError, match=r"about 1[01]\... s"):
        enter(gate, "d", deadline_ms=10)


def test_it_tells_who_waits_and_who_runs(make_gate):
    gate = make_gate(tenants={"a": {}, "b": {}})
    for key in ("a1", "a2", "a3", "c1"):
        enter(gate, key)
    gate.note_started("a1")
    assert gate.num_of_tenants() == {"a": (2, 1), "b": (0, 0), "other": (1, 0)}
    gate.leave("c1")
    gate.leave("a1")
    assert gate.num_of_tenants() == {"a": (2, 0), "b": (0, 0), "other": (0, 0)}


def test_the_wait_behind_all_others_is_not_known_at_first(make_gate):
    gate = make_gate()
    assert gate.wait_s() == 0.0, "nobody waits"
    for number in range(10):
        enter(gate, f"a{number}", now=0.0, priority=number)
    assert gate.wait_s() is None
    for number in range(5):
        clock.now += 1.0
        gate.note_started(f"a{number}")
    assert gate.wait_s() == pytest.approx(5.0, rel=0.1)
