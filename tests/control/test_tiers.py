"""What is saved to slower tiers, and the tiers themselves."""

import pytest

from charonia.control import Tiers
from charonia.control.cache import tiers
from charonia.control.state.stats import SchedulerStats
from charonia.protocol import BlockLoad, KeptBlocks, SlotContent, TierInfo
from support.echo import SLOT_BYTES
from support.invariants import check_invariants
from support.stepping import make_request
from support.tiering import fill, loads_of, make_bench, make_prompt, run, saves_of, wash_out

SAVED_AT_ONCE = tiers.SAVED_AT_ONCE // SLOT_BYTES
SAVED_ALONE = tiers.SAVED_ALONE // SLOT_BYTES


def test_what_was_hit_is_saved_and_nothing_else():
    bench = make_bench()
    assert saves_of(run(bench, make_prompt("a"))) == []
    saves = saves_of(run(bench, make_prompt("b")))
    assert len({save.block_id for save in saves}) == len(saves) == 8
    assert bench.scheduler.stats.blocks_saved == 8
    assert dict(bench.scheduler.tier_sizes()) == {"host": 8}
    assert saves_of(run(bench, make_prompt("c"))) == [], "they are saved"
    assert saves_of(wash_out(bench)) == []


def test_what_could_not_be_saved_is_not_told_of_as_saved():
    bench = make_bench(100, 100)
    bench.engine.full_tiers = {1}
    run(bench, make_prompt("a"))
    assert len(saves_of(run(bench, make_prompt("b")))) == 16
    assert dict(bench.scheduler.tier_sizes()) == {"host": 8, "file": 0}
    assert bench.scheduler.stats.blocks_saved == 8
    bench.engine.full_tiers = set()
    assert len(saves_of(run(bench, make_prompt("c")))) == 8, "there is room now"
    assert dict(bench.scheduler.tier_sizes()) == {"host": 8, "file": 8}
    assert bench.scheduler.stats.blocks_saved == 16
    check_invariants(bench.scheduler)


def test_what_could_not_be_saved_and_has_another_slot_now_stays():
    info = TierInfo(name="file", num_slots=2, contents=[])
    stats = SchedulerStats()
    kept = tiers.Tiers(KeptBlocks(hash_secret=b"", slot_bytes=1, tiers=[info]), stats)
    for block_id, key in enumerate([b"a", b"b", b"c", b"a"]):  # the last one in another slot
        kept.save(block_id, key, has_draft=False)
    saves = kept.take_saves()
    assert [save.slot for save in saves] == [0, 1, 0, 1]
    kept.note_saved(saves, [0])
    assert b"a" in kept
    assert stats.blocks_saved == 3


def test_a_tier_may_have_more_slots_than_could_be_listed():
    info = TierInfo(name="file", num_slots=2**50, contents=[SlotContent(1, b"a", False)])
    kept = tiers.Tiers(KeptBlocks(hash_secret=b"", slot_bytes=1, tiers=[info]), SchedulerStats())
    for key in (b"b", b"c"):
        kept.save(0, key, has_draft=False)
    assert [save.slot for save in kept.take_saves()] == [0, 2]


def test_few_are_saved_beside_rows_that_compute_and_more_in_steps_without():
    prompt = [7] * (4 * (SAVED_ALONE + SAVED_AT_ONCE + 3) + 1)
    bench = make_bench(300, num_blocks=400, max_model_len=400, max_num_batched_tokens=400)
    run(bench, make_request("a", token_ids=prompt, max_tokens=1))
    plans = run(bench, make_request("b", token_ids=prompt, max_tokens=1))
    assert [len(plan.saves) for plan in plans] == [SAVED_AT_ONCE, SAVED_ALONE, 3]
    assert [len(plan.rows) for plan in plans] == [1, 0, 0]


