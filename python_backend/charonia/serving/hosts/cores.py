"""The engine's cores, when all other processes of the server have fewer.

Owns the environment variable by which the launcher names them (see `launch/server/cores.py`). Must
not know who chose them.
"""

import os

VARIABLE = "CHARONIA_ENGINE_CORES"


def take_engine_cores() -> None:
    """Let the calling thread, and those that it starts, run on the cores that are named.

    Raises:
        ValueError: the variable is no list of numbers. OSError: this machine has no such core.
    """
    cores = os.environ.get(VARIABLE)
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))


def has_core_to_itself() -> bool:
    """Whether the others keep off the first of this process's cores."""
    return bool(os.environ.get(VARIABLE))
