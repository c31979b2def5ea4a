"""Hostile clients on the real server, beside a neighbour who must not notice.

The attacks are in `support.hostile`; loadtests/hostile.py runs them at full strength and measures.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import infer_grpc, one_torch_thread, request_inputs
from support.hostile.catalogue import ATTACKS
from support.hostile.target import Attack
from support.hostile.trial import Arena
from support.leftovers import leftovers
from support.long import one_in

ROOMY = ("num_gpu_blocks_override=2049", "max_num_seqs=64")


@pytest.fixture(scope="module")
def hostile_server(small_checkpoint: Path) -> Iterator[TritonServer]:
    """A server of their own, whose memory nobody else uses; nothing is left of it."""
    with (
        one_torch_thread(),
        running_server(model=small_checkpoint, settings=ROOMY) as server,
    ):
        runtime_dir = server.runtime_dir
        yield server
    assert leftovers(runtime_dir) == []


@pytest.fixture(scope="module")
def arena(hostile_server: TritonServer) -> Arena:
    return Arena(hostile_server)


@pytest.mark.parametrize(
    "attack", one_in(6, ((attack,) for attack in ATTACKS.values())), ids=lambda attack: attack.name
)
def test_a_neighbour_does_not_notice_an_attack_and_nothing_is_left_of_it(
    arena: Arena, attack: Attack
) -> None:
    outcomes = [arena.trial(attack)]
    if outcomes[0].excess:  # what allocators keep is there for the next time, and grows no more
        outcomes.append(arena.trial(attack))
    for outcome in outcomes:
        print(outcome)
        assert outcome.failure is None
        assert outcome.num_requests > 0
        assert outcome.noticed is None
        assert outcome.replaced == []
        assert outcome.num_restarts == 0
        assert outcome.left_open == {}
    assert outcomes[-1].excess == {}


def test_the_server_serves_everybody_after_all_attacks(hostile_server: TritonServer) -> None:
    answer = infer_grpc(hostile_server, request_inputs("a", {"max_tokens": 3}))
    assert answer.text.startswith("a")
