"""The state of one engine, as the scheduler's side sees it.

Owns the present state (`transitions` has the table), when an engine is looked for or loaded again,
and the metrics and log lines of that. Must not know requests, plans, or how an engine is loaded.

Steps run in SERVING only. In the other states requests wait or are refused (see `down_reason`), and
cancellations and timeouts work. Engines are found and loaded elsewhere; an event brings the result.
"""

from collections.abc import Callable

from charonia.core.replica.transitions import TRANSITIONS, Event, State, next_state
from charonia.errors import (
    CharoniaError,
    EngineDiedError,
    EngineDownError,
    EngineHungError,
    EngineUnloadedError,
    ServerStoppingError,
    ShuttingDownError,
    StepFailedError,
    UnavailableError,
)
from charonia.events import error_event, event
from charonia.metrics.metrics import Metrics
from charonia.protocol import EngineInfo

CONNECT_RETRY_S = 0.1
BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
SILENT_START_S = 5.0
"""Time in which an engine that Triton calls loaded may fail to answer at the start, in seconds."""
UNLOADED_WAIT_S = 60.0
"""Time that requests wait for an engine that was unloaded, in seconds; then they fail."""
NOT_READY = "the engine is not ready yet"
MISSING = "the engine was unloaded; it can be loaded again by Triton's model control"
SHUTTING_DOWN = "the server is shutting down"
_IS_LOADED = frozenset({State.REPLACING, State.DOWN, State.RELOADING, State.RESTORING})
_IS_LOOKED_FOR = frozenset({State.STARTING, State.CHECKING, State.UNLOADED, State.MISSED})


