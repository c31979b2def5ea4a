"""The benchmark's modules are scripts beside each other, not a package."""

import sys
from pathlib import Path

LOADTESTS = Path(__file__).parents[2] / "loadtests"
sys.path += [str(LOADTESTS), str(LOADTESTS / "workers")]
