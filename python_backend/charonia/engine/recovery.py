"""The life of the engine, as the scheduler's side sees it.

Owns whether there is an engine, when one is looked for and when it must be loaded anew, and what is
counted and logged of its failures and reloads. Must not know requests, plans, or what becomes of
them.

    not there yet ──► serving ──lose(), part()──► gone ──find()──► serving
                                                  │  ▲
                                           fail() ▼  │ find(), after a back-off
                                                  down              requests are refused

An engine is gone in one of four ways: it is lost, and must be replaced; it is to be replaced by
another one (reloading); that one cannot be loaded, so it is to come back itself (restoring); or
Triton has unloaded it, on whose behalf somebody is to load it again.
"""

from collections.abc import Callable
from typing import Literal

from charonia.engine.metrics import Metrics
from charonia.errors import (
    CharoniaError,
    EngineDiedError,
    EngineHungError,
    EngineUnloadedError,
    StepFailedError,
)
from charonia.events import event
from charonia.protocol import EngineInfo, Executor

CONNECT_RETRY_S = 0.1
BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
UNLOADED_WAIT_S = 60.0
"""How long requests wait for an engine that was unloaded; then they fail."""
NOT_READY = "the engine is not ready yet"
UNLOADED = "the engine was unloaded; it can be loaded again by Triton's model control"
Gone = Literal["lost", "reloading", "restoring", "unloaded"]


