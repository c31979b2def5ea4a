"""How long answers are: one record of those that ended, and what is expected by it."""

import pytest

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.estimators.peak_memory import PeakMemory
from charonia.control.policies import DeadlineWatch, by_deadline, fair
from support.stepping import Bench, make_request


def lengths_of(*past: int) -> OutputLengths:
    lengths = OutputLengths()
    for num_tokens in past:
        lengths.note(num_tokens)
    return lengths


def test_few_answers_are_longer_than_most_of_the_longer_ones_were():
    lengths = lengths_of(*range(1, 11))
    assert lengths.at_most(0) == 9
    assert lengths.at_most(5) == 10
    assert lengths.at_most(9) == 10
    assert lengths.at_most(10) is None
    assert lengths_of().at_most(0) is None


def test_an_answer_that_goes_on_is_as_long_as_the_mean_of_longer_ones():
    lengths = lengths_of(*range(1, 11))
    assert lengths.mean(0) == 5.5
    assert lengths.mean(5) == 8
    assert lengths.mean(9) == 10
    assert lengths.mean(30) == 31, "it has one more at least"
    assert lengths_of().mean(0) is None


def test_an_answer_that_is_cut_off_counts_as_long_as_longer_ones():
    lengths = lengths_of(10, 10, 100)
    lengths.note_cut_off(20, num_most=1000)
    assert lengths.mean(0) == (10 + 10 + 100 + 100) / 4
    lengths.note_cut_off(20, num_most=60)
    assert lengths.mean(0) == (10 + 10 + 100 + 100 + 60) / 5, "it may be no longer"
    lengths.note_cut_off(200, num_most=1000)
    assert lengths.mean(100) == 201, "it has had one more at least"
    lengths = lengths_of()
    lengths.note_cut_off(20, num_most=60)
    assert lengths.mean(0) is None


def test_an_answer_that_is_cut_off_keeps_its_share_of_accepted_drafts():
    lengths = lengths_of(100)
    for _ in range(32):
        lengths.note_cut_off(10, 6, num_most=1000)
    assert lengths.steps_per_token == pytest.approx(0.4)


def test_only_the_last_ones_are_remembered():
    lengths = OutputLengths()
    for _ in range(100):
        lengths.note(1000, 900)
    assert lengths.steps_per_token == pytest.approx(0.1)
    for _ in range(512):
        lengths.note(5)
    assert lengths.at_most(0) == lengths.mean(0) == 5
    assert lengths.at_most(5) is None
    assert lengths.steps_per_token == 1.0


def test_a_mean_is_that_of_the_last_answers_and_what_few_exceed_that_of_many():
    """Answers become shorter: after half of those that a mean is of it is half as far off."""
    lengths = OutputLengths()
    for _ in range(512):
        lengths.note(300, 150)
    for _ in range(16):
        lengths.note(20)
    assert lengths.mean(0) == 160
    assert lengths.steps_per_token == pytest.approx(1 - 16 * 150 / (16 * 320))
    for _ in range(16):
        lengths.note(20)
    assert lengths.mean(0) == 20
    assert lengths.steps_per_token == 1.0
    assert lengths.at_most(0) == 300


def test_of_an_answer_that_is_longer_than_the_last_ones_older_ones_tell():
    lengths = lengths_of(*[1000, 2000], *[20] * 100)
    assert lengths.mean(19) == 20
    assert lengths.mean(20) == 1500
    assert lengths.mean(1000) == 2000
    assert lengths.mean(2000) == 2001, "it has one more at least"


def test_a_token_takes_a_step_where_nothing_is_known():
    assert lengths_of().steps_per_token == 1.0


@pytest.mark.parametrize(("is_complete", "is_probe"), [(True, False), (False, False), (True, True)])
def test_all_who_ask_are_told_of_the_same_answers(is_complete, is_probe):
    """Also of those that ended at a stop string; not of probes, nor where the client has gone."""
    watch, peak = DeadlineWatch(demotes=False), PeakMemory(expects=True)
    policy = fair(by_deadline, lambda _: 1.0, None, watch)
    bench = Bench(policy, peak_memory=peak, max_model_len=500, num_blocks=200)
    bench.add(make_request("a", max_tokens=400, is_probe=is_probe))
    for _ in range(3):
        bench.step()
    bench.scheduler.finish("a", is_complete=is_complete)
    asked = watch._remaining._lengths, peak._lengths, policy.service._lengths
    expected = 3 if is_complete and not is_probe else None
    assert [one.mean(0) for one in asked] == [expected] * 3
