"""Which cached blocks are kept for those that wait."""

from dataclasses import replace

from charonia.control import KVPool, Scheduler
from charonia.control.policies import DisplacementByPriority, by_priority, ranked
from support.scheduling import (
    LIMITS,
    make_engine,
    make_request,
    make_scheduler,
    run_step,
    run_to_end,
)


def test_what_a_waiting_request_will_hit_is_kept_while_others_need_blocks():
    """One row, so that it waits for one that needs more blocks than are empty."""
    hits = {}
    for waits in (True, False):
        scheduler = make_scheduler(num_blocks=9, max_num_seqs=1)
        engine = make_engine(scheduler)
        scheduler.add(make_request("a", 9, max_tokens=1))
        run_to_end(scheduler, engine)
        scheduler.add(make_request("b", 9, token_ids=[7] * 9, max_tokens=1))
        run_to_end(scheduler, engine)
        scheduler.add(make_request("c", 20, token_ids=[9] * 20, max_tokens=4))
        again = make_request("d", 9, max_tokens=1)
        if waits:
            scheduler.add(again)
        run_to_end(scheduler, engine)
        if not waits:
            scheduler.add(again)
            run_to_end(scheduler, engine)
        hits[waits] = again.num_cached
    assert hits == {True: 8, False: 0}


def test_who_is_displaced_keeps_its_blocks_before_those_that_waited_before_it():
    rank = by_priority()
    limits = replace(LIMITS, num_blocks=41, max_num_seqs=1, max_model_len=160)
    policy = ranked(rank, DisplacementByPriority(rank))
    scheduler = Scheduler(limits, KVPool(b"test"), policy=policy)
    engine = make_engine(scheduler)
    prompts = [[100 + number] * 13 for number in range(4)]
    for number, prompt in enumerate(prompts):
        scheduler.add(make_request(f"{number}", 13, token_ids=prompt, max_tokens=1))
        run_to_end(scheduler, engine)
    displaced = make_request("displaced", 80, token_ids=[7] * 80)
    scheduler.add(displaced)
    run_step(scheduler, engine)
    for number, prompt in enumerate(prompts):
        scheduler.add(make_request(f"again {number}", 13, token_ids=prompt, max_tokens=1))
    run_step(scheduler, engine)
    assert len(scheduler.kv._reserved) == 4
    scheduler.add(make_request("urgent", 80, token_ids=[9] * 80, max_tokens=2, priority=-1))
    found = {}
    while scheduler.requests:
        plan, _ = run_step(scheduler, engine)
        found |= {join.token_ids[0]: join.num_computed for join in plan.joins}
    assert displaced.num_preemptions == 1
    assert found[7] == 76
    assert scheduler.stats.blocks_evicted > 0


def test_blocks_are_kept_for_the_first_of_those_that_wait(monkeypatch):
    monkeypatch.setattr("charonia.control.cache.lookups.MAX_RESERVING", 2)
    scheduler = make_scheduler(max_num_seqs=1)
    engine = make_engine(scheduler)
    scheduler.add(make_request("a", 9, max_tokens=1))
    run_to_end(scheduler, engine)
    scheduler.add(make_request("long", 9, token_ids=[7] * 9, max_tokens=4))
    run_step(scheduler, engine)
    for name in "bcde":
        scheduler.add(make_request(name, 9, max_tokens=1))
    run_step(scheduler, engine)
    assert set(scheduler.kv._reserved) == {"b", "c"}
    scheduler.finish("b")
    run_step(scheduler, engine)
    assert set(scheduler.kv._reserved) == {"c", "d"}
    run_to_end(scheduler, engine)
    assert not scheduler.kv._reserved
