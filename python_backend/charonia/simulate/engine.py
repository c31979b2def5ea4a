"""The simulated engine: it computes nothing, and takes its time on a virtual clock.

Owns the clock, and when each step ends. Must not know policies, or why a plan is as it is.

    scheduler   ── plan, send ──┐                      ┌── result, apply, plan ──┐
                     host        │ transit              │                         │
    engine                       └──► step N ──────────►│ gap ► step N+1 (sent while N computed)
"""

from collections.abc import Callable
from dataclasses import dataclass

from charonia.core.replica.opening import EngineOpening
from charonia.core.replica.step_work import WorkMeter
from charonia.protocol import EngineInfo, NewRow, RowResult, StepPlan, StepResult
from charonia.simulate.step_times import StepClock

EOS_ID = -1
"""The token that ends an output; no prompt has it."""
FIRST_OWN_ID = 1 << 61
"""Ids of tokens that prompts may share are below this."""
_FIRST_OUTPUT_ID = 1 << 62  # outputs have other tokens than all prompts
VOCAB_SIZE = (1 << 63) - 1


class VirtualClock:
    """A clock that is set by calls."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time, in seconds."""
        return self.now

    def advance_to(self, when: float) -> None:
        """Let time pass. A time in the past changes nothing."""
        self.now = max(self.now, when)


@dataclass(slots=True)
class _Row:
    """A request in the engine.

    Attributes:
        num_left: tokens that it has yet to generate.
        num_lacking: tokens to compute before its next token.
        result, last: what it gives then, and with its last token.
    """

    num_left: int
    num_lacking: int
    result: RowResult
    last: RowResult
    nothing: RowResult


class SimulatedExecutor:
    """An `Executor` on a virtual clock.

    Args:
        output_length: number of tokens that a request will generate, by its sampling seed, which is
            its number. It then ends by `EOS_ID`, unless by its length.

    Attributes:
        busy_s: seconds of computing. num_steps, num_rows: steps, and their rows.
        num_ended: steps whose results were fetched.
    """

    def __init__(
        self,
        info: EngineInfo,
        times: StepClock,
        clock: VirtualClock,
        output_length: Callable[[int], int],
    ) -> None:
        self._info = info
        self._times = times
        self._clock = clock
        self._output_length = output_length
        self._meter = WorkMeter()
        self._rows: dict[int, _Row] = {}
        self._free_at = 0.0
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_rows = 0
        self.num_ended = 0

    def open(self, *, replace: bool, on_done: Callable[[], None]) -> EngineOpening:
        """See `Executor`. It succeeds at once."""
        opening = EngineOpening(lambda: self._info)
        opening.run()
        return opening

    def submit(self, plan: StepPlan) -> "_Simulated":
        """See `Executor`. Preparing the plan takes its time, too."""
        times, clock = self._times, self._clock
        clock.now += times.host_s(len(plan.rows))
        work = self._meter.measure(plan)
        seconds = times.seconds(work)
        began = max(clock.now + times.transit_s, self._free_at + times.gap_s(work.num_rows))
        self._free_at = began + seconds
        self.busy_s += seconds
        self.num_steps += 1
        self.num_rows += work.num_rows
        return _Simulated(clock, self._free_at, self._result(plan, seconds), self._note_end)

    def _note_end(self) -> None:
        self.num_ended += 1

    def check(self) -> None:
        """See `Executor`. Nothing fails."""

    def close(self) -> None:
        """See `Executor`."""

    def _result(self, plan: StepPlan, seconds: float) -> StepResult:
        for join in plan.joins:
            self._rows[join.row] = self._join(join)
        results = []
        for step in plan.rows:
            row = self._rows[step.row]
            row.num_lacking -= step.num_tokens
            if row.num_lacking > 0:
                results.append(row.nothing)
                continue
            row.num_lacking = 1
            row.num_left -= 1
            results.append(row.result if row.num_left > 0 else row.last)
        return StepResult(epoch=plan.epoch, step_id=plan.step_id, rows=results, seconds=seconds)

    def _join(self, join: NewRow) -> _Row:
        number = join.sampling.seed
        num_known = len(join.token_ids)
        return _Row(
            num_left=self._output_length(number) - (num_known - join.num_prompt),
            num_lacking=num_known - join.num_computed,
            result=RowResult(join.row, [_FIRST_OUTPUT_ID + number]),
            last=RowResult(join.row, [EOS_ID]),
            nothing=RowResult(join.row, []),
        )


class _Simulated:
    """A running step."""

    def __init__(
        self,
        clock: VirtualClock,
        ends_at: float,
        result: StepResult,
        note_end: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._ends_at = ends_at
        self._result = result
        self._note_end = note_end

    def result(self, timeout: float | None) -> StepResult:
        """See `Pending`. Time passes until the step has ended, or the timeout."""
        if timeout is not None and self._ends_at > self._clock.now + timeout:
            self._clock.now += timeout
            raise TimeoutError
        self._clock.advance_to(self._ends_at)
        self._note_end()
        return self._result
