"""Ways to bring about each kind of fault.

Owns the actions on the server's processes. Must not know the streams that suffer from it.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from faults.calls import Call
from faults.footprint import ranks_of
from faults.kinds import DEATHS_BY_POISON
from faults.target import Counts, Target, TargetError
from support.e2e import wait_for
from support.faults import order_fault

SAID_OF_POISON = "the request stops the engine each time it runs"
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_RELOADED = {"max_num_batched_tokens": (256, 240)}  # in turns, for a reload that changes something
_WAIT_S = 30.0
_LOAD_S = (0.0, 1.0)  # an engine that is loaded needs longer than that
_PREFILL_S = (0.1, 0.25)  # a long prompt needs longer than that, and has begun by then


@dataclass(frozen=True)
class Strike:
    """A fault that has been brought about.

    Attributes:
        victim: what was struck. at: `time.monotonic`.
        is_mended: asks whether it broke what it should, and that serves again.
        call: one that has a part in it. is_poisoned: it kills, and so it must fail.
    """

    victim: str
    at: float
    is_mended: Callable[[], bool]
    call: Call | None = None
    is_poisoned: bool = False

    @property
    def ended_at(self) -> float | None:
        """Time at which the last of it broke; None while a poisoned call, which kills, is open."""
        if not self.is_poisoned:
            return self.at
        assert self.call is not None
        return self.call.ended_at

    @property
    def is_answered_right(self) -> bool:
        """True if a poisoned call got the error that it should, and no token."""
        if not self.is_poisoned:
            return True
        assert self.call is not None
        answer = self.call.answer()
        return SAID_OF_POISON in (answer.error or "") and not answer.num_tokens


@dataclass(frozen=True)
class Scene:
    """Circumstances in which a fault is brought about.

    Attributes:
        before: counts before it. draw: the only source of chance.
        poison, long: send a call that kills the engine, or one with a long prompt.
        exposed: calls under way that may fail.
    """

    target: Target
    before: Counts
    draw: random.Random
    poison: Callable[[], Call]
    long: Callable[[], Call]
    exposed: Callable[[], Sequence[Call]]

    def has_lost_engines(self, least: int) -> bool:
        """Return whether so many engines were lost and replaced, or one with the whole server."""
        now = self.target.counts()
        if now is None:
            return False
        return now.servers > self.before.servers or now.engines_since(self.before) >= least


def _signal_engine(signum: signal.Signals, scene: Scene) -> Strike:
    ranks = ranks_of(scene.target.server)
    victim = scene.draw.randrange(len(ranks))
    at = time.monotonic()
    ranks[victim].send_signal(signum)
    return Strike(f"rank {victim}", at, partial(scene.has_lost_engines, 1))


def _fail_step(order_name: str, scene: Scene) -> Strike:
    ranks = ranks_of(scene.target.server)
    victim = scene.draw.randrange(len(ranks))
    at = time.monotonic()
    order = order_fault(scene.target.server.repository, order_name, 1, pid=ranks[victim].pid)
    # One rank alone can go on after a step that failed; several are out of step.
    least = int(len(ranks) > 1)
    return Strike(
        f"rank {victim}", at, lambda: not order.exists() and scene.has_lost_engines(least)
    )


def _poison(scene: Scene) -> Strike:
    at = time.monotonic()
    is_mended = partial(scene.has_lost_engines, DEATHS_BY_POISON)
    return Strike("a request", at, is_mended, scene.poison(), is_poisoned=True)


def _kill_twice(scene: Scene) -> Strike:
    old = _engine_pids(scene)
    first = _signal_engine(signal.SIGKILL, scene)
    victim = _kill_while_loading(scene, old)
    return Strike(victim, first.at, first.is_mended)


def _kill_in_reload(scene: Scene) -> Strike:
    old = _engine_pids(scene)
    current = scene.target.engine_arguments()
    change = {name: values[current[name] == values[0]] for name, values in _RELOADED.items()}
    at = time.monotonic()  # it takes the old engine, and with that it begins
    reload = scene.target.start_reload(change)
    victim = _kill_while_loading(scene, old)
    return Strike(victim, at, lambda: reload.poll() is not None)


def _kill_in_prefill(scene: Scene) -> Strike:
    call = scene.long()
    time.sleep(scene.draw.uniform(*_PREFILL_S))
    has_begun = bool(call.token_ids)
    done = _signal_engine(signal.SIGKILL, scene)
    return Strike(
        done.victim, done.at, lambda: not has_begun and call.is_over and done.is_mended(), call
    )


def _kill_when_growing(metric: str, scene: Scene) -> Strike:
    """Kill the engine once a counter grows, which shows that it does what it counts."""
    before = scene.target.samples()[metric]
    now = wait_for(
        lambda: scene.target.samples().get(metric, 0.0), lambda now: now > before, _WAIT_S
    )
    does = now > before
    done = _signal_engine(signal.SIGKILL, scene)
    return Strike(done.victim, done.at, lambda: does and done.is_mended())


def _signal_model(signum: signal.Signals, model: str, scene: Scene) -> Strike:
    """Strike a process of a model that is brought back alone, if the calls in it can be ended."""
    processes = scene.target.server.model_processes(model)
    victim = scene.draw.choice(processes)
    exposed = scene.exposed()
    at = time.monotonic()
    victim.send_signal(signum)

    def is_mended() -> bool:
        now = scene.target.server.model_processes(model)
        is_replaced = victim not in now and len(now) == len(processes)
        has_ended = all(call.is_over for call in exposed)
        return is_replaced and has_ended and scene.target.is_loaded(model)

    return Strike(model, at, is_mended)


def _signal_server(signum: signal.Signals, model: str | None, scene: Scene) -> Strike:
    """Strike a model's process, or tritonserver's own, with which the whole server is lost."""
    server = scene.target.server
    assert server.pid is not None
    pid = server.pid if model is None else server.pids(model)[0]
    at = time.monotonic()
    os.kill(pid, signum)
    return Strike(
        model or "tritonserver", at, lambda: scene.target.num_restarts > scene.before.servers
    )


def _engine_pids(scene: Scene) -> set[int]:
    return {*scene.target.server.pids("engine")}


def _kill_while_loading(scene: Scene, old: set[int]) -> str:
    """Kill a process of the engine that replaces those; returns which one it was."""
    if not wait_for(lambda: _engine_pids(scene) - old, bool, _WAIT_S):
        raise TargetError(f"no engine was loaded within {_WAIT_S:g} s")
    time.sleep(scene.draw.uniform(*_LOAD_S))
    ranks = [rank for rank in ranks_of(scene.target.server) if rank.pid not in old]
    victim = scene.draw.randrange(len(ranks))
    ranks[victim].kill()
    return f"rank {victim}"


STRIKES: dict[str, Callable[[Scene], Strike]] = {
    **{name: partial(_signal_engine, signum) for name, signum in _SIGNALS.items()},
    "exception": partial(_fail_step, "raise-in-step"),
    "memory": partial(_fail_step, "exhaust-memory"),
    "poison": _poison,
    "kill-in-recovery": _kill_twice,
    "kill-in-reload": _kill_in_reload,
    "kill-in-prefill": _kill_in_prefill,
    "kill-with-drafts": partial(_kill_when_growing, "charonia_accepted_tokens_total"),
    "kill-when-full": partial(_kill_when_growing, "charonia_preemptions_total"),
    **{
        f"{name}-{model}": partial(_signal_model, signum, model)
        for model in ("tokenizer", "postprocessor", "generate")
        for name, signum in _SIGNALS.items()
    },
    **{
        f"{name}-{model or 'tritonserver'}": partial(_signal_server, signum, model)
        for model in ("scheduler", None)
        for name, signum in _SIGNALS.items()
    },
}
"""Strikes by the name of the kind."""
