"""What the benchmark of cached prefixes says of its figures."""

from prefix_bench import TURNS, Conversation, Pair, report

FOUND = Conversation([100] * TURNS, [0] + [90] * (TURNS - 1))


def test_a_ratio_is_that_of_each_pair_and_is_met_by_the_lower_end_of_its_interval() -> None:
    pairs = [Pair(cold_ms, 2.0, 512) for cold_ms in (12.0, 11.0, 10.0, 13.0, 11.5, 12.5)]
    restarted = [Pair(cold_ms, 5.0, 496) for cold_ms in (12.0, 11.0, 10.0, 13.0, 11.5, 4.9)]
    text = report(pairs, restarted, [FOUND])
    assert "| in the KV cache | 11.8 | 2.0 | 512 | 5.88 | 5.00 to 6.50 | 5 | met |" in text
    assert "| 11.2 | 5.0 | 496 | 2.25 | 0.98 to 2.60 | 1 | not shown |" in text
    text = report([*pairs, Pair(9.9, 2.0, 512)], restarted, [FOUND])
    assert "| 4.95 to 6.50 | 5 | not shown |" in text


def test_each_conversation_must_find_enough() -> None:
    pairs = [Pair(10.0, 1.0, 512)] * 6
    assert "| 1 | 78.8 % | 78.8 % | 80 % | 0, 90, 90, 90, 90, 90, 90, 90 | missed |" in report(
        pairs, pairs, [FOUND]
    )
    other = Conversation([100] * TURNS, [0] + [95] * (TURNS - 1))
    assert "| 83.1 % | 83.1 % | 80 % |" in report(pairs, pairs, [other])
    assert "| 2 | 80.9 % | 78.8 % | 80 % |" in report(pairs, pairs, [FOUND, other])
