"""What a request begins with that others have computed."""

import pytest

from support.scheduling import make_engine, make_request, make_scheduler, run_step, run_to_end


def test_a_second_request_starts_from_the_firsts_full_blocks_but_computes_its_last_token():
    scheduler = make_scheduler()
    engine = make_engine(scheduler)
    for key in "ab":
        scheduler.add(make_request(key, 8, max_tokens=1))
        plan = scheduler.plan(0.0)
        scheduler.apply(engine.submit(plan).result(None), 0.0)
    assert plan.joins[0].num_computed == 4
    assert scheduler.stats.prompt_tokens_cached == 4


@pytest.mark.parametrize(
    "changes", [{"cache_scope": b"other"}, {"takes_hits": False}, {"enable": False}]
)
def test_no_hits_across_tenants_or_where_they_are_not_wanted(changes):
    scheduler = make_scheduler(enable_prefix_caching=changes.pop("enable", True))
    engine = make_engine(scheduler)
    scheduler.add(make_request("a", 16, max_tokens=1))
    run_to_end(scheduler, engine)
    scheduler.add(make_request("b", 16, max_tokens=1, **changes))
    plan, _ = run_step(scheduler, engine)
    assert plan.joins[0].num_computed == 0


def test_what_two_requests_computed_at_once_is_cached_once():
    scheduler = make_scheduler()
    engine = make_engine(scheduler)
    scheduler.add(make_request("a", 9, max_tokens=1))
    scheduler.add(make_request("b", 9, max_tokens=1))
    run_step(scheduler, engine)
    assert scheduler.kv.num_cached == 2
    scheduler.add(make_request("c", 9, max_tokens=1))
    plan, _ = run_step(scheduler, engine)
    assert plan.joins[0].num_computed == 8
    run_to_end(scheduler, engine)
    assert scheduler.stats.blocks_evicted == 0
    scheduler.add(make_request("d", 60, token_ids=[7] * 60, max_tokens=1))
    run_to_end(scheduler, engine)
    assert scheduler.stats.blocks_evicted > 0
