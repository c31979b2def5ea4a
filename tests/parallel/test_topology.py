"""Which ranks form a group, for every layout."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.config import EngineArgs, SpeculativeConfig
from charonia.data.comm import Place
from charonia.parallel.topology import (
    DRAFT_GROUP,
    LOGITS_GROUP,
    Topology,
    entry_group,
    parts_group,
)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    num_parts = draw(st.integers(1, 8))
    return Topology(num_parts, draw(st.integers(1, 6)), draw(st.integers(0, num_parts)))


@given(topologies())
def test_places_count_the_parts_of_one_stage_after_the_other(topology: Topology) -> None:
    places = [topology.place(rank) for rank in range(topology.num_ranks)]
    assert places == [
        Place(part, topology.num_parts, stage, topology.num_stages)
        for stage in range(topology.num_stages)
        for part in range(topology.num_parts)
    ]


@given(topologies())
def test_a_group_has_two_ranks_and_more_and_none_of_them_twice(topology: Topology) -> None:
    for ranks in topology.groups().values():
        assert len(ranks) > 1
        assert all(first < second for first, second in pairwise(ranks))
        assert set(ranks) <= set(range(topology.num_ranks))


@given(topologies())
def test_the_parts_of_a_stage_are_a_group_in_their_order(topology: Topology) -> None:
    groups = topology.groups()
    for stage in range(topology.num_stages):
        ranks = [r for r in range(topology.num_ranks) if topology.place(r).stage == stage]
        assert groups.get(parts_group(stage)) == (ranks if len(ranks) > 1 else None)


@given(topologies())
def test_a_rank_is_entered_from_the_same_part_of_the_stage_before(topology: Topology) -> None:
    groups = topology.groups()
    for rank in range(topology.num_ranks):
        here = topology.place(rank)
        if here.is_first:
            assert entry_group(rank) not in groups
            continue
        before, last = groups[entry_group(rank)]
        assert last == rank
        there = topology.place(before)
        assert (there.part, there.stage) == (here.part, here.stage - 1)


@given(topologies())
def test_logits_come_from_the_first_part_of_the_last_stage(topology: Topology) -> None:
    pair = topology.groups().get(LOGITS_GROUP)
    if topology.num_stages == 1:
        assert pair is None
    else:
        assert pair is not None
        assert pair[0] == 0
        place = topology.place(pair[1])
        assert place.is_last
        assert place.part == 0


@given(topologies())
def test_the_draft_model_is_whole_on_the_first_ranks(topology: Topology) -> None:
    count = topology.num_draft_parts
    places = [topology.draft_place(rank) for rank in range(topology.num_ranks)]
    assert places[:count] == [Place(part, count) for part in range(count)]
    assert not any(places[count:])
    assert topology.groups().get(DRAFT_GROUP) == (list(range(count)) if count > 1 else None)


@given(topologies())
def test_no_group_has_another_ones_name(topology: Topology) -> None:
    # As many groups as there are: one in the dictionary does not stand for two.
    parts, stages = topology.num_parts, topology.num_stages
    expected = stages * (parts > 1) + parts * (stages - 1)
    expected += (stages > 1) + (topology.num_draft_parts > 1)
    assert len(topology.groups()) == expected


@pytest.mark.parametrize(
    ("config", "num_draft_parts"),
    [
        (None, 0),
        (SpeculativeConfig(method="ngram"), 0),
        (SpeculativeConfig(model="draft"), 1),
        (SpeculativeConfig(model="draft", draft_tensor_parallel_size=3), 3),
    ],
    ids=["none", "ngram", "whole", "split"],
)
def test_a_topology_is_read_from_the_engines_arguments(
    config: SpeculativeConfig | None, num_draft_parts: int
) -> None:
    args = EngineArgs(
        model="m",
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
        speculative_config=config,
    )
    assert Topology.of(args) == Topology(4, 2, num_draft_parts)