class Recovery:
    """The state of one engine, with its metrics and log lines.

    Args:
        clock: monotonic, in seconds. log: takes one line.

    Attributes:
        info: of the engine, as last seen; None before there was one.
    """

    def __init__(
        self, *, metrics: Metrics, clock: Callable[[], float], log: Callable[[str], None]
    ) -> None:
        self.info: EngineInfo | None = None
        self._state = State.STARTING
        self._metrics = metrics
        self._clock = clock
        self._log = log
        self._num_failed_steps = 0
        self._num_failed_loads = 0
        self._has_stumbled = False
        self._retry_at = 0.0
        self._gone_at = 0.0
        self._found_at = 0.0
        self._silent_since: float | None = None  # at the start, see `_note_missing_at_start`
        self._failure = ""  # why the last load failed
        self._show_state()

    # ------------------------------------------------------------------ questions

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    @property
    def is_serving(self) -> bool:
        """True if there is an engine that steps can run on now."""
        return self._state is State.SERVING

    @property
    def serving_since(self) -> float | None:
        """Time at which this engine was found; None while none serves."""
        return self._found_at if self.is_serving else None

    @property
    def down_reason(self) -> str | None:
        """Reason why requests fail at once; None if there is an engine or they wait for one."""
        match self._state:
            case State.STARTING:
                return NOT_READY
            case State.DOWN:
                return f"the engine is down and cannot be loaded: {self._failure}"
            case State.MISSED:
                return MISSING
            case State.STOPPED:
                return SHUTTING_DOWN
            case _:
                return None

    @property
    def unavailable(self) -> UnavailableError:
        """The error of a request that cannot wait for an engine."""
        if self._state is State.STOPPED:
            return ShuttingDownError()
        return EngineDownError(self.down_reason or NOT_READY)

    @property
    def known_info(self) -> EngineInfo:
        """Info of the engine, as last seen.

        Raises:
            UnavailableError: there was no engine yet.
        """
        if self.info is None:
            raise self.unavailable
        return self.info

    @property
    def is_to_be_loaded(self) -> bool:
        """True if an engine is to be loaded, not only looked for."""
        return self._state in _IS_LOADED

    @property
    def is_due(self) -> bool:
        """True if an engine is to be looked for or loaded now."""
        is_wanted = self._state in _IS_LOADED or self._state in _IS_LOOKED_FOR
        return is_wanted and self._clock() >= self._retry_at

    @property
    def is_overdue(self) -> bool:
        """True if the wait for an engine that was unloaded has timed out."""
        return self._state is State.UNLOADED and self._clock() - self._gone_at >= UNLOADED_WAIT_S

    def may(self, happened: Event) -> bool:
        """Return whether this event can happen in the present state."""
        return happened in TRANSITIONS[self._state]

    def knows(self, info: EngineInfo) -> bool:
        """Return whether this is the engine that served last, with the same processes."""
        is_same = self.info is not None and info.pids == self.info.pids
        return is_same and self._state is State.CHECKING

    # ------------------------------------------------------------------ results of a search

    def note_found(self, info: EngineInfo, num_live: int) -> None:
        """An engine was found or loaded and serves; `num_live` requests go on with it."""
        before = self._state
        self._move(Event.FOUND)
        self.info = info
        self._retry_at = 0.0  # later losses begin a new back-off
        if before is State.CHECKING:
            return  # the failed step still counts: the next one is the second in a row
        self._found_at = self._clock()
        self._num_failed_loads = self._num_failed_steps = 0
        self._has_stumbled = False
        if before is State.STARTING:
            return
        seconds = self._clock() - self._gone_at
        self._metrics.count("charonia_requests_recomputed_total", num_live)
        if before in (State.REPLACING, State.DOWN):
            self._metrics.count("charonia_engine_restarts_total")
            self._metrics.observe_request("charonia_recovery_seconds", seconds)
            self._log(event("engine_back", seconds=seconds, recomputed=num_live))
        elif before is State.RESTORING:
            self._log(event("engine_restored", seconds=seconds, recomputed=num_live))
        else:
            self._metrics.count("charonia_engine_reloads_total")
            self._log(event("engine_reloaded", seconds=seconds, recomputed=num_live))

    def note_missing(self, error: CharoniaError, num_live: int) -> None:
        """No engine was found or loaded, or it cannot be used.

        Args:
            num_live: requests that wait for it.
        """
        is_looked_for = self._state in _IS_LOOKED_FOR
        if isinstance(error, EngineDiedError) and self._state is State.STARTING:
            self._note_missing_at_start(error, num_live)
        elif isinstance(error, ServerStoppingError):
            self.stop(num_live)
        elif is_looked_for and isinstance(error, EngineUnloadedError):
            self.unload(num_live)
        elif is_looked_for and isinstance(error, EngineDiedError):
            self.lose(error, num_live)
        elif isinstance(error, EngineDiedError) and self._may_stumble:
            self.stumble(error)
        else:
            self._fail(error, num_live)

    def _note_missing_at_start(self, error: EngineDiedError, num_live: int) -> None:
        """The engine may still be loading, or the server starting. A loaded engine must answer."""
        if isinstance(error, EngineUnloadedError | ServerStoppingError):
            self._silent_since = None
            self.unload(num_live)
            return
        now = self._clock()
        if self._silent_since is None:
            self._silent_since = now
        if now - self._silent_since < SILENT_START_S:
            self.unload(num_live)
        else:
            self.lose(error, num_live)

    def give_up(self, error: EngineDiedError, num_live: int) -> None:
        """The attempt to find or load an engine is stuck; requests stop waiting for it."""
        if self._state is State.CHECKING:
            self._gone_at = self._clock()
        self._move(Event.STUCK)
        self._failure = str(error)
        self._count("load_failed")
        self._log(error_event("engine_load_stuck", failed_requests=num_live, reason=error))

    def stumble(self, error: EngineDiedError) -> None:
        """The engine died while it was loaded; the next attempt follows at once."""
        self._move(Event.STUMBLED)
        self._has_stumbled = True
        self._count("load_failed")
        self._log(error_event("engine_load_failed", retry_in=0.0, failed_requests=0, reason=error))

    @property
    def _may_stumble(self) -> bool:
        return not self._has_stumbled and self.may(Event.STUMBLED)

    def back_off(self) -> float:
        """Delay the next attempt, longer each time; return the delay in seconds."""
        wait = BACKOFF_S[min(self._num_failed_loads, len(BACKOFF_S) - 1)]
        self._num_failed_loads += 1
        self._retry_at = self._clock() + wait
        return wait

    def _fail(self, error: CharoniaError, num_live: int) -> None:
        if self._state in (State.STARTING, State.CHECKING):
            self._gone_at = self._clock()
        self._failure = str(error)
        self._count("load_failed")
        if self._state is State.RELOADING:
            self._move(Event.FAILED)
            self._retry_at = 0.0
            self._log(error_event("engine_reload_failed", live=num_live, reason=error))
            return
        self._move(Event.FAILED)
        wait = self.back_off()
        self._log(
            error_event("engine_load_failed", retry_in=wait, failed_requests=num_live, reason=error)
        )

    # ------------------------------------------------------------------ other events

    def note_step(self) -> None:
        """Note a successful step."""
        self._num_failed_steps = 0

    def note_failed_step(self, error: StepFailedError, num_live: int) -> bool:
        """Note a failed step.

        Returns:
            Whether the engine counts as dead: two steps in a row have failed.
        """
        self._num_failed_steps += 1
        self._count("step_failed")
        self._log(error_event("step_failed", live=num_live, reason=error))
        return self._num_failed_steps > 1

    def doubt(self) -> None:
        """The state of the engine is uncertain: connect to it again before it serves."""
        self._move(Event.DOUBTED)

    def lose(self, error: Exception, num_live: int) -> None:
        """The engine is dead or hangs, and is to be replaced.

        Args:
            error: the error that showed it. num_live: requests that wait for the next engine.
        """
        self._move(Event.LOST)
        self._gone()
        self._failure = str(error)
        kind = _kind(error)
        if kind != "step_failed":  # failed steps are counted already
            self._count(kind)
        self._log(
            error_event(
                "engine_died",
                kind=kind,
                live=num_live,
                restarts=int(self._metrics.counters["charonia_engine_restarts_total", ""]),
                reason=error,
            )
        )

    def unload(self, num_live: int) -> None:
        """Triton has unloaded the engine, or has not loaded it again yet; no request is blamed."""
        before = self._state
        self._move(Event.UNLOADED)
        self._retry_at = self._clock() + CONNECT_RETRY_S
        if self._state is not before:
            self._gone()
            self._log(event("engine_unloaded", live=num_live))

    def wait_no_longer(self, num_live: int) -> None:
        """The wait for an engine that was unloaded has timed out."""
        self._move(Event.OVERDUE)
        self._log(error_event("engine_missed", failed_requests=num_live, reason=MISSING))

    def order(self, num_live: int) -> None:
        """An operator has ordered a reload: this engine is to be replaced."""
        self._move(Event.ORDERED)
        self._gone()
        self._log(event("engine_reloading", live=num_live))

    def stop(self, num_live: int = 0) -> None:
        """The server is shutting down; losing the engine is no failure any more."""
        before = self._state
        self._move(Event.STOPPED)
        if before is not State.STOPPED:
            self._log(event("shutting_down", failed_requests=num_live))

    def _gone(self) -> None:
        self._num_failed_steps = 0
        self._retry_at = 0.0
        self._gone_at = self._clock()

    def _move(self, happened: Event) -> None:
        before = self._state
        self._state = next_state(before, happened)
        if self._state is not before:
            self._show_state()

    def _show_state(self) -> None:
        """Update the gauges in one operation: another thread copies them at any moment."""
        name, present = "charonia_engine_state", self._state
        self._metrics.gauges.update(
            {(name, state.name.lower()): float(state is present) for state in State}
        )

    def _count(self, kind: str) -> None:
        self._metrics.count("charonia_engine_failures_total", label=kind)


def _kind(error: Exception) -> str:
    match error:
        case StepFailedError():
            return "step_failed"
        case EngineHungError():
            return "hung"
        case _:
            return "died"
