"""`charonia simulate`: its options, what it prints and writes, and what it refuses."""

import gzip
import json
import re

import msgspec
import pytest

from charonia.config import EngineArgs
from charonia.launch.commands.cli import main
from charonia.launch.commands.simulate import POLICIES
from charonia.traces import StepRecord, TraceRequest, read_requests, write_requests

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
    options = [word for policy in POLICIES for word in ("--policy", policy)]
    assert simulate(trace, "--kv-tokens", "1000", *options, "--output", str(output)) == 0
    text = capsys.readouterr().out
    assert (output / "report.md").read_text() in text
    for policy in POLICIES:
        assert f"| {policy} | 40 | 40 |" in text
        assert f"| {policy} | b | 20 | 20 |" in text
        run = read_requests(output / f"{policy}.jsonl.gz")
        assert len(run) == 40
        assert {one.outcome for one in run} == {"length"}
    report = json.loads((output / "report.json").read_text())
    assert [run["name"] for run in report["runs"]] == list(POLICIES)
    assert report["runs"][0]["hit_rate"] > 0.5
    assert (output / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_every_scheduling_policy_can_be_compared_and_the_default_comes_first():
    assert POLICIES == ("fcfs", "priority", "deadline", "fair", "fair+priority", "fair+deadline")
    assert EngineArgs(model="x").scheduling_policy == POLICIES[0]


def test_it_is_said_why_runs_are_equal(trace, capsys):
    options = ["--kv-tokens", "100000", "--policy", "fcfs", "--policy", "fair"]
    assert simulate(trace, *options, "--policy", "deadline") == 0
    assert re.search(
        r"All runs are equal\. .* waited 0\.\d+ s at most, and have 2 tenants, 1 priority and 0"
        r" deadlines\.\n",
        capsys.readouterr().out,
    )
    assert simulate(trace, *options[:4], "--deadline-ms", "1:9") == 0
    assert "equal" not in capsys.readouterr().out, "there is but one run"
    assert simulate(trace, *options, "--adversary", "0.3", "--set", "max_num_seqs=2") == 0
    assert "equal" not in capsys.readouterr().out


def test_a_run_can_be_simulated_again_and_beside_what_was_recorded(trace, tmp_path, capsys):
    assert simulate(trace, "--kv-tokens", "1000", "--output", str(tmp_path / "out")) == 0
    capsys.readouterr()
    again = tmp_path / "out" / "fcfs.jsonl.gz"
    assert simulate(again, "--kv-tokens", "1000") == 0
    measured, simulated = [
        [float(cell) for cell in line.split("|")[3:8]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("| as recorded | 40", "| fcfs | 40"))
    ][:2]
    assert measured == pytest.approx(simulated, rel=0.01)  # rounded once more or less


def test_traffic_is_shaped(trace, capsys):
    shape = "--requests 100 --rate 5 --arrivals bursty --burstiness 2 --tenants 3 --priorities 2"
    shape += " --deadline-ms 100:9000 --max-tokens 30 --adversary 0.1 --by priority --seed 3"
    assert simulate(trace, "--kv-tokens", "1000", *shape.split()) == 0
    text = capsys.readouterr().out
    assert "| fcfs | 100 |" in text
    assert "| fcfs | priority 1 |" in text
    assert "in time" in text


def test_who_was_preempted_finds_its_own_blocks_as_on_a_server(tmp_path, capsys):
    """A trace without ids of blocks has prompts that nobody shares, but they are cached, too."""
    long = TraceRequest(timestamp=0, input_length=1000, output_length=100, priority=1)
    urgent = TraceRequest(timestamp=60, input_length=16, output_length=4)
    write_requests(tmp_path / "trace.jsonl", [long, urgent])
    seconds = []
    for caching in ("true", "false"):
        assert not simulate(
            tmp_path / "trace.jsonl",
            "--policy=priority",
            "--kv-tokens=4000",
            "--set=max_num_seqs=1",
            *([] if caching == "true" else ["--set=enable_prefix_caching=false"]),
            f"--output={tmp_path / caching}",
        )
        (run,) = json.loads((tmp_path / caching / "report.json").read_text())["runs"]
        assert run["num_preemptions"] == 1
        seconds.append(run["seconds"])
    assert seconds[0] < seconds[1] - 0.09  # a thousand tokens of 0.1 ms are not computed twice


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


def test_it_is_said_why_nothing_is_finished(trace, tmp_path, capsys):
    options = ["--kv-tokens", "50", "--policy", "fcfs", "--policy", "fair", "--output"]
    assert simulate(trace, *options, str(tmp_path / "out")) == 0
    out, err = capsys.readouterr()
    assert "\nAll runs are equal: no request was begun.\n" in out
    assert out.count("| 40 prompt_too_long |") == 2
    assert out.count("| 20 prompt_too_long |") == 4
    assert err == (
        "charonia: warning: max_model_len is lowered from 120 to 48: the KV cache has 3 blocks of"
        " 16 tokens\n"
    )


def test_a_boundless_wish_needs_no_boundless_model(trace, capsys):
    requests = read_requests(trace)
    wishes = [msgspec.structs.replace(one, max_tokens=2**31 - 1) for one in requests]
    write_requests(trace, wishes)
    assert simulate(trace, "--kv-tokens", "1000") == 0
    out, err = capsys.readouterr()
    assert "| fcfs | 40 | 40 |" in out
    assert err == ""


def test_weighted_fairness_is_compared_with_first_come(trace, tmp_path, capsys):
    tenants = tmp_path / "tenants.json"
    tenants.write_text('{"tenants": {"a": {"weight": 4}}}')
    options = f"--kv-tokens 1000 --policy fcfs --policy fair --set scheduler.tenants_file={tenants}"
    assert simulate(trace, *options.split()) == 0
    assert "| fair | a | 20 | 20 |" in capsys.readouterr().out


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
        (
            "--kv-tokens 1000 --set enable_chunked_prefill=false --set max_num_batched_tokens=64",
            "max_num_batched_tokens = 64 must be at least max_model_len (128)",
        ),
        (
            "--kv-tokens 1000 --set enable_chunked_prefill=false"
            " --set scheduler.inter_token_target_ms=20",
            "inter_token_target_ms = 20.0 has no effect with enable_chunked_prefill = false",
        ),
    ],
)
def test_what_cannot_be_is_refused(trace, capsys, options, reason):
    assert simulate(trace, *options.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("charonia: ")
    assert reason in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("num_drafting", "is_refused"), [(2, False), (3, True)])