def test_what_is_evicted_before_it_was_saved_is_saved_before_it_is_written_to():
    prompt = [7] * 122  # 30 full blocks
    bench = make_bench(max_num_batched_tokens=160)
    run(bench, make_request("a", token_ids=prompt, max_tokens=1))
    bench.add(make_request("b", token_ids=prompt, max_tokens=1))
    assert len(bench.step().saves) == SAVED_AT_ONCE
    bench.add(make_request("z", token_ids=list(range(100, 250)), max_tokens=6))
    assert len(bench.step().saves) == 30 - SAVED_AT_ONCE
    bench.ends()
    request = make_request("c", token_ids=prompt, max_tokens=1)
    run(bench, request)
    assert request.num_cached == 120


def test_a_step_never_saves_more_than_one_that_nothing_waits_for():
    prompt = [7] * (4 * 3 * SAVED_ALONE + 1)
    bench = make_bench(1000, num_blocks=400, max_model_len=1600, max_num_batched_tokens=1600)
    run(bench, make_request("a", token_ids=prompt, max_tokens=1))
    bench.add(make_request("b", token_ids=prompt, max_tokens=1))
    assert len(bench.step().saves) == SAVED_AT_ONCE
    kv = bench.scheduler.kv
    to_save = list(kv._to_save)
    bench.add(make_request("z", token_ids=[i % 250 for i in range(1200)], max_tokens=1))
    assert len(bench.step().saves) == SAVED_ALONE
    left = [key for key in to_save if kv.find([key])]
    assert list(kv._to_save) == left != [], "what was not evicted waits for its turn"
    bench.ends()


def test_each_tier_gets_what_it_lacks_and_the_first_one_that_has_it_gives_it():
    bench = make_bench(4, 100)
    run(bench, make_prompt("a"))
    saves = saves_of(run(bench, make_prompt("b")))
    assert sorted(save.tier for save in saves) == [0] * 8 + [1] * 8
    assert dict(bench.scheduler.tier_sizes()) == {"host": 4, "file": 8}
    wash_out(bench)
    loads = loads_of(run(bench, make_prompt("c")))
    assert [load.tier for load in loads] == [0] * 4 + [1] * 4, "the first ones are kept longest"


def test_what_was_asked_for_longest_ago_makes_room():
    bench = make_bench(16)
    for token_id in (1, 2, 1, 3):
        run(bench, make_prompt("a", token_id))
        run(bench, make_prompt("b", token_id))
    wash_out(bench)
    plans = run(bench, make_prompt("a", 1))
    assert len(loads_of(plans)) == 8
    assert loads_of(run(bench, make_prompt("a", 2))) == []


@pytest.mark.parametrize("tier_sizes", [(1,), (2,), (1, 1)])
def test_tiers_of_next_to_no_slots_do_no_harm(tier_sizes):
    bench = make_bench(*tier_sizes)
    for _ in range(3):
        fill(bench)
    bench.scheduler.reset(tiers=bench.tiers(bench.scheduler.stats))
    fill(bench)


def test_what_a_tier_holds_outlives_an_epoch():
    bench = make_bench()
    fill(bench)
    bench.scheduler.reset(epoch=5, tiers=bench.tiers(bench.scheduler.stats))
    request = make_prompt("c")
    assert len(loads_of(run(bench, request))) == 8
    assert request.num_cached == 32
    bench.scheduler.reset()
    assert dict(bench.scheduler.tier_sizes()) == {}
    assert loads_of(run(bench, make_prompt("d"))) == []


def test_a_failed_load_frees_its_slot_once():
    contents = [SlotContent(0, b"a", False), SlotContent(1, b"b", True)]
    stats = SchedulerStats()
    info = TierInfo(name="host", num_slots=2, contents=contents)
    kept = Tiers(KeptBlocks(hash_secret=b"s", slot_bytes=2**30, tiers=[info]), stats)
    assert kept.blocks_in(1000) == 1, "of large blocks as well"
    load, has_draft = kept.load(5, b"b")
    assert (load, has_draft) == (BlockLoad(0, 1, 5, b"b"), True)
    kept.drop([load])
    kept.drop([load])
    assert b"b" not in kept
    assert stats.loads_failed == 2
    kept.save(7, b"c", False)
    kept.save(8, b"d", False)
    assert [(save.slot, save.key) for save in kept.take_saves()] == [(1, b"c"), (0, b"d")]
    assert b"a" not in kept
