"""Which drafts a step has room for."""

from dataclasses import replace

import pytest

from charonia.control import FixedDepth, Speculation
from charonia.control.step import NO_DRAFT, Draft, Step
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
