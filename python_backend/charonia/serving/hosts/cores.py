"""The CPU cores that are reserved for the engine.

Owns the environment variable in which the launcher lists them (see `launch/server/cores.py`). Must
not know how they were chosen.
"""

import os

VARIABLE = "CHARONIA_ENGINE_CORES"


def take_engine_cores() -> None:
    """Let this thread, and threads that it starts, run on the reserved cores.

    Raises:
        ValueError: the variable is not a list of numbers. OSError: this machine has no such core.
    """
    cores = os.environ.get(VARIABLE)
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))


def has_core_to_itself() -> bool:
    """Return whether the first of this process's cores is reserved for it."""
    return bool(os.environ.get(VARIABLE))
