"""What the benchmark of the time between two passes measures."""

from charonia.config import DEMO_CHECKPOINT
from gap_bench import PARTS, as_markdown, measure


def test_each_part_of_a_step_takes_time_and_the_pass_the_most() -> None:
    found = measure(DEMO_CHECKPOINT, num_rows=4, num_steps=5)
    assert set(found) == set(PARTS)
    assert all(microseconds > 0 for microseconds in found.values())
    assert max(found, key=lambda part: found[part]) == "pass"


def test_shares_are_of_the_whole_step() -> None:
    case = {"model": "demo", "rows": 1, "pass": 800.0, "sample": 100.0, "before": 60.0}
    assert "| demo | 1 | 800 | 100 | 60 | 40 | 10.0 % |" in as_markdown([case | {"after": 40.0}])
