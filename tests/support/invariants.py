"""What must hold of a scheduler after every plan and every step, whatever happened."""

from collections import Counter

from charonia.control import Scheduler


def check_invariants(scheduler: Scheduler) -> None:
    """Raise AssertionError where the state of blocks, rows or requests contradicts itself."""
    kv, limits = scheduler.kv, scheduler.limits
    running = scheduler._running.in_order()
    live = list(scheduler.requests)
    assert len(live) == scheduler.num_running + scheduler.num_waiting
    assert len(running) == len(set(running)) == scheduler.num_running
    assert set(running) == {r for r in live if r.row is not None}
    assert not any(r in scheduler._waiting for r in running)

    rows = [r.row for r in running]
    assert len(set(rows)) == len(rows)
    ended = scheduler._ended
    assert all(r.is_ended and r.num_in_flight for r in ended), "an ended request stays"
    rows += [r.row for r in ended]
    assert sorted(rows + scheduler._free_rows) == list(range(limits.max_num_seqs))

    references = Counter(block_id for r in [*live, *ended] for block_id in r.block_ids)
    assert 0 not in references
    for block_id in range(1, kv.num_blocks):
        assert kv._refs[block_id] == references[block_id], f"block {block_id} leaks"
    free = [*kv._free._empty, *kv._free._cached]
    assert len(set(free)) == len(free)
    assert set(free) == {b for b in range(1, kv.num_blocks) if not references[b]}

    for block_id, key in enumerate(kv._key_of):
        assert key is None or block_id in kv._blocks_of[key]
    assert all(kv._key_of[b] == key for key, blocks in kv._blocks_of.items() for b in blocks)
    assert all(kv._key_of[b] is None for b in kv._free._empty)
    assert all(kv._key_of[b] is not None for b in kv._free._cached)

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


def _check_written_blocks_are_private(scheduler, request, references) -> None:
    for index in range(request.num_computed // scheduler.limits.block_size, len(request.block_ids)):
        assert references[request.block_ids[index]] == 1, "a block that is written is shared"


def _check_steps_in_flight(scheduler, live) -> None:
    steps = list(scheduler._in_flight)
    assert len(steps) <= scheduler.limits.max_steps_in_flight
    last = scheduler._step_id
    assert [step.step_id for step in steps] == list(range(last - len(steps), last))
    in_flight = Counter(request for step in steps for request in step.requests)
    most = 2 if scheduler.limits.overlaps else 1
    assert max(in_flight.values(), default=0) <= most, "too many steps compute the same request"
    counted = {r: r.num_in_flight for r in [*live, *scheduler._ended] if r.num_in_flight}
    assert in_flight == counted
    ends = {r: r.num_computed for r in in_flight}
    for step in steps:
        num_tokens = sum(row.num_tokens + row.num_drafts for row in step.rows)
        assert num_tokens <= scheduler.limits.max_num_batched_tokens
        for request, row in zip(step.requests, step.rows, strict=True):
            assert request.row == row.row, "a request lost its row in mid-step"
            assert request.row not in scheduler._leaves
            ends[request] += row.num_tokens
            end = ends[request] + row.num_drafts
            assert end <= len(request.block_ids) * scheduler.limits.block_size
    for request, end in ends.items():
        assert request.num_computing == end - request.num_computed
        assert request.is_ended or end <= request.max_known
    assert not any(r.num_computing or r.num_sampling for r in live if not r.num_in_flight)


def check_parents_outlive_children(scheduler: Scheduler, parent_of: dict[bytes, bytes]) -> None:
    """Every cached key's parent key is cached too. `parent_of` is collected by the test."""
    for key in scheduler.kv._blocks_of:
        parent = parent_of.get(key)
        assert parent is None or parent in scheduler.kv._blocks_of, "an orphaned block"
