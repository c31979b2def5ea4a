"""Which drafts a step has room for."""

from collections import deque
from dataclasses import replace

import pytest

from charonia.control import FixedDepth, Speculation
from charonia.control.state.step import NO_DRAFT, Draft, Step
from charonia.protocol import RowStep
from support.stepping import LIMITS, make_request


@pytest.mark.parametrize(
    ("budget", "draft"),
    [
        (3, NO_DRAFT),
        (4, Draft(1, [], 3)),
        (9, Draft(4, [], 3)),
    ],
)
def test_a_draft_model_that_lags_a_little_behind_waits_until_it_can_guess_as_well(budget, draft):
    request = make_request("a")
    request.token_ids.append(7)
    request.num_computed, request.num_draft_computed = 8, 6
    step = Step(0, 0.0, budget, budget, requests=[request], rows=[RowStep(0, 1)])
    speculation = Speculation(max_drafts=4, policy=FixedDepth())
    found = speculation.draft(step, replace(LIMITS, max_draft_len=64))
    assert found == [(0, draft)]


def guessing(budget: int) -> tuple[Step, Speculation]:
    """A step of a request whose client has said what comes, with room for so many tokens more."""
    request = make_request("a", expected_ids=deque([7, 8, 9]))
    request.num_computed = 7
    step = Step(0, 0.0, budget, budget, requests=[request], rows=[RowStep(0, 1)])
    return step, Speculation(max_drafts=4, policy=FixedDepth())


@pytest.mark.parametrize(("budget", "draft_ids"), [(0, []), (2, [7, 8]), (9, [7, 8, 9])])
def test_as_much_of_a_clients_guess_is_drafted_as_there_is_room_for(budget, draft_ids):
    step, speculation = guessing(budget)
    found = [draft.draft_ids for _, draft in speculation.draft(step, LIMITS)]
    assert found == ([draft_ids] if draft_ids else [])


def test_nobody_rests_while_a_clients_guess_is_to_be_checked():
    step, speculation = guessing(4)
    assert not speculation.rests_after(step)
