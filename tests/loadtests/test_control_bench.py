"""The benchmark of the control plane, in small: what it times is what it says."""

from dataclasses import replace

import pytest

from control_bench import COLUMNS, GOAL_MS, WITH_PEAK, Case, measure, policies, table
from control_kinds import KINDS, URGENT, Bench, Kind, Size

SIZE = Size(rows=4, waiting=8, tenants=2, steps=3)
CASE = Case("fair", "churn", False, 256, 10_000, 256, 0.05, 0.3, 0.1)


@pytest.mark.parametrize("waiting", [0, 8])
@pytest.mark.parametrize(
    ("kind", "expected_peak"),
    [(name, False) for name in KINDS] + [(name, True) for name in WITH_PEAK],
)
def test_what_is_to_happen_happens_in_every_step(kind, expected_peak, waiting) -> None:
    found = measure(kind, replace(SIZE, waiting=waiting), expected_peak=expected_peak)
    able = [name for name, make in policies().items() if make().displacement is not None]
    assert [case.policy for case in found] == (able if KINDS[kind].displaces else list(policies()))
    assert {(case.kind, case.expected_peak) for case in found} == {(kind, expected_peak)}
    assert all(case.plan_ms > 0 and case.apply_ms > 0 for case in found)


def test_an_urgent_request_is_of_a_tenant_that_has_a_row_for_it() -> None:
    """Where each tenant has one, those of urgent requests have nothing else to give."""
    size = replace(SIZE, rows=8, tenants=8)
    bench = Bench(policies()["fair+priority"](), KINDS["unplaceable"](), size, expected_peak=False)
    urgent = {one.tenant for one in bench.running if one.priority == URGENT}
    others = {one.tenant for one in bench.running if one.priority != URGENT}
    assert (len(urgent), len(others)) == (1, 7)
    assert bench.new_urgent().tenant in others


def test_who_could_not_be_placed_is_at_the_end_also_where_each_tenant_has_one_row() -> None:
    measure("unplaceable", Size(rows=256, waiting=1000, tenants=256, steps=1))


def test_a_step_in_which_something_else_happens_is_not_timed() -> None:
    bench = Bench(policies()["fair"](), Kind(), SIZE, expected_peak=False)
    bench.finish(bench.running[0])
    with pytest.raises(AssertionError, match=r"not steady: .*num_joins=1"):
        bench.step()


def test_a_step_in_which_nobody_asks_for_the_peak_is_not_timed() -> None:
    bench = Bench(policies()["fair"](), Kind(), SIZE, expected_peak=True)
    with pytest.raises(AssertionError, match="nobody asked"):
        bench.step()


def test_every_cell_has_its_head() -> None:
    head, _, line = table([CASE]).splitlines()
    assert head.count("|") == line.count("|") == len(COLUMNS) + 1
    assert line == ("| churn | fair | 256 | 10,000 | 256 | 0.050 | 0.300 | 0.100 | 0.400 | met |")


def test_what_takes_longer_than_the_goal_is_called_missed_at_the_sizes_of_the_goal() -> None:
    slow = replace(CASE, plan_ms=GOAL_MS)
    assert slow.verdict == replace(slow, rows=4, waiting=0).verdict == "missed"
    assert replace(slow, rows=257).verdict == replace(CASE, waiting=10_001).verdict == ""
