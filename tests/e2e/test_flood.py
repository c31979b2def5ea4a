"""A flood of requests, by the command that measures it: what does not depend on speed holds."""

import json
import subprocess
import sys
from pathlib import Path

from support.long import long

SCRIPT = Path(__file__).parents[2] / "loadtests" / "flood_bench.py"
WAYS = ("scheduler", "generate")


@long
def test_nothing_is_lost_in_a_flood_and_tenants_get_their_shares(tmp_path: Path) -> None:
    options = {"requests": 1500, "urgent": 40, "output": tmp_path / "flood"}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    run = subprocess.run(
        [sys.executable, SCRIPT, *arguments, "--ways", *WAYS],
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    record = json.loads((tmp_path / "flood.json").read_text(encoding="utf-8"))
    verdicts = [one for one in record["verdicts"] if not one["is_timed"]]
    assert len(verdicts) == 3 * len(WAYS)
    assert all(one["is_good"] for one in verdicts), verdicts
