"""The lifecycle of the sides of a run: started, resumed for their turn, paused, closed.

Owns how the sides are started, leaving out the peers that are not installed, and that a side which
waits does not compute: workers are stopped by a signal between their turns (vLLM's poll for a
second after each request), a tritonserver is only watched.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from systems_under_test import BASE, NAMES, QUANTIZED, SPECS, TRITON, Side, SideError, WorkerSide
from vllm_variants import Variant

CORE = (BASE, TRITON)
"""These fail the run where they fail; the others are left out."""


@dataclass
class Idleness:
    """Computation of a side while others had their turn, in seconds."""

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


@dataclass
class Launcher:
    """A way to start the sides of a run.

    Attributes:
        settings: `model`, `dtype` and `max_model_len`, of all sides.
        cache: where a side may write files made from the model.
        variants: by side, how it is launched; others are launched as they are.
    """

    settings: dict[str, Any]
    cache: Path
    variants: dict[str, Variant] = field(default_factory=dict)

    def start(self, name: str, variant: Variant | None = None) -> Side:
        """Start a side, as this variant rather than as its own.

        Raises:
            SideError: it is not installed, or cannot be started.
        """
        if name == TRITON:
            from triton_side import TritonSide

            rest = {key: value for key, value in self.settings.items() if key != "model"}
            return TritonSide(
                Path(self.settings["model"]),
                {**rest, "device": "cpu", "enable_prefix_caching": False},
            )
        spec, variant = SPECS[name], variant or self.variants.get(name)
        if missing := spec.missing():
            raise SideError(f"{name}: {missing}")
        settings = {**self.settings, **spec.settings}
        if spec.peer == "llamacpp":
            settings["cache"] = str(self.cache)
        return WorkerSide(
            name, spec.python, spec.script, settings, variant.variables if variant else None
        )


def start_sides(
    stack: contextlib.ExitStack,
    wanted: Sequence[str] | None,
    launcher: Launcher,
    *,
    with_int8: bool,
    say: Callable[[str], None],
) -> SideSet:
    """Start the sides, one after the other; `stack` closes them.

    Args:
        wanted: names of NAMES; None is all that are installed.
        with_int8: the quantized ones of them, too, where they can be started.

    Raises:
        SideError: a side that was asked for by name, or charonia itself, cannot be started.
    """
    found = SideSet()
    names = list(NAMES if wanted is None else wanted)
    if with_int8:
        names += [name for name, plain in QUANTIZED.items() if plain in names or plain == BASE]
    for name in names:
        say(f"starting {name}")
        try:
            side = launcher.start(name)
        except SideError as error:
            if name not in QUANTIZED and (wanted is not None or name in CORE):
                raise
            found.left_out[name] = str(error)
            say(f"left out: {error}")
            continue
        _admit(found, stack, name, side)
    return found


def _admit(found: SideSet, stack: contextlib.ExitStack, name: str, side: Side) -> None:
    stack.callback(side.close)
    if isinstance(side, WorkerSide):
        side.pause()
    found.sides[name] = side


def _cpu_seconds(side: Side) -> float:
    total = 0.0
    for process in side.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
