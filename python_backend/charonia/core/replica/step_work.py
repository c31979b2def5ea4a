"""Measures the work of an engine's plans.

Owns a cursor per row, because plans alone do not tell a row's position.
"""

from charonia.protocol import StepPlan, StepResult
from charonia.traces import StepWork


class WorkMeter:
    """Follows one scheduler's plans and their results."""

    def __init__(self) -> None:
        self._num_computed: dict[int, int] = {}  # by row

    def measure(self, plan: StepPlan) -> StepWork:
        """The work of the next plan."""
        computed = self._num_computed
        for join in plan.joins:
            computed[join.row] = join.num_computed
        num_tokens = num_context = num_pairs = 0
        for row in plan.rows:
            start = computed[row.row]
            num = row.num_tokens + row.num_drafts
            num_tokens += num
            num_context += start + num
            num_pairs += num * start + num * (num + 1) // 2
            computed[row.row] = start + row.num_tokens
        return StepWork(len(plan.rows), num_tokens, num_context, num_pairs)

    def note_result(self, plan: StepPlan, result: StepResult) -> None:
        """Move the cursors by the accepted drafts."""
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            if row.num_drafts:
                self._num_computed[row.row] += len(row_result.token_ids) - 1
