"""What the benchmark of samples says of its figures."""

from samples_bench import GROUP, SINGLES, Cell, report


def cell(singles: list[float], *, num_unlike: int = 0) -> Cell:
    milliseconds = {GROUP: [10.0] * len(singles), SINGLES: singles}
    return Cell(False, 512, milliseconds, {GROUP: 48, SINGLES: 144}, num_unlike)


def test_a_ratio_is_that_of_each_pair_and_no_loss_is_met_by_the_lower_end_of_its_interval() -> None:
    times = [12.0, 15.0, 11.0, 13.0, 14.0, 16.0]
    row = "| off | 512 | the same | 48 | 144 | 0.33 | 10 | 14 | 1.35 | 1.10 to 1.60 | 1 | met |"
    assert row in report([cell(times)])
    assert "| 0.90 to 1.60 | 1 | not shown |" in report([cell([*times, 9.0])])
    assert "| too few pairs | 1 | not shown |" in report([cell(times[:3])])


def test_unlike_tokens_are_told() -> None:
    assert "| off | 512 | differ in 2 pairs |" in report([cell([12.0] * 6, num_unlike=2)])
