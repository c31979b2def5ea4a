"""The log of a model's process."""

import subprocess
import sys
from pathlib import Path

from support.waiting import WAIT_S

LOGGING = """
import sys
from charonia.serving.hosts.model_process import start
log = start("scheduler")
for _ in range(2):
    log("a line")
print("goes on", flush=True)
"""


def test_a_process_goes_on_without_its_lines_if_its_log_cannot_be_written() -> None:
    with Path("/dev/full").open("wb") as full_disk:
        process = subprocess.run(
            [sys.executable, "-c", LOGGING],
            stdout=subprocess.PIPE,
            stderr=full_disk,
            timeout=WAIT_S,
            check=False,
        )
    assert process.stdout == b"goes on\n"
