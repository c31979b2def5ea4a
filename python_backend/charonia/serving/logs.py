"""Where the models' processes write their log: tritonserver's own standard error."""

import sys
from collections.abc import Callable


def logger(model_name: str) -> Callable[[str], None]:
    """A function that writes one line, with the model's name in front."""

    def log(line: str) -> None:
        # In one piece: all models and tritonserver write to the same pipe.
        sys.stderr.write(f"[{model_name}] {line}\n")
        sys.stderr.flush()

    return log
