"""When the step after the one that computes is planned: as late as it can be in time.

Owns how far it is to be believed when a step will end. Must not know what is planned. Times are
arguments, in seconds by one clock.

    engine     ├─────────── step N ───────────┤├─── step N+1 ───
    scheduler            due ├ plan ┤ sent ──►│
                             │      └─ slack ─┘ has to be as long as a message takes
               who comes here is in step N+1

Were it planned as soon as step N begins, whoever comes while N computes would wait for N+1, too.
"""

_LATE_BY = 1.2  # times as much of a step is kept as a margin after a plan that came too late
_LATE_SHARE = 0.02  # of the plans that were put off may come too late
_LEAST_MARGIN = 0.02
_RATE = 0.1  # at which what is learned follows what is seen


class PlanTime:
    """Chooses when to plan ahead, and learns from each plan whether that was in time.

    The margin is a share of the step that is waited for. It follows the quantile of how much
    earlier than expected steps end (Robbins and Monro 1951, "A Stochastic Approximation Method"):
    up by a fifth when a plan was late, and down a little after each that was not, so that as few
    are late as `_LATE_SHARE` says.

    Attributes:
        margin: between 0 and 1; at 1, where it begins, nothing is put off.
    """

    def __init__(self) -> None:
        self.margin = 1.0
        self._plan_s: float | None = None
        self._transit_s: float | None = None

    def due_at(self, began_at: float, step_s: float) -> float:
        """When to plan the step behind one.

        Args:
            began_at: when that began. step_s: what it is expected to take.
        """
        needed_s = (self._plan_s or 0.0) + (self._transit_s or 0.0)
        return began_at + (1.0 - self.margin) * step_s - needed_s

    def note_plan(self, seconds: float) -> None:
        """To plan ahead took so long, sending it included."""
        self._plan_s = _moved(self._plan_s, seconds)

    def note_transit(self, seconds: float) -> None:
        """A plan and its result were under way for so long, to and from an idle engine."""
        self._transit_s = _moved(self._transit_s, seconds)

    def note_slack(self, seconds: float, *, is_put_off: bool) -> None:
        """A plan was sent so long before the step ahead of it was known to have ended.

        Args:
            seconds: 0 or less when it was not sent before that.
            is_put_off: whether it might have been sent sooner; else the step was shorter than
                planning takes.
        """
        if seconds > (self._transit_s or 0.0):
            self.margin = max(_LEAST_MARGIN, self.margin / _LATE_BY**_LATE_SHARE)
        elif is_put_off:
            self.margin = min(1.0, _LATE_BY * self.margin)


def _moved(mean: float | None, seconds: float) -> float:
    return seconds if mean is None else mean + _RATE * (seconds - mean)
