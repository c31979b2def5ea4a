"""Progress of a server's engine, by the answers to probes.

Owns the criterion, which is that of `supervision.server.probes`: a step was applied within the last
second, or since a probe first found none. Must not know servers; time is an argument.

An idle engine makes no steps. But a probe that finds the last one more than a second old has it
make one, so a later probe tells an idle engine from one that hangs::

    probe  step_age_s  waited      found
    ─────────────────────────────────────────────────────────────────────
    0 s    3600        -           no recent step; the probe asks for one
    5 s    4.99        5           it came, and another one is asked for
    10 s   9.99        5           no step since 5 s
    35 s   34.99       30          it hangs: no step for `STEP_TIMEOUT_S`
"""

from charonia_client import EngineState

FRESH_S = 1.0
"""Most seconds since the last step of a working engine, as in `supervision.server.probes`."""
STEP_TIMEOUT_S = 30.0
"""Timeout, as the scheduler's `min_step_deadline_s`: long prompts' steps on a CPU take seconds."""


class Progress:
    """The progress of one server's engine."""

    def __init__(self) -> None:
        self._missed_since: float | None = None  # when the first probe was sent that found no step
        self._noted_at = 0.0

    def note(self, state: EngineState, asked_at: float, now: float) -> None:
        """Note the answer to a probe.

        Args:
            asked_at: when the probe was sent. now: when its answer came. Both in seconds,
                monotonic.
        """
        self._noted_at = now
        age_s, since = state.step_age_s, self._missed_since
        if not state.is_up or (age_s is not None and age_s <= FRESH_S):
            self._missed_since = None
        elif since is None or (age_s is not None and age_s <= now - since):
            self._missed_since = asked_at

    @property
    def missed_s(self) -> float:
        """Seconds since a probe first asked for a step in vain, by the last answer; else 0."""
        return 0.0 if self._missed_since is None else self._noted_at - self._missed_since

    @property
    def hangs(self) -> bool:
        """True if the engine hung when the last answer came."""
        return self.missed_s >= STEP_TIMEOUT_S
