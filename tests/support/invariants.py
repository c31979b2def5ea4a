"""Invariants of a scheduler after every plan and every step, whatever happened."""

from collections import Counter

from charonia.control import Group, Request, Scheduler
from charonia.control.cache import KVCache
from charonia.control.cache.eviction.scores import ByScore
from charonia.control.cache.prefix_index import ROOT
from charonia.control.state.step import Fetch
from charonia.protocol import DEFAULT_CACHE_PRIORITY


def check_invariants(scheduler: Scheduler) -> None:
    """Raise AssertionError where the state of blocks, rows or requests contradicts itself."""
    kv, limits = scheduler.kv, scheduler.limits
    epoch, waiting_order = scheduler._epoch, scheduler._policy.waiting
    running = scheduler._policy.running.in_order()
    live = list(scheduler.requests)
    parked = {r for r in live if r in r.group.parked}
    assert len(live) == scheduler.num_running + scheduler.num_waiting + len(parked)
    for group in {r.group for r in live}:
        _check_group(group, live)
    assert len(running) == len(set(running)) == scheduler.num_running
    assert set(running) == {r for r in live if r.row is not None}
    assert not any(r in waiting_order for r in running)

    assert all(r in waiting_order for r in epoch._lookups._pending)
    fetching = epoch.transfers._fetching
    had_loaded = set() if fetching is None else {r.key for r in fetching._num_loaded}
    waiting = {r.key for r in live if r.row is None and r not in parked}
    assert had_loaded <= waiting, "what was loaded is counted on"
    not_looked_up = {r.key for r in epoch._lookups._pending}
    assert set(kv._reserved) <= waiting - (not_looked_up - had_loaded)

    rows = [r.row for r in running]
    assert len(set(rows)) == len(rows)
    ended = scheduler._live.ended
    assert all(r.is_ended and r.num_in_flight for r in ended), "an ended request stays"
    rows += [r.row for r in ended]
    assert sorted(rows + epoch._rows._free) == list(range(limits.max_num_seqs))

    references = Counter(block_id for r in [*live, *ended] for block_id in r.block_ids)
    references.update(block_id for fetch in fetches_of(scheduler) for block_id in fetch.block_ids)
    assert 0 not in references
    for block_id in range(1, kv.num_blocks):
        assert kv.num_references(block_id) == references[block_id], f"block {block_id} leaks"
    check_cache(kv)

    for r in live:
        assert r.num_computed < len(r.token_ids)
        if r.row is None:
            assert not r.block_ids
            assert r.num_computed == 0
        else:
            assert len(r.block_ids) >= limits.blocks_for(r.num_computed)
            assert r.num_published <= r.num_computed // limits.block_size
            _check_written_blocks_are_private(scheduler, r, references)
    _check_steps_in_flight(scheduler, live)


def fetches_of(scheduler: Scheduler) -> list[Fetch]:
    """Return the loads of steps in flight."""
    fetching = scheduler._epoch.transfers._fetching
    fetches = [] if fetching is None else list(fetching.under_way)
    in_flight = [fetch for step in scheduler._epoch._in_flight for fetch in step.fetches]
    assert sorted(map(id, fetches)) == sorted(map(id, in_flight))
    return fetches


def awaits_loads(scheduler: Scheduler, request: Request) -> bool:
    """Return whether a request waits for blocks that are loaded, or will be."""
    fetching = scheduler._epoch.transfers._fetching
    if fetching is None:
        return False
    blocks = scheduler._epoch.blocks
    missing = blocks.missing_keys(request, blocks.hits(request), 1)
    is_loaded_for_another = bool(missing) and missing[0] in fetching._keys_under_way
    return is_loaded_for_another or request in fetching._under_way or request in fetching._to_fetch


