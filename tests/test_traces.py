"""Traces are read as they are written, and a wrong line is named."""

import gzip
from pathlib import Path

import pytest

from charonia.errors import ConfigError
from charonia.protocol import INT32_MAX, MAX_CHARACTERS, SamplingParams
from charonia.traces import (
    StepRecord,
    TraceRequest,
    block_length,
    read_requests,
    read_steps,
    write_requests,
)

TRACES = Path(__file__).parents[2] / "shared" / "traces"


def request(timestamp: float = 0.0, **values) -> TraceRequest:
    return TraceRequest(timestamp=timestamp, **{"input_length": 5, "output_length": 3} | values)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_what_is_written_is_read(tmp_path, name):
    written = [request(2.5, tenant="a", hash_ids=[1, 2], ttft_ms=3.0), request(7.0)]
    write_requests(tmp_path / name, written)
    assert read_requests(tmp_path / name) == written


def test_requests_are_in_the_order_of_their_times(tmp_path):
    write_requests(tmp_path / "trace.jsonl", [request(2.0), request(1.0), request(3.0)])
    assert [one.timestamp for one in read_requests(tmp_path / "trace.jsonl")] == [1.0, 2.0, 3.0]


def test_keys_of_others_are_ignored(tmp_path):
    (tmp_path / "trace.jsonl").write_text(
        '{"timestamp": 1, "input_length": 2, "output_length": 3, "session": 6}\n\n'
    )
    assert read_requests(tmp_path / "trace.jsonl") == [
        TraceRequest(timestamp=1.0, input_length=2, output_length=3)
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{\n", "truncated"),
        ("[]", "Expected `object`"),
        ('{"timestamp": 1, "output_length": 3}', "input_length"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 3}', ">= 1"),
        ('{"timestamp": 1, "input_length": 1, "output_length": -1}', ">= 0"),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "tenant": "'
            + 257 * "x"
            + '"}',
            "256",
        ),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "priority": 2147483648}',
            "<= 2147483647",
        ),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "deadline_ms": 2147483648}',
            "<= 2147483647",
        ),
        ("[" * 100_000, ""),
        ("\udcff\n", ""),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, reason):
    good = '{"timestamp": 1, "input_length": 2, "output_length": 3}\n'
    path = tmp_path / "trace.jsonl"
    path.write_bytes(good.encode() + line.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=rf"trace\.jsonl, line 2: .*{reason}"):
        read_requests(path)


@pytest.mark.parametrize("num_left", [1, 30, 54])
def test_an_unfinished_last_line_is_left_out(tmp_path, num_left):
    line = b'{"timestamp":1.0,"input_length":2,"output_length":345,"x":"y"}'
    (tmp_path / "trace.jsonl").write_bytes(line + b"\n" + line[:num_left])
    assert len(read_requests(tmp_path / "trace.jsonl")) == 1
    step = b"[1.0,1.5,0.4,1,0,2,10,30,100]"
    (tmp_path / "steps.jsonl").write_bytes(step + b"\n" + step[: num_left // 2])
    assert len(read_steps(tmp_path / "steps.jsonl")) == 1


def test_a_last_line_needs_no_end(tmp_path):
    write_requests(tmp_path / "trace.jsonl", [request(1.0), request(2.0)])
    whole = (tmp_path / "trace.jsonl").read_bytes()
    (tmp_path / "trace.jsonl").write_bytes(whole.rstrip())
    assert len(read_requests(tmp_path / "trace.jsonl")) == 2


def test_what_a_request_may_have_a_trace_may_have(tmp_path):
    most = SamplingParams(
        tenant="x" * MAX_CHARACTERS["tenant"], priority=INT32_MAX, deadline_ms=INT32_MAX
    )
    written = [
        request(tenant=most.tenant, priority=most.priority, deadline_ms=most.deadline_ms),
        request(priority=-INT32_MAX),
    ]
    write_requests(tmp_path / "trace.jsonl", written)
    assert read_requests(tmp_path / "trace.jsonl") == written


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read: No such file"):
        read_requests(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"empty\.jsonl has no requests"):
        read_requests(tmp_path / "empty.jsonl")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:20])
    with pytest.raises(ConfigError, match=r"cut\.jsonl\.gz cannot be read"):
        read_requests(tmp_path / "cut.jsonl.gz")
    damaged = bytearray(gzip.compress(b"x" * 1000))
    damaged[10] = 0xFF  # behind the header: a kind of block that there is not
    (tmp_path / "damaged.jsonl.gz").write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"damaged\.jsonl\.gz cannot be read: .*invalid block"):
        read_requests(tmp_path / "damaged.jsonl.gz")


def test_azures_files_are_read(tmp_path):
    (tmp_path / "code.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.4799600,3180,8\n"
    )
    assert read_requests(tmp_path / "code.csv") == [
        TraceRequest(timestamp=0.0, input_length=4808, output_length=10),
        TraceRequest(timestamp=500.0, input_length=3180, output_length=8),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("TIMESTAMP,ContextTokens\n", "has no column 'GeneratedTokens'"),
        ("x" * 2**18, "cannot be read: field larger than field limit"),
        (f"TIMESTAMP,ContextTokens,GeneratedTokens\n{'x' * 2**18},1,2\n", "cannot be read: field"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2: .*yesterday"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,1\n", "line 2: "),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,0,1\n",
            r"line 2: Expected `int` >= 1 - at `\$\.ContextTokens`",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,1,-3\n",
            r"line 2: Expected `int` >= 0 - at `\$\.GeneratedTokens`",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,2147483648,3\n",
            r"line 2: Expected `int` <= 2147483647 - at `\$\.ContextTokens`",
        ),
    ],
)
def test_a_wrong_csv_file_is_refused(tmp_path, text, reason):
    (tmp_path / "code.csv").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_requests(tmp_path / "code.csv")


def test_steps_are_read(tmp_path):
    (tmp_path / "steps.jsonl").write_text("[1.0, 1.5, 0.4, 1, 0, 2, 10, 30, 100]\n")
    (step,) = read_steps(tmp_path / "steps.jsonl")
    assert step == StepRecord(1.0, 1.5, 0.4, 1, 0, 2, 10, 30, 100)
    assert step.work == (2, 10, 30, 100)


def test_the_length_of_blocks_is_found_or_said():
    assert block_length([request()]) == 0
    parts = [request(input_length=1000, hash_ids=[1, 2]), request(input_length=513, hash_ids=[1])]
    assert block_length(parts) == 512
    assert block_length([request(input_length=100, hash_ids=[1], hash_block_length=80)]) == 80
    with pytest.raises(ConfigError, match="hash_ids fit no block length of 16, 32"):
        block_length([request(input_length=1000, hash_ids=[1] * 999)])


@pytest.mark.skipif(not TRACES.is_dir(), reason="no folder of traces beside the repository")
@pytest.mark.parametrize(
    ("name", "count", "length"),
    [
        ("conversation.jsonl.gz", 6011, 512),
        ("synthetic.jsonl.gz", 3993, 512),
        ("agents.jsonl.gz", 1790, 64),
        ("tenants.jsonl.gz", 20320, 0),
        ("azure_code.csv.gz", 8819, 0),
    ],
)
def test_real_traces_are_read(name, count, length):
    trace = read_requests(TRACES / name)
    assert len(trace) == count
    assert block_length(trace) == length
