"""The protocols behind which any engine stands.

Owns what may be asked of an engine, and how it fails. Must not know any engine.
"""

from collections.abc import Callable
from typing import Protocol

from charonia.protocol.messages import EngineInfo, StepPlan, StepResult


class Pending(Protocol):
    """A step under way."""

    def result(self, timeout: float | None) -> StepResult:
        """Wait for the step, at most `timeout` seconds; it may be asked again.

        Raises:
            StepFailedError: the step raised, or the plan was refused; the engine lives.
            EngineDiedError: the engine is gone or does not answer.
            TimeoutError: still under way after `timeout`.
        """
        ...


class Opening(Protocol):
    """An engine that is being looked for or loaded."""

    @property
    def is_done(self) -> bool:
        """Whether it is known what came of it."""
        ...

    def result(self) -> EngineInfo:
        """What the engine is, once this is done.

        Raises:
            EngineDiedError: there is none, or it cannot be loaded; the text says why.
            EngineUnloadedError: none is to be there.
            ServerStoppingError: nor will there be one, as the server is shutting down.
        """
        ...


class Executor(Protocol):
    """Any engine, as the scheduler's side sees it."""

    def open(self, *, replace: bool, on_done: Callable[[], None]) -> Opening:
        """Begin to look for the engine, or to load one. One at a time; no step is in flight.

        Args:
            replace: kill what is left of the engine and load a fresh one, instead of asking the
                one that is there what it is.
            on_done: called at the end, from any thread, unless it is done when this returns.
        """
        ...

    def submit(self, plan: StepPlan) -> Pending:
        """Start a step, behind those under way: at most one for each stage, and one more.

        Steps run in this order, and their results are asked for in it. When one fails, those
        behind it are given up: nobody asks for their results.
        """
        ...

    def check(self) -> None:
        """Say whether an engine that has nothing to do is well; waits for nothing.

        Raises:
            EngineDiedError: it has gone, or does not answer; EngineUnloadedError: on purpose.
            ServerStoppingError: the server is shutting down.
        """
        ...

    def close(self) -> None:
        """Let go of the engine."""
        ...