def _check_group(group: Group, live: list[Request]) -> None:
    """Check that a parked request waits for a leader, which will compute the prompt."""
    assert set(group.members) == {r for r in live if r.group is group}
    assert all(r.row is None and not r.num_generated for r in group.parked)
    leader = group.leader
    assert leader is not None or not group.parked
    if leader is not None:
        assert leader in group.members
        assert leader not in group.parked


def check_cache(kv: KVCache) -> None:
    """Raise AssertionError where blocks, entries and references contradict each other."""
    blocks = range(1, kv.num_blocks)
    pool, index, references = kv._pool, kv._index, kv._pool._references
    assert len(set(pool._empty)) == len(pool._empty)
    assert all(index.entry_of(block_id) == ROOT for block_id in [*pool._empty, *pool._aside])
    unused = {*pool._empty, *pool._aside}
    assert len(unused) == len(pool._empty) + len(pool._aside)
    assert not any(references[block_id] for block_id in unused)
    cached = {b for b in blocks if not references[b]} - unused
    assert kv.num_cached == len(cached)
    assert all(index.entry_of(block_id) != ROOT for block_id in cached)
    assert kv.num_used + kv.num_free == kv.num_usable == kv.num_blocks - 1 - len(pool._aside)

    waiting = Counter(entry for entries in kv._reserved.values() for entry in entries)
    assert all(kv._num_waiting[entry] == waiting[entry] for entry in blocks)
    assert kv._num_reserved == sum(index.entry_of(block_id) in waiting for block_id in cached)
    assert kv._num_reservations == waiting.total()

    entries = set(index._by_key.values())
    assert sorted([*entries, *index._unused]) == [*blocks]
    for entry in entries:
        held = [index.block_of(entry), *index._duplicates.get(entry, [])]
        assert {index.entry_of(block_id) for block_id in held} == {entry}
        assert len(held) == 1 or all(references[block_id] for block_id in held)
        parent = index._parent_of[entry]
        assert parent == ROOT or parent in entries, "an orphaned block"
        if not references[held[0]]:
            children = [one for one in entries if index._parent_of[one] == entry]
            assert not any(references[index.block_of(child)] for child in children)
    assert len(index) == len(entries)
    for parent in (ROOT, *entries):
        children, entry = set(), index.child_of(parent)
        while entry:
            children.add(entry)
            younger = index._younger[entry]
            assert (index._older[younger] if younger else index._youngest_of[parent]) == entry
            entry = younger
        assert children == {one for one in entries if index._parent_of[one] == parent}
    _check_retention(kv, entries)
    _check_shares(kv, entries)


def _check_retention(kv: KVCache, entries: set[int]) -> None:
    """Every free entry that nobody waits for comes up in its turn, and half of all is for all."""
    retention, index, default = kv._retention, kv._index, DEFAULT_CACHE_PRIORITY
    if retention is None:
        return
    priority = retention._priority
    assert all(priority[entry] == default for entry in index._unused)
    protected: set[int] = set()
    for entry in (entry for entry in entries if priority[entry] > default):
        one = entry
        while one and one not in protected:
            protected.add(one)
            one = index.parent_of(one)
    assert retention.num_protected == kv.num_retained == len(protected)
    assert len(protected) <= (kv.num_blocks - 1) // 2
    children = Counter(index.parent_of(entry) for entry in protected)
    blocks = range(kv.num_blocks)
    assert all(retention._num_protected_children[entry] == children[entry] for entry in blocks)
    free = {entry for entry in entries if kv._is_ordered(entry)}
    assert {entry for entry in blocks if retention._is_free[entry]} == free
    low = {entry for entry in free if priority[entry] < default and not index.child_of(entry)}
    high = {entry for entry in free if priority[entry] > default and not children[entry]}
    ordered = {entry for entry in free if priority[entry] == default and not children[entry]}
    assert _members(retention._low, kv) == low
    assert _members(retention._high, kv) == high
    assert retention._num_ordered == len(ordered)
    assert bool(free) == bool(low or high or ordered), "nothing comes up for eviction"
    expiring = {e for e in free if priority[e] != default and retention._ttl_ms[e]}
    assert _members(retention._expiring, kv) == expiring


