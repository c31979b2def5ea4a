"""Loads, and is never asked for anything. As long as there is a file `load-slowly` in the
repository, `initialize` does not return.
"""

import time
from pathlib import Path

import triton_python_backend_utils as pb_utils

REPOSITORY = Path(__file__).parents[2]


class TritonPythonModel:
    def initialize(self, args):
        if (REPOSITORY / "load-slowly").exists():
            pb_utils.Logger.log_info("the stand-in engine loads slowly")
        while (REPOSITORY / "load-slowly").exists():
            time.sleep(0.05)

    def execute(self, requests):
        raise NotImplementedError
