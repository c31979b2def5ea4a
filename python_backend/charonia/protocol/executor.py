"""The protocols that every engine implements.

Owns what may be asked of an engine, and how it fails. Knows nothing about any engine.
"""

from collections.abc import Callable
from typing import Protocol

from charonia.protocol.messages import EngineInfo, StepPlan, StepResult


class Pending(Protocol):
    """A step in flight."""

    def result(self, timeout: float | None) -> StepResult:
        """Wait for the step, at most `timeout` seconds; may be called again.

        Raises:
            StepFailedError: the step raised, or the plan was refused; the engine lives.
            EngineDiedError: the engine is gone or does not answer.
            TimeoutError: the step is still in flight after `timeout`.
        """
        ...


class Opening(Protocol):
    """An engine that is being looked for or loaded."""

    @property
    def is_done(self) -> bool:
        """True if the outcome is known."""
        ...

    def result(self) -> EngineInfo:
        """Return what the engine is, once this is done.

        Raises:
            EngineDiedError: there is no engine, or it cannot be loaded; the text says why.
            EngineUnloadedError: the engine was unloaded on purpose.
            ServerStoppingError: the server is shutting down, so there will be no engine.
        """
        ...


class Executor(Protocol):
    """An engine of any kind, as the scheduler sees it."""

    def open(self, *, replace: bool, on_done: Callable[[], None]) -> Opening:
        """Begin to look for the engine, or to load one. One at a time, while no step is in flight.

        Args:
            replace: kill what is left of the engine and load a fresh one, instead of asking the
                existing one what it is.
            on_done: called at the end, from any thread, unless it is done when this returns.
        """
        ...

    def submit(self, plan: StepPlan) -> Pending:
        """Start a step behind those in flight: at most one for each stage, and one more.

        Steps run in this order, and their results are collected in it. When one fails, those
        behind it are given up, and their results are never collected.
        """
        ...

    def check(self) -> None:
        """Check that an idle engine is alive; never waits.

        Raises:
            EngineDiedError: it is gone, or does not answer. EngineUnloadedError: it was unloaded on
                purpose.
            ServerStoppingError: the server is shutting down.
        """
        ...

    def close(self) -> None:
        """Release the engine."""
        ...