def test_a_record_made_with_drafts_is_refused(trace, tmp_path, capsys, num_drafting, is_refused):
    steps = tmp_path / "steps.jsonl"
    records = [
        StepRecord(n, n + 0.01, 0.009, 0, 3 if n < num_drafting else 0, 1, 1, 50, 50)
        for n in range(100)
    ]
    steps.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in records))
    options = ["--step-times", str(steps), "--kv-tokens", "1000"]
    assert main(["simulate", str(trace), *options]) == int(is_refused)
    error = (
        "charonia: steps.jsonl: 3 of 100 steps verified drafts, which cannot be simulated; record"
        " with speculative_config=null\n"
    )
    assert capsys.readouterr().err == (error if is_refused else "")


MOST = "a number from 1 to 2147483647"


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--kv-tokens", "0", f"'0' is not {MOST}"),
        ("--requests", "x", f"'x' is not {MOST}"),
        ("--max-tokens", "99999999999", f"'99999999999' is not {MOST}"),
        ("--rate", "0", "'0' is not a number above 0"),
        ("--rate", "nan", "'nan' is not a number above 0"),
        ("--rate", "fast", "'fast' is not a number above 0"),
        ("--adversary", "1", "'1' is not a share from 0 to below 1"),
        ("--deadline-ms", "9:1", "'9:1' is not a range A:B with A up to B"),
        ("--deadline-ms", "1:x", f"'x' is not {MOST}"),
        ("--deadline-ms", "1:99999999999", f"'99999999999' is not {MOST}"),
        ("--arrivals", "never", "invalid choice"),
    ],
)
def test_wrong_options_say_what_is_accepted(trace, capsys, option, value, reason):
    with pytest.raises(SystemExit):
        simulate(trace, option, value)
    assert f"argument {option}: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--drain-timeout", "'x' is not a number of seconds from 0 on"),
        ("--http-port", "'x' is not a port from 0 to 65535; 0 takes a free one"),
    ],
)
def test_wrong_numbers_of_serve_do_so_too(capsys, option, reason):
    with pytest.raises(SystemExit):
        main(["serve", option, "x"])
    assert f"argument {option}: {reason}" in capsys.readouterr().err
