"""What the plans of an engine have it compute.

Owns a cursor per row, beside those of the scheduler and the engine, which plans alone do not show.
"""

from charonia.protocol import StepPlan, StepResult
from charonia.traces import StepWork


class WorkMeter:
    """Follows one scheduler's plans and their results."""

    def __init__(self) -> None:
        self._num_computed: dict[int, int] = {}  # by row

    def measure(self, plan: StepPlan) -> StepWork:
        """What the next plan has the engine compute."""
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
        """Drafts that were accepted are computed, too."""
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            if row.num_drafts:
                self._num_computed[row.row] += len(row_result.token_ids) - 1
