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
    assert line.startswith("| noise on ports | 1.5 | yes | 1.25 | 1.25 | +1 MiB (scheduler 0) |")
    assert line.endswith(" +0 MiB (engine 0) | 0 | none |")
    assert verdicts((GOOD, GOOD)) == []


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ({"noticed": "2 wrong answers"}, "| NO | 1.25 | 1.25 | .* | 2 wrong answers |"),
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
    assert len(verdicts((harmed, GOOD))) == 1


def test_a_neighbour_may_be_slow_in_a_minority_of_rounds() -> None:
    slow = replace(GOOD, slowdown=3.0)
    assert verdicts((slow, GOOD, GOOD)) == []
    expected = "noise on ports: the neighbour was 3.00 times slower"
    assert verdicts((slow, GOOD, slow)) == [expected]
    assert "| 3.00 | 3.00 |" in as_markdown([[slow], [GOOD], [slow]])


def test_memory_counts_for_a_whole_round() -> None:
    grown = replace(GOOD, growth={"engine 0": 2**30})
    assert memory_verdicts((grown, GOOD)) == ["engine 0 kept +1024 MiB"]
    given_back = replace(GOOD, growth={"engine 0": -(2**30)})
    assert memory_verdicts((grown, GOOD, given_back)) == []
