"""Folders that the load tests read and write. Must not know what for."""

import tempfile
from pathlib import Path

LOADTESTS = Path(__file__).resolve().parent
ROOT = LOADTESTS.parent
TESTS = ROOT / "tests"
WORKERS = LOADTESTS / "workers"
CACHE = Path(tempfile.gettempdir()) / "charonia-bench"
"""Checkpoints with random weights, and what sides make of them, from one run to the next."""
