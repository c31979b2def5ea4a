"""Where the models' processes write their log: tritonserver's own standard error."""

import sys
from collections.abc import Callable


def logger(model_name: str) -> Callable[[str], None]:
    """A function that writes one line, with the model's name in front."""

    def log(line: str) -> None:
        print(f"[{model_name}] {line}", file=sys.stderr, flush=True)

    return log
