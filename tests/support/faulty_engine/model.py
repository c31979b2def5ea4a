"""The product's engine model, with faults on demand; see startup/faulty_steps.py.

`faults.make_faulty_repository` puts it in the place of engine/1/model.py, where the product's file
is kept as product_model.py. The other ranks get the faults too, each in its own process.
"""

import contextlib
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

from charonia.data.step_tensors import StepTensors
from charonia.protocol import EngineRequest, NewRow
from charonia.serving.hosts.engine import EngineHost
from charonia.sockets.answering import Answer

VERSION = Path(__file__).parent
STARTUP = VERSION / "startup"
ORDERS = VERSION.parents[1]
POISON = ORDERS / "poison"
LOAD_SECONDS = ORDERS / "load-seconds"
DEAF = ORDERS / f"deaf.{os.getpid()}"
LOOK_EVERY_S = 0.05

# Python loads sitecustomize.py from there when a rank starts.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(STARTUP), os.environ.get("PYTHONPATH")))
)
sys.path.append(str(STARTUP))
import faulty_steps  # noqa: E402

faulty_steps.install()
with contextlib.suppress(FileNotFoundError):
    deadline = time.monotonic() + float(LOAD_SECONDS.read_text(encoding="utf-8"))
    while LOAD_SECONDS.exists() and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)

_spec = importlib.util.spec_from_file_location("product_model", VERSION / "product_model.py")
assert _spec is not None
assert _spec.loader is not None
_product_model = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_product_model)
TritonPythonModel = _product_model.TritonPythonModel

_join = StepTensors.join
_begin = EngineHost._begin


def _join_or_die(self: StepTensors, new: NewRow) -> None:
    if POISON.exists():
        poison = int(POISON.read_text(encoding="utf-8"))
        if poison in new.token_ids[: new.num_prompt]:
            os.kill(os.getpid(), signal.SIGKILL)
    _join(self, new)


def _begin_unless_deaf(self: EngineHost, message: EngineRequest) -> Answer:
    while DEAF.exists():
        time.sleep(LOOK_EVERY_S)
    return _begin(self, message)


StepTensors.join = _join_or_die  # type: ignore[method-assign]
EngineHost._begin = _begin_unless_deaf  # type: ignore[method-assign]
