"""What a scheduler decides from is written, and gives the same plans again."""

import os
from collections import Counter, deque
from dataclasses import replace
from math import inf
from random import Random

import msgspec
import pytest

from charonia.config import EngineArgs, SchedulerArgs, SpeculativeConfig
from charonia.control import NO_SHEDDING, Group, KVPool, LoadShedding, SchedulerStats
from charonia.control.cache.eviction import EVICTIONS
from charonia.control.scheduling.commit import Commit
from charonia.control.scheduling.epoch import Epoch
from charonia.core.gate.tenants import Tenants
from charonia.core.generation_request import cache_scope
from charonia.core.recording.journal import Added, Applied, Blamed, Finished, Planned
from charonia.core.recording.journaled_scheduler import JournaledScheduler
from charonia.core.scheduler_factory import make_scheduler
from charonia.errors import ConfigError
from charonia.protocol import CacheRange, SamplingParams, StepResult
from charonia.simulate.replay import MAX_DIFFERENCES, Replay
from core.bench import FIXED, Bench
from core.reload_bench import Reloading
from support.echo import EchoExecutor
from support.journals import open_journal, replay
from support.scheduling import LIMITS
from support.stepping import Bench as Stepping
from support.stepping import make_request


def changed(entries, kind, change):
    """The entries with the last one of a kind changed."""
    index = max(i for i, entry in enumerate(entries) if isinstance(entry, kind))
    return [*entries[:index], change(entries[index]), *entries[index + 1 :]]


def journaled(bench, journal, scheduler_args, **engine_values):
    """A scheduler for a bench's engine that writes a journal; tenants "a" and "b" have weights."""
    engine_args = EngineArgs(model="echo", **engine_values)
    stats = SchedulerStats()
    return make_scheduler(
        engine_args,
        scheduler_args,
        replace(bench.scheduler.limits, async_scheduling=engine_args.async_scheduling),
        hash_secret=os.urandom(32),
        epoch=0,
        stats=stats,
        weight_of={"a": 1.0, "b": 2.0}.__getitem__,
        cache_events=None,
        tiers=bench.tiers(stats),
        journal=journal,
    )


@pytest.mark.parametrize("has_token_ids", [False, True])
@pytest.mark.parametrize("speculative_config", [None, "ngram", "suffix"])
def test_a_run_gives_the_same_plans_again(tmp_path, entries, speculative_config, has_token_ids):
    config = speculative_config and SpeculativeConfig(
        method=speculative_config, num_speculative_tokens=3, adaptive=False
    )
    journal = open_journal(tmp_path, has_token_ids=has_token_ids)
    bench = Bench(EchoExecutor(num_blocks=12, vocab_size=4), config, journal=journal)
    for key in "abcd":
        bench.add(key, prompt=[1, 2, 3, 1, 2, 3, 1, 2], n=2, max_tokens=30, stop=("x",))
    bench.run(8)
    bench.cancel("b")
    bench.run()
    journal.close()
    outcome = replay(tmp_path)
    assert not outcome.differences, "\n".join(outcome.differences)
    assert outcome.num_schedulers == 1
    assert outcome.num_requests == 8
    assert outcome.num_plans == bench.executor.num_submitted
    kinds = Counter(type(entry).__name__ for entry in entries())
    assert kinds["Applied"] == outcome.num_plans
    drafted = any(
        row.draft_ids
        for one in entries()
        if isinstance(one, Planned) and one.plan
        for row in one.plan.rows
    )
    assert drafted == bool(config)


def test_a_pool_that_hashes_in_another_way_is_refused(tmp_path, entries):
    journal, other = open_journal(tmp_path), open_journal(tmp_path / "other")
    for pool in (KVPool(b"test"), KVPool(b"test", new_hasher=other.new_hasher)):
        with pytest.raises(ConfigError, match=r"new_hasher must be the journal's"):
            JournaledScheduler(
                journal, EngineArgs(model="echo"), SchedulerArgs(), LIMITS, pool, tiers=None
            )
    for one in (journal, other):
        one.close()
    assert [type(entry).__name__ for entry in entries()] == ["Ended"]


