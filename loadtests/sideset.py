"""Which sides there are in a run, and whose turn it is.

Owns starting the sides, leaving out the peers that are not installed, and that a side which waits
does not compute: workers are stopped by a signal between their turns (vLLM's poll for a second
after each request), a tritonserver is only watched.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cases import BASE, INT8
from sides import NAMES, SPECS, TRITON, Side, SideError, WorkerSide

CORE = (BASE, TRITON)
"""These fail the run where they fail; the others are left out."""


@dataclass
class Idleness:
    """How much a side computed while others had their turn, in seconds."""

    waited: float = 0.0
    computed: float = 0.0


@dataclass
class SideSet:
    """The sides of a run.

    Attributes:
        left_out: sides that are not there, and why.
    """

    sides: dict[str, Side] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    idleness: dict[str, Idleness] = field(default_factory=dict)

    def turn(self, name: str, work: Callable[[Side], Any]) -> Any:
        """Let one side work while all others wait."""
        waiting = [other for other in self.sides if other != name]
        before = {other: _cpu_seconds(self.sides[other]) for other in waiting}
        started = time.perf_counter()
        side = self.sides[name]
        if isinstance(side, WorkerSide):
            side.resume()
        try:
            return work(side)
        finally:
            if isinstance(side, WorkerSide):
                side.pause()
            for other in waiting:
                idleness = self.idleness.setdefault(other, Idleness())
                idleness.waited += time.perf_counter() - started
                idleness.computed += _cpu_seconds(self.sides[other]) - before[other]

    def max_concurrency(self) -> dict[str, int | None]:
        """By side, in the order of tables; None is any number."""
        return {
            name: SPECS[name].max_concurrency if name in SPECS else None
            for name in (*NAMES, INT8)
            if name in self.sides
        }


def start_sides(
    stack: contextlib.ExitStack,
    wanted: Sequence[str] | None,
    settings: dict[str, Any],
    cache: Path,
    *,
    with_int8: bool,
    say: Callable[[str], None],
) -> SideSet:
    """Start the sides, one after the other; `stack` closes them.

    Args:
        wanted: names of NAMES; None is all that are installed.
        settings: `model`, `dtype` and `max_model_len`.
        cache: where a side may write files made from the model.

    Raises:
        SideError: a side that was asked for by name, or charonia itself, cannot be started.
    """
    found = SideSet()
    for name in NAMES if wanted is None else wanted:
        say(f"starting {name}")
        try:
            side = _start(name, settings, cache)
        except SideError as error:
            if wanted is not None or name in CORE:
                raise
            found.left_out[name] = str(error)
            say(f"left out: {error}")
            continue
        _admit(found, stack, name, side)
    if with_int8:
        try:
            side = _start(BASE, {**settings, "quantization": "int8"}, cache)
        except SideError as error:
            found.left_out[INT8] = str(error)
            say(f"left out: {INT8}: {error}")
        else:
            _admit(found, stack, INT8, side)
    return found


def _admit(found: SideSet, stack: contextlib.ExitStack, name: str, side: Side) -> None:
    stack.callback(side.close)
    if isinstance(side, WorkerSide):
        side.pause()
    found.sides[name] = side


def _start(name: str, settings: dict[str, Any], cache: Path) -> Side:
    if name == TRITON:
        from triton_side import TritonSide

        model, rest = Path(settings["model"]), {k: v for k, v in settings.items() if k != "model"}
        return TritonSide(model, {**rest, "device": "cpu", "enable_prefix_caching": False})
    spec = SPECS[name]
    missing = spec.missing()
    if missing:
        raise SideError(f"{name}: {missing}")
    own = {BASE: {"enable_prefix_caching": False}, "llama.cpp": {"cache": str(cache)}}
    return WorkerSide(name, spec.python, spec.script, {**settings, **own.get(name, {})})


def _cpu_seconds(side: Side) -> float:
    total = 0.0
    for process in side.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
