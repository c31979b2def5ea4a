"""Steps that fail on order, in whichever of the engine's processes installs them.

Files in the model repository's root order the faults:

    raise-in-step    a number: so many of the next steps raise, after their diffs were applied
    exhaust-memory   a number: so many of the next steps ask for more memory than there can be
    hang-in-step     a number: so many of the next steps never end
    poison           a token id: a row that joins with it in its prompt kills rank 0
    step-seconds     how long a step takes at least; it is always there
    load-seconds     how much longer it takes to load rank 0: until the file is gone, at most
    deaf.PID         rank 0, if that is its process, answers nothing while the file is there

The first three may name a process behind the number, whose steps are meant; without one it is the
next step of any.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch

from charonia.data.model.decoder import Decoder

ORDERS = Path(__file__).parents[3]
STEP_SECONDS = ORDERS / "step-seconds"
TOO_MANY_BYTES = 2**50  # more than a process can address

_hidden_states = Decoder.hidden_states


def install() -> None:
    """Have the steps of this process obey."""
    Decoder.hidden_states = _hidden_states_or_fail  # type: ignore[method-assign]


def _hidden_states_or_fail(self: Decoder, *args: Any) -> Any:
    if _is_ordered("raise-in-step"):
        raise RuntimeError("a test ordered this step to raise")
    if _is_ordered("exhaust-memory"):
        torch.empty(TOO_MANY_BYTES, dtype=torch.uint8)
    if _is_ordered("hang-in-step"):
        time.sleep(3600)
    time.sleep(float(STEP_SECONDS.read_text(encoding="utf-8")))
    return _hidden_states(self, *args)


def _is_ordered(fault: str) -> bool:
    order = ORDERS / fault
    if not order.exists():
        return False
    num_left, *pids = map(int, order.read_text(encoding="utf-8").split())
    if os.getpid() not in (pids or [os.getpid()]):
        return False
    if num_left > 1:
        order.write_text(" ".join(map(str, [num_left - 1, *pids])), encoding="utf-8")
    else:
        order.unlink()
    return True
