"""What grows with a prompt's length: measured on a real server, and linear but for attention."""

import argparse

import pytest

import prompt_bench
from support.long import long


@long
def test_beside_the_steps_a_long_prompt_takes_time_and_memory_in_proportion_to_its_tokens():
    few, many = 8192, 32768
    options = argparse.Namespace(lengths=[few, many], repetitions=3)
    cases = prompt_bench.run(options)
    assert len(cases) == 2 * 3 * len(prompt_bench.WAYS)
    for case in cases:
        assert case.num_tokens == pytest.approx(case.length, rel=0.01)
        assert 0 < case.steps_s < case.total_s
        assert case.peaks["engine"] < prompt_bench.kv_mib(case.length) + 24
        assert case.peaks["scheduler"] < 12 + 2 * case.num_tokens / 1024
        assert case.peaks["tritonserver"] < 8 + case.num_tokens / 1024
    for way in prompt_bench.WAYS:
        least = {
            length: min(one.beside_us for one in cases if (one.way, one.length) == (way, length))
            for length in (few, many)
        }
        assert least[many] < 1.25 * least[few], f"{way}: more than linear"
