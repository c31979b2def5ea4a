"""What a tenant, or a salt, can learn of what others have asked for: nothing.

One of two asks for what it guesses that the other one asks for, and sees how many tokens of its
prompts were cached, and when it gets what. All that a step computes is the same whether it guesses
right or wrong, and so is the time that this takes.
"""

import itertools
import random
from collections.abc import Callable
from functools import partial

import pytest

from charonia.control import PrefixSharing
from charonia.control.cache.eviction import EVICTIONS, Eviction
from charonia.control.policies import (
    DisplacementByPriority,
    Policy,
    by_arrival,
    by_priority,
    fair,
    ranked,
)
from charonia.core.generation_request import cache_scope
from charonia.protocol import SamplingParams
from support.long import one_in
from support.stepping import Bench, make_request

NUM_STEPS, NUM_DOCUMENTS, LONGEST, VOCAB = 150, 5, 24, 1000
SCOPES = [
    (SamplingParams(tenant="a"), SamplingParams(tenant="b")),
    (SamplingParams(cache_salt="a"), SamplingParams(cache_salt="b")),
    (SamplingParams(tenant="a", cache_salt="b"), SamplingParams(tenant="ab")),
]
POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": partial(ranked, by_arrival),
    "priority": lambda: ranked(by_priority(), DisplacementByPriority(by_priority())),
    "fair": lambda: fair(by_arrival, lambda tenant: 1.0),
}


def seen(
    scopes: tuple[SamplingParams, SamplingParams],
    eviction: Callable[[int], Eviction],
    policy: str,
    *,
    guesses_right: bool,
    tier_sizes: tuple[int, ...] = (),
) -> list[object]:
    """What each step computed and moved, and what of the guesser's prompts was cached."""
    draw = random.Random(7)
    bench = Bench(
        POLICIES[policy](),
        eviction=eviction,
        cache_weight_of=(lambda tenant: 1.0) if policy == "fair" else None,
        sharing=PrefixSharing(),
        vocab_size=VOCAB,
        num_blocks=33,
        max_num_seqs=4,
        tier_sizes=tier_sizes,
    )
    guessers = []
    found: list[object] = []
    for step in range(NUM_STEPS):
        for is_guess in (False, True):
            if draw.random() < 0.2:
                first = 100 * draw.randrange(NUM_DOCUMENTS)
                first += 500 if is_guess and not guesses_right else 0
                length = draw.randrange(4, LONGEST + 1)
                request = make_request(
                    f"{step} {is_guess}",
                    draw.randrange(2),
                    token_ids=list(range(first, first + length)),
                    tenant=scopes[is_guess].tenant,
                    cache_scope=cache_scope(scopes[is_guess]),
                    max_tokens=draw.randrange(1, 12),
                )
                bench.add(request)
                if is_guess:
                    guessers.append(request)
        if bench.scheduler.num_live:
            plan = bench.step()
            found.append((plan.rows, len(plan.saves), len(plan.loads)))
    found += [(request.num_cached, request.num_preemptions) for request in guessers]
    assert any(request.num_cached for request in guessers), "it finds what it asked for itself"
    assert bench.scheduler.stats.blocks_evicted
    assert bool(bench.scheduler.stats.blocks_loaded) == bool(tier_sizes)
    return found


@pytest.mark.parametrize(
    ("eviction", "policy", "scopes", "tier_sizes"),
    one_in(5, itertools.product(EVICTIONS, POLICIES, SCOPES, [(), (12, 40)])),
)
def test_who_guesses_what_others_ask_for_cannot_tell_whether_that_is_right(
    scopes: tuple[SamplingParams, SamplingParams],
    policy: str,
    eviction: str,
    tier_sizes: tuple[int, ...],
) -> None:
    right, wrong = (
        seen(
            scopes,
            EVICTIONS[eviction],
            policy,
            guesses_right=guesses_right,
            tier_sizes=tier_sizes,
        )
        for guesses_right in (True, False)
    )
    assert right == wrong


def test_it_could_tell_within_one_scope() -> None:
    scopes = (SamplingParams(tenant="a"), SamplingParams(tenant="a"))
    right, wrong = (
        seen(scopes, EVICTIONS["lru"], "fcfs", guesses_right=guesses_right)
        for guesses_right in (True, False)
    )
    assert right != wrong
