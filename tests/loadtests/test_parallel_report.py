"""What loadtests/parallel_bench.py says of two ranks."""

import pytest

from parallel_bench import BASE, CONTENDER, GOAL, Turns, as_markdown


def turns(rate: float, num: int = 6) -> Turns:
    return Turns([rate] * num, [{"all": 2.0, "exchange": 0.5}] * num)


@pytest.mark.parametrize(
    ("rate", "num", "said"), [(2.0, 6, "met"), (1.5, 6, "missed"), (2.0, 5, "not shown")]
)
def test_two_ranks_and_nothing_else_are_held_against_the_goal(
    rate: float, num: int, said: str
) -> None:
    row = {BASE: turns(1.0, num), CONTENDER: turns(rate, num), "2 threads": turns(3.0, num)}
    head, _, base, contender, threads = as_markdown({8: row}).splitlines()
    assert f"| reaches {GOAL} |" in head
    interval = f"{rate:.2f} to {rate:.2f}" if num > 5 else "too few pairs"
    assert base == "| 8 | TP 1 | 1.0 | 1 |  |  | 25.0% |"
    expected = f"{rate:.2f} ({interval}) | {rate / 2:.0%} | {said} | 25.0% |"
    assert contender == f"| 8 | {CONTENDER} | {rate:.1f} | {expected}"
    assert threads.endswith("| 150% |  | 25.0% |")
