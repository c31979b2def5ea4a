"""Which requests of a recorded trace a benchmark asks for."""

from pathlib import Path

import pytest

from charonia.traces import TraceRequest, write_requests
from traffic import TrafficError, read_traffic

NAME = "calls.jsonl.gz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lengths = [(3, 1), (5, 4), (90, 11), (4, 0), (2, 7), (9, 2), (96, 4)]
    write_requests(
        tmp_path / NAME,
        [
            TraceRequest(timestamp=float(index), input_length=prompt, output_length=answer)
            for index, (prompt, answer) in enumerate(lengths)
        ],
    )
    return tmp_path


def test_too_long_requests_are_left_out_and_counted_and_refused_ones_never_were_any(folder):
    traffic = read_traffic(folder, NAME, most_tokens=100, num_requests=2)
    assert traffic.lengths == ((3, 1), (5, 4), (2, 7), (9, 2), (96, 4))
    assert traffic.as_json() == {
        "name": "calls",
        "num_requests": 5,
        "most_tokens": 100,
        "share_left_out": pytest.approx(1 / 6),
        "mean_prompt_tokens": 23,
        "mean_new_tokens": 3.6,
    }


def test_a_file_that_is_not_there_is_named_with_the_option(folder):
    with pytest.raises(TrafficError, match=r"^--traces: there is no other\.csv in "):
        read_traffic(folder, "other.csv", most_tokens=100, num_requests=2)


def test_a_file_that_is_no_trace_is_named_with_the_option(folder):
    (folder / "notes.csv").write_text("a,b\n1,2\n")
    with pytest.raises(TrafficError, match=r"^--trace-files: notes\.csv has no column"):
        read_traffic(folder, "notes.csv", most_tokens=100, num_requests=2)


def test_too_few_short_requests_are_an_error_that_names_both_options(folder):
    with pytest.raises(TrafficError, match=r"^--trace-tokens: .* 4 requests of at most 20 .*5 at"):
        read_traffic(folder, NAME, most_tokens=20, num_requests=5)
