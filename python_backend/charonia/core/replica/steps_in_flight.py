"""The steps in flight: submitted to the engine, and collected in order.

Owns the times of steps, their timeouts, and when the next step is planned (see `plan_time`). Must
not know requests, how results are used, nor how failures are handled.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from charonia.control import CostCurve
from charonia.core.replica.plan_time import PlanTime
from charonia.errors import EngineHungError
from charonia.metrics.metrics import Metrics
from charonia.protocol import Executor, Pending, StepPlan, StepResult

DEADLINE_FACTOR = 10.0


@dataclass(slots=True)
class _Submitted:
    """A step that the engine computes.

    Attributes:
        num_tokens: with drafts. at: when it was submitted.
        since: when `wait` first waited for it as the oldest step; None before.
    """

    pending: Pending
    num_tokens: int
    at: float
    since: float | None = None


class EndedStep(NamedTuple):
    """A step that has ended.

    Attributes:
        num_tokens: that it computed, with drafts. ended_at: when its result arrived.
    """

    result: StepResult
    num_tokens: int
    ended_at: float


class StepsInFlight:
    """The steps of one engine.

    Args:
        clock: monotonic, in seconds.
        min_deadline_s: least timeout of a step, in seconds.

    Attributes:
        last_step_at: when the result of a step with tokens last arrived; None before the first.
    """

    def __init__(
        self,
        executor: Executor,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        min_deadline_s: float,
    ) -> None:
        self._executor = executor
        self._metrics = metrics
        self._clock = clock
        self._min_deadline_s = min_deadline_s
        self._steps: deque[_Submitted] = deque()
        self._step_seconds = CostCurve()
        self._plan_time = PlanTime()
        self._plan_at = 0.0  # when to plan a second step; 0 is at once
        self._is_put_off = False  # whether that is later than possible
        self._plan_began_at = 0.0
        self._last_end = 0.0  # of any step, even without tokens
        self.last_step_at: float | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def is_plan_due(self, now: float) -> bool:
        """Return whether it is time to plan the next step."""
        return not self._steps or now >= self._plan_at

    def begin_plan(self, now: float) -> None:
        """Note that planning of the next step begins."""
        self._plan_at = 0.0
        self._plan_began_at = now

    def submit(self, plan: StepPlan) -> float | None:
        """Submit the step that was planned since `begin_plan`.

        Returns:
            When the engine began it; None if another one is ahead of it.
        """
        began_at, submitted = self._plan_began_at, self._clock()
        num_tokens = sum(row.num_tokens + row.num_drafts for row in plan.rows)
        if num_tokens:
            self._metrics.histograms["charonia_plan_seconds"].observe(submitted - began_at)
        is_ahead = bool(self._steps)
        self._steps.append(_Submitted(self._executor.submit(plan), num_tokens, submitted))
        if is_ahead:
            self._plan_time.note_plan(self._clock() - began_at)
            return None
        return submitted

    def wait(self, wait_s: float) -> EndedStep | None:
        """Wait for the oldest step; None if it takes longer than `wait_s` seconds.

        It also returns None when it is time to plan the next step.

        Raises:
            StepFailedError, EngineDiedError: as the engine says.
            EngineHungError: the step has timed out.
        """
        step = self._steps[0]
        now = self._clock()
        if step.since is None:
            step.since = now
        if self._plan_at:
            wait_s = min(wait_s, max(0.0, self._plan_at - now))
        try:
            result = step.pending.result(wait_s)
        except TimeoutError:
            seconds = self._deadline_s(step.num_tokens)
            if self._clock() - step.since >= seconds:
                raise EngineHungError(f"no answer of the engine within {seconds:g} s") from None
            return None
        return self._take(step, result)

    def set_plan_time(self, began_at: float, *, may_plan_ahead: bool) -> None:
        """Choose when to plan the next step, if only one is in flight, which began at `began_at`.

        Args:
            may_plan_ahead: whether a step may be planned while another one computes.
        """
        self._plan_at, self._is_put_off = 0.0, False
        if may_plan_ahead and len(self._steps) == 1:
            num_tokens = self._steps[0].num_tokens
            if num_tokens and self._step_seconds.is_measured(num_tokens):
                step_s = self._step_seconds.at(num_tokens)
                plan_at = self._plan_time.due_at(began_at, step_s)
                if plan_at > began_at:
                    self._plan_at, self._is_put_off = plan_at, True

    def give_up(self) -> None:
        """Discard all steps in flight."""
        self._steps.clear()

    def forget_times(self) -> None:
        """Discard the learned times of steps, which were another engine's."""
        self._step_seconds, self._plan_time = CostCurve(), PlanTime()

    def _take(self, step: _Submitted, result: StepResult) -> EndedStep:
        """Remove the oldest step, which has ended, and learn from its times."""
        self._steps.popleft()
        ended_at = self._clock()
        if self._steps or self._plan_at:
            slack_s = ended_at - self._steps[0].at if self._steps else 0.0
            self._plan_time.note_slack(slack_s, is_put_off=self._is_put_off)
        began_at = max(step.at, self._last_end)  # the step ahead of it must have ended
        transit_s = max(0.0, ended_at - began_at - result.seconds)
        if began_at == step.at:
            self._plan_time.note_transit(transit_s)
        self._last_end = ended_at
        if step.num_tokens:
            self.last_step_at = ended_at
            self._metrics.histograms["charonia_step_seconds"].observe(result.seconds)
            self._step_seconds.observe(step.num_tokens, result.seconds)
        self._metrics.count_phase("transit", transit_s)
        return EndedStep(result, step.num_tokens, ended_at)

    def _deadline_s(self, num_tokens: int) -> float:
        """Timeout of a step in seconds: many times the predicted time of its tokens."""
        predicted = self._step_seconds.at_most(num_tokens)
        return max(self._min_deadline_s, DEADLINE_FACTOR * predicted)