def test_token_ids_are_written_as_numbers_in_the_order_of_their_appearance(tmp_path, entries):
    journal = open_journal(tmp_path)
    bench = Bench(journal=journal)
    bench.add("a", prompt=[200, 201, 200], max_tokens=3, stop_token_ids=(201, 250), cache_salt="s")
    bench.run()
    journal.close()
    (added,) = (entry for entry in entries() if isinstance(entry, Added))
    assert (added.token_ids, added.stop_ids) == ([0, 1, 0], [1, 2])
    assert added.cache_scope not in (b"", cache_scope(SamplingParams(cache_salt="s")))
    assert b"salt" not in msgspec.msgpack.encode(entries())
    plans = [entry.plan for entry in entries() if isinstance(entry, Planned) and entry.plan]
    assert plans[0].joins[0].token_ids == []


def test_a_prompt_is_written_once_however_often_its_request_joins(tmp_path, entries):
    journal = open_journal(tmp_path)
    bench = Bench(EchoExecutor(num_blocks=24, max_model_len=400), journal=journal)
    for key in "ab":
        bench.add(key, prompt=[ord(key)] * 150, max_tokens=60)
    bench.run()
    journal.close()
    recorded = [one for one in entries() if isinstance(one, Planned)]
    joins = [one.num_known for one in recorded if one.num_known]
    assert sum(map(len, joins)) > 2, "one was preempted"
    assert joins[0][0] == 150
    assert max(map(max, joins)) > 150, "with what it had generated"
    assert max(len(msgspec.msgpack.encode(one)) for one in recorded) < 600
    assert replay(tmp_path).differences == ()


def test_an_engine_that_dies_fails_or_is_replaced_is_replayed_as_well(tmp_path):
    journal = open_journal(tmp_path)
    bench = Reloading(journal=journal)
    for key in "abc":
        bench.add(key, draft_ids=[1, 2, 3])
    bench.run(3)
    bench.executor.die_next = 1
    bench.run(3)
    bench.executor.fail_next = 1
    bench.run(3)
    bench.reload(enable_prefix_caching=False)
    bench.run()
    journal.close()
    outcome = replay(tmp_path)
    assert not outcome.differences, "\n".join(outcome.differences)
    assert outcome.num_schedulers == 2


def test_weights_are_those_of_the_moment(tmp_path):
    weights = {"a": 1.0, "b": 1.0}

    class Changing(Tenants):
        def weight_of(self, tenant):
            return weights[tenant]

    journal = open_journal(tmp_path)
    tenants = Changing(log=print)
    executor = EchoExecutor(max_num_seqs=1)
    bench = Bench(executor, journal=journal, tenants=tenants, fair_share=True)
    for number in range(12):
        bench.add(f"{number}", tenant="ab"[number % 2])
    bench.run(50)
    weights["b"] = 7.0
    bench.run()
    journal.close()
    assert replay(tmp_path).differences == ()


def test_what_is_different_is_told_with_its_place(tmp_path, entries):
    journal = open_journal(tmp_path)
    bench = Bench(journal=journal)
    bench.add("a", max_tokens=4)
    bench.run()
    journal.close()

    def other(entry):
        rows = [msgspec.structs.replace(entry.plan.rows[0], num_tokens=5)]
        plan = msgspec.structs.replace(entry.plan, rows=rows, epoch=9)
        return msgspec.structs.replace(entry, plan=plan)

    recorded = entries()
    while recorded[-1].__class__ is not Planned or recorded[-1].plan is None:
        recorded.pop()
    head, *lines = Replay().run(iter(changed(recorded, Planned, other))).differences
    assert head.startswith("plan 4, 0.0")
    assert lines == [
        "  plan.epoch: 9 when recorded, 1 now",
        "  plan.rows[0][1]: 5 when recorded, 1 now",
        "  rows now: 0 'a'",
    ]


def test_many_differences_are_counted(tmp_path, entries):
    journal = open_journal(tmp_path)
    bench = Bench(EchoExecutor(max_num_seqs=16, max_num_batched_tokens=200), journal=journal)
    for number in range(15):
        bench.add(f"{number}")
    bench.run(1)
    journal.close()

    def other(entry):
        joins = [msgspec.structs.replace(join, num_computed=7) for join in entry.plan.joins]
        plan = msgspec.structs.replace(entry.plan, joins=joins)
        return msgspec.structs.replace(entry, plan=plan)

    recorded = entries()
    first = next(
        i for i, one in enumerate(recorded) if isinstance(one, Planned) and one.plan is not None
    )
    recorded = [*recorded[:first], other(recorded[first])]
    _, *lines, more, _ = Replay().run(iter(recorded)).differences
    num_joins = len(recorded[-1].plan.joins)
    assert lines[0] == "  plan.joins[0].num_computed: 7 when recorded, 0 now"
    assert (len(lines), more) == (MAX_DIFFERENCES, f"  and {num_joins - MAX_DIFFERENCES} more")


