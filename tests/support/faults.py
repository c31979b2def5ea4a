"""A model repository whose engine fails on order, and how to order.

Owns the files between who orders and the engine; faulty_engine/startup/faulty_steps.py says what
the orders are.
"""

import shutil
from pathlib import Path

from charonia.launch.discovery import default_repository

_FAULTY_ENGINE = Path(__file__).with_name("faulty_engine")


def make_faulty_repository(target: Path, *, step_s: float | None = None) -> Path:
    """Copy the model repository to `target`, with the faulty engine in it; returns `target`.

    Args:
        step_s: seconds that a step takes at least; None is the faulty engine's own default.
    """
    shutil.copytree(default_repository(), target)
    engine = target / "engine" / "1"
    shutil.move(engine / "model.py", engine / "product_model.py")
    shutil.copytree(_FAULTY_ENGINE, engine, dirs_exist_ok=True)
    if step_s is not None:
        (target / "step-seconds").write_text(str(step_s), encoding="utf-8")
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
    draft.write_text(" ".join(map(str, filter(None, (value, pid)))), encoding="utf-8")
    draft.replace(order)
    return order
