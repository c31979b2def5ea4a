"""`charonia simulate`: its options, what it prints and writes, and what it refuses."""

import gzip
import json

import msgspec
import pytest

from charonia.launch.cli import main
from charonia.traces import TraceRequest, read_requests, write_requests

TIMES = "step=10ms,token=100us"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    requests = [
        TraceRequest(
            timestamp=50.0 * number,
            input_length=100,
            output_length=20,
            hash_ids=[number % 3],
            hash_block_length=64,
            tenant="ab"[number % 2],
        )
        for number in range(40)
    ]
    write_requests(path, requests)
    return path


def simulate(trace, *options: str) -> int:
    return main(["simulate", str(trace), "--step-times", TIMES, *options])


def test_policies_are_compared(trace, tmp_path, capsys):
    output = tmp_path / "out"
    policies = ["fcfs", "priority", "deadline", "fair", "fair+priority", "fair+deadline"]
    options = [word for policy in policies for word in ("--policy", policy)]
    assert simulate(trace, "--kv-tokens", "1000", *options, "--output", str(output)) == 0
    text = capsys.readouterr().out
    assert (output / "report.md").read_text() in text
    for policy in policies:
        assert f"| {policy} | 40 | 40 |" in text
        assert f"| {policy} | b | 20 | 20 |" in text
        run = read_requests(output / f"{policy}.jsonl.gz")
        assert len(run) == 40
        assert {one.outcome for one in run} == {"length"}
    report = json.loads((output / "report.json").read_text())
    assert [run["name"] for run in report["runs"]] == policies
    assert report["runs"][0]["hit_rate"] > 0.5
    assert (output / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_can_be_simulated_again_and_beside_what_was_recorded(trace, tmp_path, capsys):
    assert simulate(trace, "--kv-tokens", "1000", "--output", str(tmp_path / "out")) == 0
    capsys.readouterr()
    again = tmp_path / "out" / "fcfs.jsonl.gz"
    assert simulate(again, "--kv-tokens", "1000") == 0
    measured, simulated = [
        line.split("|")[3:8]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("| as recorded | 40", "| fcfs | 40"))
    ][:2]
    assert measured == simulated


def test_traffic_is_shaped(trace, capsys):
    shape = "--requests 100 --rate 5 --arrivals bursty --burstiness 2 --tenants 3 --priorities 2"
    shape += " --deadline-ms 100:9000 --max-tokens 30 --adversary 0.1 --by priority --seed 3"
    assert simulate(trace, "--kv-tokens", "1000", *shape.split()) == 0
    text = capsys.readouterr().out
    assert "| fcfs | 100 |" in text
    assert "| fcfs | priority 1 |" in text
    assert "in time" in text


def test_settings_are_those_of_the_server(trace, tmp_path, capsys):
    tenants = tmp_path / "tenants.json"
    tenants.write_text('{"default": {"max_concurrency": 1}}')
    settings = [
        "num_gpu_blocks_override=100",
        "scheduling_policy=priority",
        "scheduler.fair_share=true",
        f"scheduler.tenants_file={tenants}",
    ]
    assert simulate(trace, *(word for one in settings for word in ("--set", one))) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if "fair+priority" in x)
    num_requests, num_finished = line.split("|")[2:4]
    assert int(num_finished) < int(num_requests)


def test_a_file_of_the_model_and_a_compressed_trace(trace, tmp_path, capsys):
    times = tmp_path / "times.json"
    times.write_bytes(msgspec.json.encode({"curve": [[1, 0.01], [100, 0.02]]}))
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert main(["simulate", str(packed), "--step-times", str(times), "--kv-tokens", "1000"]) == 0
    assert "| fcfs | 40 | 40 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("", "give the tokens that the KV cache holds: --kv-tokens N"),
        ("--kv-tokens 1000 --policy lifo", "unknown policy 'lifo'; accepted are fcfs, priority"),
        ("--kv-tokens 1000 --policy fair+", "unknown policy 'fair+'"),
        ("--kv-tokens 1000 --set max_num_seqs=0", "max_num_seqs"),
        ("--kv-tokens 1000 --set walk=1", "unknown engine argument 'walk'"),
        ("--kv-tokens 1000 --set scheduler.tenants_file=none", "none cannot be read"),
        (
            '--kv-tokens 1000 --set speculative_config={"method":"ngram"}',
            "speculative_config cannot be simulated",
        ),
        ("--kv-tokens 1000 --step-times step=1", "'step=1' is no constant"),
    ],
)
def test_what_cannot_be_is_refused(trace, capsys, options, reason):
    assert simulate(trace, *options.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("charonia: ")
    assert reason in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        "--kv-tokens 0",
        "--rate 0",
        "--rate nan",
        "--adversary 1",
        "--deadline-ms 9:1",
        "--arrivals never",
        "--requests x",
    ],
)
def test_wrong_options_are_named(trace, capsys, options):
    with pytest.raises(SystemExit):
        simulate(trace, *options.split())
    assert options.split()[0] in capsys.readouterr().err
