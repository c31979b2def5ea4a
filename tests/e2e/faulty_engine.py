"""The product's engine model, with faults on demand.

A test copies it over engine/1/model.py in its own copy of the model repository, where the product's
file is kept as product_model.py. Files in the repository's root order the faults:

    raise-in-step    a number: so many of the next steps raise, after their diffs were applied
    hang-in-step     a number: so many of the next steps never end
    poison           a token id: a row that joins with it in its prompt kills the process

A step takes at least STEP_S, so that streams are still under way when a fault is ordered.
"""

import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

from charonia.data.model.decoder import Decoder
from charonia.data.step_tensors import StepTensors
from charonia.protocol import NewRow

VERSION = Path(__file__).parent
ORDERS = VERSION.parents[1]
POISON = ORDERS / "poison"
STEP_S = 0.003

_spec = importlib.util.spec_from_file_location("product_model", VERSION / "product_model.py")
assert _spec is not None
assert _spec.loader is not None
_product_model = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_product_model)
TritonPythonModel = _product_model.TritonPythonModel

_hidden_states = Decoder.hidden_states
_join = StepTensors.join


def _is_ordered(fault: str) -> bool:
    order = ORDERS / fault
    num_left = int(order.read_text(encoding="utf-8")) if order.exists() else 0
    if num_left:
        order.write_text(str(num_left - 1), encoding="utf-8")
    return bool(num_left)


def _hidden_states_or_fail(self: Decoder, *args: Any) -> Any:
    if _is_ordered("raise-in-step"):
        raise RuntimeError("a test ordered this step to raise")
    if _is_ordered("hang-in-step"):
        time.sleep(3600)
    time.sleep(STEP_S)
    return _hidden_states(self, *args)


def _join_or_die(self: StepTensors, new: NewRow) -> None:
    if POISON.exists():
        poison = int(POISON.read_text(encoding="utf-8"))
        if poison in new.token_ids[: new.num_prompt]:
            os.kill(os.getpid(), signal.SIGKILL)
    _join(self, new)


Decoder.hidden_states = _hidden_states_or_fail  # type: ignore[method-assign]
StepTensors.join = _join_or_die  # type: ignore[method-assign]
