"""When a stream is said to go on after a fault."""

from faults.recovery import MARGIN, resumed_at


def steps(start, count, every=0.01, tokens=1):
    return [(start + index * every, tokens) for index in range(count)]


def test_a_stream_goes_on_with_the_token_after_the_longest_pause_since_the_fault():
    arrivals = [*steps(0.0, 100), *steps(3.5, 100)]  # the fault at 0.945 lets five tokens through
    assert resumed_at(arrivals, 0.945, 3.0) == 3.5


def test_it_went_on_before_anybody_could_say_so():
    arrivals = [*steps(0.0, 100), *steps(3.5, 100)]
    assert resumed_at(arrivals, 0.945, 4.0) == 3.5


def test_tokens_that_a_client_reads_late_are_no_recovery_however_many_they_are():
    late = steps(1.0, 10 * MARGIN, every=0.001)
    assert resumed_at(late, 1.0, 3.0) is None
    assert resumed_at([*late, *steps(3.5, MARGIN)], 1.0, 3.0) == 3.5


def test_tokens_that_were_under_way_are_no_recovery():
    assert resumed_at(steps(1.0, MARGIN - 1), 1.0, 1.0) is None
    assert resumed_at(steps(1.0, MARGIN), 1.0, 1.0) is not None


def test_what_came_before_the_fault_does_not_count():
    assert resumed_at([*steps(0.0, 100), *steps(2.0, MARGIN - 1)], 1.5, 1.5) is None


def test_a_response_with_many_tokens_counts_for_all_of_them():
    assert resumed_at([(2.0, MARGIN)], 1.0, 1.0) == 2.0


def test_a_stream_that_has_to_wait_again_later_has_gone_on_all_the_same():
    arrivals = [*steps(2.0, MARGIN), *steps(60.0, 5)]
    assert resumed_at(arrivals, 1.0, 1.5) == 2.0


def test_a_stream_without_any_token_has_not_gone_on():
    assert resumed_at([], 1.0, 1.0) is None
