"""An engine in this very process, for the Python API and the tests.

Owns nothing but the adaptation of a runner to `Executor`.
"""

from typing import Protocol

from charonia.errors import StepFailedError
from charonia.protocol import EngineInfo, StepPlan, StepResult


class PlanRunner(Protocol):
    """What executes plans: `charonia.data.runner.Runner`."""

    def info(self) -> EngineInfo:
        """What this engine is."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        ...


class InlineExecutor:
    """Runs each step when its result is asked for."""

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner

    def info(self) -> EngineInfo:
        """What the runner is."""
        return self._runner.info()

    def submit(self, plan: StepPlan) -> "_Inline":
        """Keep the plan until its result is asked for."""
        return _Inline(self._runner, plan)

    def restart(self) -> None:
        """Nothing to do: a runner in this process lives, and the next epoch clears its state."""

    def close(self) -> None:
        """Nothing to do: the runner goes with its last reference."""


class _Inline:
    def __init__(self, runner: PlanRunner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan

    def result(self, timeout: float | None) -> StepResult:
        """Compute the step; a timeout cannot be kept here."""
        try:
            return self._runner.execute(self._plan)
        except Exception as error:
            raise StepFailedError(f"{type(error).__name__}: {error}") from error
