"""Loads, and is never asked for anything. As long as there is a file `load-slowly` in the
repository, `initialize` does not return.
"""

import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


class TritonPythonModel:
    def initialize(self, args):
        while (REPOSITORY / "load-slowly").exists():
            time.sleep(0.05)

    def execute(self, requests):
        raise NotImplementedError
