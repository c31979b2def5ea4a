"""An engine in the caller's process, for the Python API and the tests.

Adapts a runner to `Executor`, nothing else.
"""

from collections.abc import Callable
from typing import Protocol

from charonia.core.replica.opening import EngineOpening
from charonia.errors import EngineDiedError, StepFailedError
from charonia.protocol import EngineInfo, StepPlan, StepResult


class PlanRunner(Protocol):
    """Executes plans: `charonia.data.runner.Runner`."""

    def info(self) -> EngineInfo:
        """Info of this engine."""
        ...

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step; the function that it returns ends it."""
        ...

    def close(self) -> None:
        """Release all other processes."""
        ...


class InlineExecutor:
    """Runs each step when its result is asked for; with a pipeline begins it at once.

    Args:
        load: loads the runner, at once and again whenever its other processes are lost.
    """

    def __init__(self, load: Callable[[], PlanRunner]) -> None:
        self._load = load
        self._runner: PlanRunner | None = load()
        self._loss: EngineDiedError | None = None

    def open(self, *, replace: bool, on_done: Callable[[], None]) -> EngineOpening:
        """Open as `Executor.open` does, but done when this returns.

        A runner whose processes are alive is not loaded again: the next epoch clears its state.
        """
        opening = EngineOpening(self._load_if_lost if replace else self._info)
        opening.run()
        return opening

    def submit(self, plan: StepPlan) -> "_Inline":
        """Keep the plan until its result is asked for; with a pipeline begin it at once."""
        step = _Inline(self, plan)
        if self._living().info().num_stages > 1:
            step.begin()
        return step

    def check(self) -> None:
        """Does nothing: the next step shows whether the runner's processes are alive."""

    def close(self) -> None:
        """Release all other processes; the runner is freed with its last reference."""
        if self._runner is not None:
            self._runner.close()

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step of the runner."""
        return self._living().begin(plan)

    def lose(self, error: EngineDiedError) -> None:
        """Note that the runner's processes are lost, with the error that says so."""
        self._loss = error

    def _info(self) -> EngineInfo:
        return self._living().info()

    def _load_if_lost(self) -> EngineInfo:
        if self._loss is not None:
            self._let_go(self._loss)
            self._loss = None
        if self._runner is None:
            self._runner = self._load()
        return self._info()

    def _living(self) -> PlanRunner:
        if self._runner is None:
            raise EngineDiedError("the engine could not be loaded again")
        return self._runner

    def _let_go(self, loss: EngineDiedError) -> None:
        """Drop every reference to a lost runner: the next one needs its memory."""
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        error: BaseException | None = loss
        while error is not None:  # a traceback refers to frames, and these refer to the runner
            error.__traceback__ = None
            error = error.__cause__ or error.__context__


class _Inline:
    def __init__(self, executor: InlineExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self._plan = plan
        self._end: Callable[[], StepResult] | None = None

    def begin(self) -> None:
        """Begin the step; an exception is kept for `result`."""
        try:
            self._end = self._executor.begin(self._plan)
        except Exception as error:
            reason = error

            def fail() -> StepResult:
                raise reason

            self._end = fail

    def result(self, timeout: float | None) -> StepResult:
        """End the step; the timeout is ignored."""
        if self._end is None:
            self.begin()
        assert self._end is not None
        try:
            return self._end()
        except EngineDiedError as error:
            self._executor.lose(error)
            raise
        except Exception as error:
            raise StepFailedError(f"{type(error).__name__}: {error}") from error