@pytest.mark.parametrize(
    ("entry", "difference"),
    [
        (Finished(key="nobody", is_complete=False), "finish: 'nobody' was live when recorded"),
        (Blamed(guilty="a"), "blame: 'a' when recorded, None now"),
        (
            Applied(now=0.0, result=StepResult(epoch=1, step_id=0, rows=[], seconds=0.0)),
            "Applied: ",
        ),
        (
            Planned(now=0.0, shedding=NO_SHEDDING, plan=None, raised="KeyError"),
            "Planned: raised KeyErr",
        ),
    ],
)
def test_any_other_call_that_gives_something_else_is_told_too(tmp_path, entries, entry, difference):
    journal = open_journal(tmp_path)
    Bench(journal=journal)
    journal.close()
    (told,) = Replay().run(iter([*entries(), entry])).differences
    assert told.startswith(difference)


def test_a_failure_of_the_scheduler_is_written_and_comes_again(tmp_path, entries, monkeypatch):
    journal = open_journal(tmp_path)
    bench = Bench(journal=journal)
    bench.add("a")
    bench.run(2)
    commit = Commit.commit

    def failing(self, step, *args):
        if step.step_id == 5:
            raise KeyError("a defect")
        return commit(self, step, *args)

    monkeypatch.setattr(Commit, "commit", failing)
    with pytest.raises(KeyError):
        bench.run()
    journal.close()
    assert [one.raised for one in entries() if one.raised] == ["KeyError"]
    assert replay(tmp_path).differences == ()
    monkeypatch.undo()
    (told,) = replay(tmp_path).differences
    assert "KeyError when recorded, nothing now" in told


def test_a_plan_that_fails_is_written_and_comes_again(tmp_path, entries, monkeypatch):
    journal = open_journal(tmp_path)
    bench = Bench(journal=journal)
    bench.add("a")
    bench.run(2)
    plan = Epoch.plan

    def failing(self, now, shedding):
        if self._next_step_id == 5:
            raise KeyError("a defect")
        return plan(self, now, shedding)

    monkeypatch.setattr(Epoch, "plan", failing)
    with pytest.raises(KeyError):
        bench.run()
    journal.close()
    (failed,) = (one for one in entries() if one.raised)
    assert isinstance(failed, Planned)
    assert failed.raised == "KeyError"
    assert replay(tmp_path).differences == ()
    monkeypatch.undo()
    (told,) = replay(tmp_path).differences
    assert "KeyError when recorded, nothing now" in told


POLICIES = [
    ({}, {}),
    ({"scheduling_policy": "priority"}, {"priority_aging_s": 5.0}),
    ({"scheduling_policy": "priority"}, {"fair_share": True}),
    ({"scheduling_policy": "deadline"}, {}),
    ({"scheduling_policy": "deadline"}, {"late_requests": "demote", "fair_share": True}),
    ({"max_num_seqs": "auto", "max_num_batched_tokens": "auto"}, {"inter_token_target_ms": "auto"}),
    ({}, {"capacity_scheduler_policy": "expected_peak", "inter_token_target_ms": 30.0}),
    ({"eviction_policy": "lru", "async_scheduling": False}, {"fair_share": True}),
]


@pytest.mark.parametrize(("engine_values", "scheduler_values"), POLICIES)
@pytest.mark.parametrize("tier_sizes", [(), (20, 30)])
def test_whatever_decides_decides_alike(tmp_path, engine_values, scheduler_values, tier_sizes):
    bench = Stepping(num_blocks=24, max_num_seqs=3, tier_sizes=tier_sizes)
    journal = open_journal(tmp_path, has_token_ids=bool(tier_sizes))
    scheduler = journaled(bench, journal, SchedulerArgs(**scheduler_values), **engine_values)
    random, in_flight, keys = Random(7), deque(), []
    for now in range(200):
        if random.random() < 0.5:
            keys.append(f"{now}")
            request = make_request(
                keys[-1],
                random.choice([-1, 0, 0, 2]),
                group=Group(keys[-1]),
                token_ids=[random.randrange(3)] * random.randint(1, 40),
                max_tokens=random.randint(1, 20),
                arrived_at=now,
                expires_at=now + random.choice([5, 50, inf]),
                tenant=random.choice("ab"),
                retention=(CacheRange(end=8, priority=90, ttl_s=20.0),) * random.randrange(2),
            )
            scheduler.add(request)
        if random.random() < 0.1:
            scheduler.finish(random.choice(keys))
        scheduler.shedding = LoadShedding(prompt_share=0.5 if now % 50 > 40 else 1.0)
        while len(in_flight) < scheduler.limits.max_steps_in_flight and (
            plan := scheduler.plan(now)
        ):
            in_flight.append(bench.engine.submit(plan))
        scheduler.take_late()
        if in_flight:
            result = in_flight.popleft().result(None)
            seconds = 0.01 + 0.001 * random.random()
            scheduler.apply(msgspec.structs.replace(result, seconds=seconds), now + seconds)
    journal.close()
    outcome = replay(tmp_path)
    assert not outcome.differences, "\n".join(outcome.differences)
    assert outcome.num_plans > 100


