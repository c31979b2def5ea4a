"""What the endurance run calls clean."""

import pytest

from endurance.trials import Holding, Report, Trial, as_markdown, bad_lines

CLEAN = Trial("stop, idle", 1.0)
FAILED = Trial("stop, idle", 3.0, ("exit code 1",))


@pytest.mark.parametrize(
    "line",
    [
        "Signal (11) received.",
        "malloc_consolidate(): unaligned fastbin chunk detected",
        "tritonserver did not end within 6 s and is killed",
        "tritonserver was ended by SIGABRT",
    ],
)
def test_a_bad_end_is_found_in_the_log(line: str) -> None:
    assert bad_lines(["[scheduler] engine_back seconds=1.9", line], is_ending=False) == [line]


def test_an_engine_that_is_lost_is_bad_only_when_the_server_was_told_to_end() -> None:
    line = "[scheduler] engine_died kind=hung live=16"
    assert bad_lines([line], is_ending=True) == [line]
    assert bad_lines([line, "Signal (15) received."], is_ending=False) == []


@pytest.mark.parametrize(
    ("trials", "num_ordered", "holds"),
    [([CLEAN], 1, True), ([CLEAN, FAILED], 2, False), ([CLEAN], 2, False)],
)
def test_all_must_have_been_done_and_clean(
    trials: list[Trial], num_ordered: int, holds: bool
) -> None:
    assert Report({}, trials, num_ordered).holds is holds


def test_the_table_has_a_line_per_kind_and_says_what_was_wrong() -> None:
    holding = Holding(2**20, 3, 4)
    text = as_markdown(Report({}, [CLEAN, FAILED], 2, holding, holding))
    assert "| stop, idle | 2 | 1 | 2.0, 3.0 |" in text
    assert "stop, idle: exit code 1" in text
    assert "1 MiB, 3 open files and 4 threads" in text