def _check_shares(kv: KVCache, entries: set[int]) -> None:
    """Each block with content is somebody's, and whoever has a free entry can be asked for it."""
    shares = kv._shares
    if shares is None:
        return
    blocks = range(1, kv.num_blocks)
    empty = {*kv._pool._empty, *kv._pool._aside}
    assert {block_id for block_id in blocks if shares._owner[block_id] is None} == empty
    counts = Counter(
        shares._owner_of(block_id).name for block_id in blocks if block_id not in empty
    )
    assert {name: owner.num_blocks for name, owner in shares._tenants.items()} == counts
    free = {entry for entry in entries if kv._is_ordered(entry)}
    if (retention := kv._retention) is not None:
        priority, children = retention._priority, retention._num_protected_children
        free = {e for e in free if priority[e] == DEFAULT_CACHE_PRIORITY and not children[e]}
    givers = {entry: giver for entry in blocks if (giver := shares._giver[entry]) is not None}
    assert set(givers) == free
    num_free = Counter(giver.name for giver in givers.values())
    for name, owner in shares._tenants.items():
        assert shares._by_number[owner.number] is owner
        assert owner.num_free == num_free[name]
        assert {entry for entry in owner.in_line if givers[entry] is owner} == set(owner.in_line)
        assert (shares._givers.score_of(owner.number) >= 0) == (owner.num_free > 0)
    assert len(shares._unused) + len(shares._tenants) == kv.num_blocks
    assert len(shares._givers) == len(num_free)


def _members(order: ByScore, kv: KVCache) -> set[int]:
    found = {entry for entry in range(kv.num_blocks) if order.score_of(entry) >= 0}
    assert len(order) == len(found)
    return found


def _check_written_blocks_are_private(scheduler, request, references) -> None:
    for index in range(request.num_computed // scheduler.limits.block_size, len(request.block_ids)):
        assert references[request.block_ids[index]] == 1, "a block that is written is shared"


def _check_steps_in_flight(scheduler, live) -> None:
    steps = list(scheduler._epoch._in_flight)
    assert len(steps) <= scheduler.limits.max_steps_in_flight
    last = scheduler._epoch._next_step_id
    assert [step.step_id for step in steps] == list(range(last - len(steps), last))
    in_flight = Counter(request for step in steps for request in step.requests)
    most = 2 if scheduler.limits.overlaps else 1
    assert max(in_flight.values(), default=0) <= most, "too many steps compute the same request"
    counted = {r: r.num_in_flight for r in [*live, *scheduler._live.ended] if r.num_in_flight}
    assert in_flight == counted
    ends = {r: r.num_computed for r in in_flight}
    for step in steps:
        num_tokens = sum(row.num_tokens + row.num_drafts for row in step.rows)
        assert num_tokens <= scheduler.limits.max_num_batched_tokens
        for request, row in zip(step.requests, step.rows, strict=True):
            assert request.row == row.row, "a request lost its row in mid-step"
            assert request.row not in scheduler._epoch._rows._leaves
            ends[request] += row.num_tokens
            end = ends[request] + row.num_drafts
            assert end <= len(request.block_ids) * scheduler.limits.block_size
    for request, end in ends.items():
        assert request.num_computing == end - request.num_computed
        assert request.is_ended or end <= request.max_known
    assert not any(r.num_computing or r.num_sampling for r in live if not r.num_in_flight)


def check_parents_outlive_children(scheduler: Scheduler, parent_of: dict[bytes, bytes]) -> None:
    """Every cached key's parent key is cached too. `parent_of` is collected by the test."""
    index = scheduler.kv._index
    for key in index._by_key:
        parent = parent_of.get(key)
        assert parent is None or index.entry_with(parent) != ROOT, "an orphaned block"
