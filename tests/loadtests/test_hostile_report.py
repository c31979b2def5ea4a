"""What loadtests/hostile.py says of attacks."""

from dataclasses import replace

import pytest

from hostile import as_markdown, holds, memory_verdicts, verdicts
from support.hostile.trial import Outcome

GOOD = Outcome(
    attack="noise on ports",
    seconds=1.5,
    failure=None,
    num_requests=7,
    noticed=None,
    slowdown=1.25,
    growth={"scheduler 0": 2**20, "engine 0": 0},
    excess={},
    left_open={},
    num_restarts=0,
    replaced=[],
)


def test_an_attack_that_nobody_noticed_did_no_harm() -> None:
    assert holds(GOOD)
    line = as_markdown([[GOOD], [replace(GOOD, growth={"engine 0": 0})]]).splitlines()[2]
    start = "| noise on ports | 1.5 | yes | 1.25 (too few rounds) | not shown |"
    assert line.startswith(f"{start} +1 MiB (scheduler 0) |")
    assert line.endswith(" +0 MiB (engine 0) | 0 | none |")
    assert verdicts((GOOD,) * 6) == []


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ({"noticed": "2 wrong answers"}, "| NO | 1.25 .* | 2 wrong answers |"),
        ({"failure": "no answer"}, "| no answer |"),
        ({"replaced": ["engine 0"]}, "| engine 0 |"),
        ({"left_open": {"tritonserver": 99}}, "| tritonserver |"),
        ({"num_restarts": 1}, "| 1 |"),
    ],
)
def test_harm_is_named(harm: dict[str, object], said: str) -> None:
    harmed = replace(GOOD, **harm)  # type: ignore[arg-type]
    assert not holds(harmed)
    line = as_markdown([[GOOD], [harmed]]).splitlines()[2]
    assert all(part in line for part in said.split(".*")), line
    assert len(verdicts((harmed, *[GOOD] * 5))) == 1


def test_a_neighbour_that_may_have_been_slow_is_not_shown_to_be_spared() -> None:
    slow, slowest = replace(GOOD, slowdown=3.0), replace(GOOD, slowdown=6.0)
    assert verdicts((slow, *[GOOD] * 8)) == []
    (said,) = verdicts((slow, *[GOOD] * 5))
    assert said.startswith("noise on ports: the neighbour was 1.25 times slower")
    assert said.endswith(": not shown")
    (said,) = verdicts((slow,) * 6)
    assert said.endswith(": missed")
    table = as_markdown([[slow]] * 5 + [[slowest]])
    assert "| 3.00 (3.00 to 6.00) | missed |" in table


def test_memory_counts_for_a_whole_round() -> None:
    grown = replace(GOOD, growth={"engine 0": 2**30})
    assert memory_verdicts((grown, GOOD)) == ["engine 0 kept +1024 MiB"]
    given_back = replace(GOOD, growth={"engine 0": -(2**30)})
    assert memory_verdicts((grown, GOOD, given_back)) == []
