"""A model repository whose engine fails on order, and how to order.

Owns the files between who orders and the engine; faulty_engine/startup/faulty_steps.py says what
the orders are.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from charonia.launch.server.discovery import default_repository

SLOW_STEP_S = 0.05
"""Least time of a step, in seconds, by default. 1500 tokens take more than a minute, so that
streams are under way when a test breaks something, however slow the machine is."""
_FAULTY_ENGINE = Path(__file__).with_name("faulty_engine")
_PACE, _LOAD = "step-seconds", "load-seconds"
_HELD_S = 3600


def make_faulty_repository(target: Path, *, step_s: float = SLOW_STEP_S) -> Path:
    """Copy the model repository to `target`, with the faulty engine in it; returns `target`.

    Args:
        step_s: seconds that a step takes at least, see `paced`.
    """
    shutil.copytree(default_repository(), target)
    engine = target / "engine" / "1"
    shutil.move(engine / "model.py", engine / "product_model.py")
    shutil.copytree(_FAULTY_ENGINE, engine, dirs_exist_ok=True)
    order_fault(target, _PACE, step_s)
    return target


def order_fault(repository: Path, fault: str, value: float, *, pid: int | None = None) -> Path:
    """Order a fault, in one piece: the engine looks at any moment.

    Args:
        repository: that the server has loaded.
        value: as `faulty_steps` says. pid: of the process that shall fail; None is any.

    Returns:
        The order; one that counts steps is gone when the last of them has failed.
    """
    order = repository / fault
    draft = repository / f"{fault}.draft"
    draft.write_text(str(value) if pid is None else f"{value} {pid}", encoding="utf-8")
    draft.replace(order)
    return order


@contextlib.contextmanager
def paced(repository: Path, step_s: float) -> Iterator[None]:
    """Make each step take at least so many seconds meanwhile; with 0 it takes what it needs."""
    before = float((repository / _PACE).read_text(encoding="utf-8"))
    order_fault(repository, _PACE, step_s)
    try:
        yield
    finally:
        order_fault(repository, _PACE, before)


@contextlib.contextmanager
def held_loads(repository: Path) -> Iterator[None]:
    """Have no engine be loaded meanwhile: one that begins with it ends with it afterwards."""
    order = order_fault(repository, _LOAD, _HELD_S)
    try:
        yield
    finally:
        order.unlink()