class Recovery:
    """Notices, counts and mends what befalls one engine.

    Args:
        clock: seconds, monotonic. log: takes one line.

    Attributes:
        info: of the engine as last seen, None before there was one.
        down_reason: why there is none that requests could wait for; None while there is.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        metrics: Metrics,
        clock: Callable[[], float],
        log: Callable[[str], None],
    ) -> None:
        self.info: EngineInfo | None = None
        self.down_reason: str | None = NOT_READY
        self._executor = executor
        self._metrics = metrics
        self._clock = clock
        self._log = log
        self._num_failed_steps = 0
        self._num_failed_loads = 0
        self._retry_at = 0.0
        self._gone: Gone | None = None
        self._gone_at = 0.0

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine that steps can run on at this very moment."""
        return self.down_reason is None and self._gone is None

    def knows(self, info: EngineInfo) -> bool:
        """Whether this is the engine that served last, of the same processes."""
        return self._gone is None and self.info is not None and info.pids == self.info.pids

    # ------------------------------------------------------------------ looking for an engine

    @property
    def is_due(self) -> bool:
        """Whether an engine may be looked for now."""
        return self._clock() >= self._retry_at

    def find(self) -> EngineInfo:
        """Ask the engine that is there what it is; one that is to be replaced is so first.

        Raises:
            EngineDiedError: there is none; EngineUnloadedError: none is loaded.
        """
        if self._gone in ("lost", "reloading", "restoring"):
            self._executor.restart()
        return self._executor.info()

    def succeed(self, info: EngineInfo, num_live: int) -> None:
        """The engine that was found serves, and so many requests go on with it."""
        self.info = info
        self.down_reason = None
        self._num_failed_loads = 0
        self._num_failed_steps = 0
        self._retry_at = 0.0  # the next loss is another matter
        gone, self._gone = self._gone, None
        if gone is None:
            return
        seconds = self._clock() - self._gone_at
        self._metrics.count("charonia_requests_recomputed_total", num_live)
        if gone == "lost":
            self._metrics.count("charonia_engine_restarts_total")
            self._metrics.observe_request("charonia_recovery_seconds", seconds)
            self._log(event("engine_back", seconds=seconds, recomputed=num_live))
        elif gone == "restoring":
            self._log(event("engine_restored", seconds=seconds, recomputed=num_live))
        else:
            self._metrics.count("charonia_engine_reloads_total")
            self._log(event("engine_reloaded", seconds=seconds, recomputed=num_live))

    def fail(self, error: CharoniaError, num_live: int) -> bool:
        """No engine was found, or it is of no use.

        Args:
            num_live: requests that wait for it.

        Returns:
            Whether it is down now, so that nobody should wait any longer.
        """
        if self.info is None and isinstance(error, EngineDiedError):
            self._retry_at = self._clock() + CONNECT_RETRY_S
            return False
        if self._gone == "unloaded" and isinstance(error, EngineDiedError):
            if isinstance(error, EngineUnloadedError):
                return self._wait_for_load(num_live)
            self.lose(error, num_live)  # it was loaded again; the next try replaces it
            return False
        wait = self.back_off()
        kind = "load_failed"
        if self.info is not None and self._gone is None:
            self._go("lost")
            kind = _kind(error)
        self.down_reason = f"the engine is down and cannot be loaded: {error}"
        self._count(kind)
        self._log(
            event("engine_load_failed", retry_in=wait, failed_requests=num_live, reason=error)
        )
        return True

    def _wait_for_load(self, num_live: int) -> bool:
        """Nobody has loaded the engine again yet; whoever unloaded it may do so at any time."""
        self._retry_at = self._clock() + CONNECT_RETRY_S
        if self.down_reason is not None or self._clock() - self._gone_at < UNLOADED_WAIT_S:
            return False
        self.down_reason = UNLOADED
        self._log(event("engine_missed", failed_requests=num_live, reason=UNLOADED))
        return True

    def back_off(self) -> float:
        """Put the next try off, further each time; return for how many seconds."""
        wait = BACKOFF_S[min(self._num_failed_loads, len(BACKOFF_S) - 1)]
        self._num_failed_loads += 1
        self._retry_at = self._clock() + wait
        return wait

    # ------------------------------------------------------------------ failures

    def note_step(self) -> None:
        """A step succeeded."""
        self._num_failed_steps = 0

    def note_failed_step(self, error: StepFailedError, num_live: int) -> bool:
        """A step raised.

        Returns:
            Whether the engine counts as dead: it was the second step in a row.
        """
        self._num_failed_steps += 1
        self._count("step_failed")
        self._log(event("step_failed", live=num_live, reason=error))
        return self._num_failed_steps > 1

    def lose(self, error: Exception, num_live: int) -> None:
        """The engine is gone: whatever is left of it is to be replaced.

        Args:
            error: what showed it. num_live: requests that wait for the next one.
        """
        self._num_failed_steps = 0
        self._go("lost")
        kind = _kind(error)
        if kind != "step_failed":  # those are counted already
            self._count(kind)
        self._log(
            event(
                "engine_died",
                kind=kind,
                live=num_live,
                restarts=int(self._metrics.counters["charonia_engine_restarts_total", ""]),
                reason=str(error) or "no answer in time",
            )
        )

    def part(self, gone: Gone, num_live: int) -> None:
        """The engine goes, and nobody is to blame.

        Args:
            gone: how. num_live: requests that wait for the next one.
        """
        self._num_failed_steps = 0
        self._go(gone)
        self._log(event(f"engine_{gone}", live=num_live))

    def give_up_reload(self, reason: str, num_live: int) -> None:
        """The engine that was to be loaded cannot be; the one before it is to come back."""
        self._gone = "restoring"
        self._retry_at = 0.0
        self._count("load_failed")
        self._log(event("engine_reload_failed", live=num_live, reason=reason))

    def forget(self, reason: str) -> None:
        """What is known of the engine is void; it is asked anew before it serves."""
        self.down_reason = reason
        self._num_failed_steps = 0

    def _go(self, gone: Gone) -> None:
        self._gone = gone
        self._gone_at = self._clock()

    def _count(self, kind: str) -> None:
        self._metrics.count("charonia_engine_failures_total", label=kind)


def _kind(error: Exception) -> str:
    match error:
        case StepFailedError():
            return "step_failed"
        case EngineHungError() | TimeoutError():
            return "hung"
        case _:
            return "died"
