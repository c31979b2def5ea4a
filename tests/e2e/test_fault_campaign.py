"""A short fault campaign, by the command that a long one is run with; see loadtests/README.md."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "loadtests" / "fault_campaign.py"
NUM_FAULTS, NUM_STREAMS = 10, 8


def test_no_stream_notices_more_than_a_pause_whatever_breaks(tmp_path: Path) -> None:
    options = {
        "faults": NUM_FAULTS,
        "streams": NUM_STREAMS,
        "seed": 1,
        "tensor-parallel-size": 1,
        "output": tmp_path / "campaign",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    run = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads((tmp_path / "campaign.json").read_text(encoding="utf-8"))
    assert all(verdict["holds"] for verdict in record["verdicts"])
    kinds = [fault["kind"] for fault in record["faults"]]
    assert sorted(kinds) == sorted([*set(kinds)] * 2), "all kinds equally often"
    assert len(set(kinds)) == 5
    assert all(len(fault["recovery"]) == NUM_STREAMS for fault in record["faults"])
    assert record["requests"]["outlived_restarts"] > 0
