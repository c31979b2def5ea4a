"""Time to plan the step after the one that computes: as late as possible, but in time.

Owns the safety margin of predicted step ends. Must not know plans. Times are arguments, in seconds
by one clock.

    engine     ├─────────── step N ───────────┤├─── step N+1 ───
    scheduler            due ├ plan ┤ sent ──►│
                             │      └─ slack ─┘ must be at least the time of a message
               requests that arrive here are in step N+1

If step N+1 were planned as soon as step N begins, requests that arrive during N would miss N+1.
"""

_LATE_BY = 1.2  # factor by which the margin grows after a late plan
_LATE_SHARE = 0.02  # target share of late plans
_LEAST_MARGIN = 0.02
_RATE = 0.1  # of the moving averages


class PlanTime:
    """Chooses when to plan ahead, and learns from each plan whether it was in time.

    The margin is a share of the present step's time. It tracks a quantile of how much earlier than
    predicted steps end (Robbins and Monro 1951, "A Stochastic Approximation Method"): it grows by a
    fifth after a late plan and shrinks a little after each other one, so that a share of
    `_LATE_SHARE` is late. It stays apart from `CostCurve`, which predicts a mean by size: a margin
    is a quantile of that prediction's error, and planning and transit do not depend on a size.

    Attributes:
        margin: between 0 and 1. It begins at 1, where no plan is put off.
    """

    def __init__(self) -> None:
        self.margin = 1.0
        self._plan_s: float | None = None
        self._transit_s: float | None = None

    def due_at(self, began_at: float, step_s: float) -> float:
        """Return the time to plan the step after one.

        Args:
            began_at: time at which that one began. step_s: its predicted time.
        """
        needed_s = (self._plan_s or 0.0) + (self._transit_s or 0.0)
        return began_at + (1.0 - self.margin) * step_s - needed_s

    def note_plan(self, seconds: float) -> None:
        """Note the time that planning ahead took, with the sending of the plan."""
        self._plan_s = _moved(self._plan_s, seconds)

    def note_transit(self, seconds: float) -> None:
        """Note the transit time of a plan and its result, to and from an idle engine."""
        self._transit_s = _moved(self._transit_s, seconds)

    def note_slack(self, seconds: float, *, is_put_off: bool) -> None:
        """Note how long before the end of the step ahead a plan was sent.

        Args:
            seconds: 0 or less if it was not sent before that end was known.
            is_put_off: whether it could have been sent earlier; else the step was shorter than
                planning takes.
        """
        if seconds > (self._transit_s or 0.0):
            self.margin = max(_LEAST_MARGIN, self.margin / _LATE_BY**_LATE_SHARE)
        elif is_put_off:
            self.margin = min(1.0, _LATE_BY * self.margin)


def _moved(mean: float | None, seconds: float) -> float:
    return seconds if mean is None else mean + _RATE * (seconds - mean)
