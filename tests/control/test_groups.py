"""Several samples of one prompt: who computes it, what they share, and what becomes of them."""

import pytest

from charonia.control import Group, Request
from charonia.errors import CharoniaError
from charonia.protocol import BlockCopy, RowSampling
from support.echo import echo_run
from support.stepping import Bench, make_request

SIZES = {"num_blocks": 65, "max_num_seqs": 4, "max_model_len": 64}


def make_group(num_prompt: int, num_samples: int, key: str = "g", **changes) -> list[Request]:
    group = Group(key)
    values = {"token_ids": list(range(num_prompt)), "max_tokens": 6} | changes
    return [
        make_request(
            f"{key}{index}",
            group=group,
            index=index,
            **values | {"token_ids": list(values["token_ids"])},
            sampling=RowSampling(seed=5 + index),
        )
        for index in range(num_samples)
    ]


def run(bench: Bench) -> dict[str, list[int]]:
    """Step until nothing is live; the tokens of all."""
    requests = list(bench.scheduler.requests)
    bench.ends()
    return {one.key: one.token_ids[one.num_prompt :] for one in requests}


def alone(request: Request, num_prompt: int) -> list[int]:
    return echo_run(
        request.token_ids[:num_prompt],
        seed=request.sampling.seed,
        max_tokens=request.max_tokens,
        vocab_size=256,
    )


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_prompt", [1, 2, 4, 5, 8, 9, 11])
def test_samples_share_all_full_blocks_of_the_prompt_and_copy_the_last_one(
    num_prompt, enable_prefix_caching
):
    bench = Bench(**SIZES, enable_prefix_caching=enable_prefix_caching)
    requests = make_group(num_prompt, 3)
    bench.add(*requests)
    first = bench.step()
    assert len(first.joins) == 1
    assert not first.copies
    leader = requests[0]
    second = bench.step()
    num_shared, num_left = divmod(num_prompt - 1, bench.scheduler.limits.block_size)
    for join, request in zip(second.joins, requests[1:], strict=True):
        assert join.num_computed == num_prompt - 1
        assert join.block_ids[:num_shared] == leader.block_ids[:num_shared]
        assert len(join.block_ids) == num_shared + (num_left > 0)
        assert not set(join.block_ids[num_shared:]) & set(leader.block_ids)
        assert request.num_cached == num_prompt - 1
    targets = [join.block_ids[num_shared] for join in second.joins if num_left]
    assert second.copies == [BlockCopy(leader.block_ids[num_shared], one) for one in targets]
    assert [row.num_tokens for row in second.rows] == [1, 1, 1]
    references = bench.scheduler.kv.num_references
    assert all(references(block_id) == 3 for block_id in leader.block_ids[:num_shared])
    expected = {one.key: alone(one, num_prompt) for one in requests}
    assert run(bench) == expected
    assert bench.scheduler.kv.num_used == 0


def test_samples_without_a_row_wait_as_others_do():
    bench = Bench(**SIZES | {"max_num_seqs": 2})
    requests = make_group(9, 5)
    other = make_request("other", max_tokens=2)
    bench.add(*requests, other)
    expected = {one.key: alone(one, one.num_prompt) for one in (*requests, other)}
    assert bench.scheduler.num_waiting == 2  # the first one and the other
    bench.step()
    assert bench.running == {"g0", "other"}
    assert bench.scheduler.num_waiting == 4
    assert run(bench) == expected


def test_who_is_left_computes_the_prompt_when_its_first_sample_goes():
    bench = Bench(**SIZES, max_num_batched_tokens=4)
    requests = make_group(12, 3)
    bench.add(*requests)
    bench.step()
    bench.scheduler.finish("g0")
    plan = bench.step()
    assert [join.num_computed for join in plan.joins] == [4]  # what the first one had published
    expected = {one.key: alone(one, 12) for one in requests[1:]}
    assert run(bench) == expected


def test_all_samples_of_a_prompt_can_go_while_it_is_computed():
    bench = Bench(**SIZES, max_num_batched_tokens=4)
    requests = make_group(12, 3)
    bench.add(*requests)
    bench.step()
    for request in reversed(requests):
        bench.scheduler.finish(request.key)
    assert bench.scheduler.num_live == bench.scheduler.num_waiting == 0
    assert bench.scheduler.kv.num_used == 0
    assert bench.scheduler.plan(0.0) is None


def test_one_sample_that_goes_leaves_the_others_their_blocks():
    bench = Bench(**SIZES)
    requests = make_group(9, 3)
    bench.add(*requests)
    bench.step()
    bench.step()
    bench.scheduler.finish("g0")
    expected = {one.key: alone(one, 9) for one in requests[1:]}
    assert run(bench) == expected


def test_samples_begin_anew_with_a_new_engine():
    bench = Bench(**SIZES)
    requests = make_group(9, 3)
    bench.add(*requests)
    bench.engine.fail_next = 1
    plan = bench.scheduler.plan(0.0)
    with pytest.raises(CharoniaError):
        bench.engine.submit(plan).result(None)
    bench.scheduler.reset()
    expected = {one.key: alone(one, 9) for one in requests}
    assert run(bench) == expected


def test_a_fork_goes_on_with_the_draft_models_cache():
    """Only as far as the prompt has it, and both models' blocks are copied."""
    bench = Bench(**SIZES)
    leader, sample = make_group(9, 2)
    bench.add(leader, sample)
    bench.step()
    leader.num_draft_computed = 7
    plan = bench.step()
    assert [join.num_draft_computed for join in plan.joins] == [7]
    leader.num_draft_computed = 0  # the engine of this test has none
