"""Which heads, outputs, token ids and layers of a model each rank has."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.data.comm import Place
from charonia.data.model.shard import (
    intermediate_share,
    local_kv_heads,
    num_local_kv_heads,
    query_heads,
    stage_layers,
    vocab_range,
    vocab_share,
)
from charonia.data.model.spec import ModelSpec, RopeSpec
from charonia.errors import ConfigError


def spec_of(**values: Any) -> ModelSpec:
    defaults = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "sliding_window": None,
        "rms_norm_eps": 1e-6,
        "rope": RopeSpec(theta=10_000.0),
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "is_tied": False,
        "dtype": "float32",
        "eos_token_ids": (),
    }
    return ModelSpec(**(defaults | values))


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_every_query_head_finds_its_own_kv_head_in_its_part(
    num_kv_heads: int, group: int, data: st.DataObject
) -> None:
    num_heads = num_kv_heads * group
    spec = spec_of(num_heads=num_heads, num_kv_heads=num_kv_heads)
    divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    num_parts = data.draw(st.sampled_from(divisors))
    for part in range(num_parts):
        place = Place(part, num_parts)
        heads, kv_heads = query_heads(spec, place), local_kv_heads(spec, place)
        assert len(heads) % len(kv_heads) == 0
        assert len(kv_heads) == num_local_kv_heads(spec, place)
        local_group = len(heads) // len(kv_heads)
        for local, head in enumerate(heads):
            assert kv_heads[local // local_group] == head // group


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_parts", "expected"),
    [
        (8, 4, 2, [[0, 1], [2, 3]]),
        (4, 2, 4, [[0], [0], [1], [1]]),
        (12, 6, 4, [[0, 0, 1], [1, 2, 2], [3, 3, 4], [4, 5, 5]]),
        (9, 3, 1, [[0, 1, 2]]),
    ],
    ids=["sharded", "replicated", "uneven", "whole"],
)
def test_kv_heads_are_kept_no_more_often_than_even_groups_need(
    num_heads: int, num_kv_heads: int, num_parts: int, expected: list[list[int]]
) -> None:
    spec = spec_of(num_heads=num_heads, num_kv_heads=num_kv_heads)
    places = [Place(part, num_parts) for part in range(num_parts)]
    assert [local_kv_heads(spec, place) for place in places] == expected


@pytest.mark.parametrize(
    ("intermediate_size", "num_parts", "expected"),
    [
        (75, 1, 75),
        (100, 2, 50),
        (100, 4, 32),  # 25 would be odd
        (100, 3, 48),
        (8, 4, 2),
        (18, 6, 16),  # the last parts have nothing but zeros
    ],
)
def test_the_mlp_is_padded_only_where_it_must_be(
    intermediate_size: int, num_parts: int, expected: int
) -> None:
    spec = spec_of(intermediate_size=intermediate_size)
    shares = [intermediate_share(spec, Place(part, num_parts)) for part in range(num_parts)]
    assert {share.size for share in shares} == {expected}
    assert [i for share in shares for part in share.ranges for i in part] == [
        *range(intermediate_size)
    ]


def test_the_last_parts_may_go_beyond_the_vocabulary() -> None:
    spec = spec_of(vocab_size=5)
    ids = [vocab_range(spec, Place(part, 4)) for part in range(4)]
    assert ids == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert [vocab_share(spec, Place(part, 4)).ranges for part in range(4)] == [
        (range(2),),
        (range(2, 4),),
        (range(4, 5),),
        (),
    ]


@given(st.integers(1, 80), st.integers(1, 80))
def test_stages_are_as_even_as_can_be_and_the_last_is_not_the_longest(
    num_layers: int, num_stages: int
) -> None:
    num_stages = min(num_layers, num_stages)
    spec = spec_of(num_layers=num_layers)
    stages = [
        stage_layers(spec, Place(stage=stage, num_stages=num_stages)) for stage in range(num_stages)
    ]
    assert [layer for stage in stages for layer in stage] == [*range(num_layers)]
    sizes = [len(stage) for stage in stages]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_parts_that_do_not_divide_the_heads_are_refused() -> None:
    spec = spec_of(num_heads=12, num_kv_heads=6)
    with pytest.raises(ConfigError) as caught:
        num_local_kv_heads(spec, Place(0, 8))
    assert str(caught.value) == (
        "tensor_parallel_size = 8 does not divide the model's 12 attention heads; accepted are"
        " 1, 2, 3, 4, 6, 12"
    )


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        stage_layers(spec_of(num_layers=2), Place(stage=0, num_stages=3))
    assert str(caught.value) == (
        "pipeline_parallel_size = 3 is more than the model's 2 layers; accepted are 1 to 2"
    )