@pytest.mark.parametrize("has_token_ids", [False, True])
def test_blocks_that_slower_tiers_have_kept_need_token_ids(tmp_path, has_token_ids):
    executor, lines = EchoExecutor(num_blocks=12, block_size=4, tier_sizes=(30, 30)), []
    journal = open_journal(tmp_path, has_token_ids=has_token_ids, log=lines.append)
    bench = Bench(executor, journal=journal)
    for key in "abc":
        bench.add(key)
    bench.run()
    executor.die_next = 1
    for key in "abcd":
        bench.add(key)
    bench.run()
    journal.close()
    outcome = replay(tmp_path)
    assert not outcome.differences, "\n".join(outcome.differences)
    if has_token_ids:
        assert lines == []
        assert outcome.num_requests == 7
    else:
        assert len(lines) == 1
        assert lines[0].startswith("journal_stopped ")
        assert "slower tiers need record_token_ids" in lines[0]


def test_calls_of_no_scheduler_are_refused():
    with pytest.raises(ConfigError, match="does not begin with a scheduler's start"):
        Replay().run(iter([Blamed(guilty=None)]))


@pytest.mark.parametrize("eviction_policy", sorted(EVICTIONS))
def test_what_is_evicted_by_bits_of_its_key_is_evicted_again(tmp_path, eviction_policy):
    """A large cache, of which some entries alone are watched, with prefixes that come again."""
    bench = Stepping(num_blocks=1500, max_model_len=400, max_num_batched_tokens=512)
    journal = open_journal(tmp_path)
    scheduler = journaled(
        bench,
        journal,
        SchedulerArgs(),
        eviction_policy=eviction_policy,
        async_scheduling=False,
    )
    random = Random(3)
    for now in range(400):
        key, family = f"{now}", random.randrange(60) ** 2 // 60
        token_ids = [1000 + family] * random.randint(1, 200) + [random.randrange(900)] * 30
        request = make_request(key, group=Group(key), token_ids=token_ids, max_tokens=1)
        scheduler.add(request)
        plan = scheduler.plan(now)
        scheduler.apply(bench.engine.submit(plan).result(None), now)
    journal.close()
    outcome = replay(tmp_path)
    assert not outcome.differences, "\n".join(outcome.differences)
    assert scheduler.stats.blocks_evicted > 100
    assert outcome.end == ""


def test_requests_that_wait_for_a_prompt_of_their_group_go_on_with_another_engine(tmp_path):
    journal = open_journal(tmp_path)
    bench = Reloading(executor=EchoExecutor(max_num_seqs=2), journal=journal)
    for key in "abc":
        bench.add(key, n=3)
    bench.run(2)
    bench.reload(enable_prefix_caching=False)
    bench.run()
    journal.close()
    outcome = replay(tmp_path)
    assert not outcome.differences, "\n".join(outcome.differences)


def test_what_was_accepted_of_drafts_goes_along_to_another_engine(tmp_path, entries):
    journal = open_journal(tmp_path)
    bench = Reloading(executor=EchoExecutor(max_draft_len=100), journal=journal)
    bench.reload(speculative_config=FIXED)
    bench.add("a", max_tokens=40)
    bench.run(5)
    bench.reload(speculative_config=FIXED, enable_prefix_caching=False)
    bench.run()
    journal.close()
    added = [entry for entry in entries() if isinstance(entry, Added)]
    assert added[-1].carried.drafts.num_accepted > 0
    assert not replay(tmp_path).differences


def test_a_scheduler_that_cannot_be_made_is_said(tmp_path, entries):
    journal = open_journal(tmp_path)
    Bench(journal=journal)
    journal.close()
    opened = msgspec.structs.replace(entries()[0], hash_secret=b"x" * 100)
    with pytest.raises(ConfigError, match="the journal's scheduler cannot be made: ValueError"):
        Replay().run(iter([opened]))
