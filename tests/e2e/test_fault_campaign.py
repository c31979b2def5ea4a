"""A short fault campaign, by the command that a long one is run with; see loadtests/README.md."""

import json
import subprocess
import sys
from pathlib import Path

from support.long import long

SCRIPT = Path(__file__).parents[2] / "loadtests" / "fault_campaign.py"
NUM_CLIENTS = 8
MAX_PAUSE_S = (
    60  # a client that waits for what it does not need; how fast the machine is, no matter
)
OF_LLM = ("kill-tokenizer", "kill-postprocessor")
KINDS = (
    "poison",
    "kill-in-recovery",
    "kill-in-reload",
    "kill-in-prefill",
    "kill-with-drafts",
    "kill-when-full",
    *OF_LLM,
    "kill-scheduler",
)


@long
def test_no_client_notices_more_than_it_must_whatever_breaks(tmp_path: Path) -> None:
    options = {
        "faults": len(KINDS),
        "clients": NUM_CLIENTS,
        "seed": 1,
        "tensor-parallel-size": 1,
        "max-pause": MAX_PAUSE_S,
        "output": tmp_path / "campaign",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    run = subprocess.run(
        [sys.executable, SCRIPT, *arguments, "--only", *KINDS],
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads((tmp_path / "campaign.json").read_text(encoding="utf-8"))
    assert all(verdict["holds"] for verdict in record["verdicts"])
    assert sorted(fault["kind"] for fault in record["faults"]) == sorted(KINDS)
    waited = {fault["kind"]: fault["num_waited"] for fault in record["faults"]}
    assert all(waited[kind] == NUM_CLIENTS for kind in KINDS if kind not in OF_LLM)
    assert all(0 < waited[kind] < NUM_CLIENTS for kind in OF_LLM)
    assert record["requests"]["outlived_restarts"] > 0
